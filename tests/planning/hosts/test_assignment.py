"""Which worker runs what, of any graph, and which parallelism comes about, chosen or asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.graph.ir.index import Region
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.planning.calls import PickCall, UnitCall
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.hosts.placement import Placed, place
from oocdl.planning.machine import Machine
from oocdl.planning.pass_plan import plan_pass
from oocdl.planning.task_graph import TaskGraph, expand_pass, versioned_pieces
from oocdl.planning.task_key import TaskKey
from oocdl.planning.tile_search import Layering, Limits
from tests.kit.nets import write_conv_and_dense
from tests.kit.placed import HostCost, calls_of, host_costs, strips_of, worker_of
from tests.kit.plans import cut_for, drafted, exchanged, mlp_draft, unet_draft
from tests.kit.random_graphs import Maker
from tests.kit.random_layers import LAYERS
from tests.kit.random_steps import STEPS

WORKERS = (2, 3, 4, 8)


def maker_of(placed: Placed, key: TaskKey) -> int:
    """The place of the call that makes a chunk."""
    return int(placed.flat.maker[placed.flat.number[key]])


@pytest.fixture
def unet() -> Draft:
    return unet_draft(32, 8)


@pytest.fixture
def mlp() -> Draft:
    """Seven layers of 4 MiB weights, each with 8 MiB of Adam's state."""
    return mlp_draft((1024,) * 8, 64)


@pytest.mark.parametrize("workers", WORKERS)
def test_weights_and_state_are_spread_evenly(mlp: Draft, workers: int) -> None:
    """In a few large pieces as in many small ones, each worker holds its share, to a piece."""
    few = cut_for(mlp, 1, workers, batch=2)
    for compiled in (few, mlp.cut(Limits(24 << 20))) if workers <= 4 else (few,):
        costs = host_costs(exchanged(compiled, workers), workers)
        held = [cost.held_bytes for cost in costs]
        assert sum(held) == sum(compiled.graph.input_bytes.values()) > 80 << 20
        assert max(held) <= sum(held) / workers + (12 << 20)


@pytest.mark.parametrize("workers", WORKERS)
def test_weights_are_updated_where_they_live(unet: Draft, mlp: Draft, workers: int) -> None:
    """Of old weights and state nothing travels for the sake of updates."""
    for compiled in (cut_for(unet, 1, workers, batch=8), cut_for(mlp, 1, workers, channels=8)):
        made = exchanged(compiled, workers)
        updates = {compiled.graph.replaced[key] for key in compiled.graph.replaced}
        maker = worker_of(made.placed)
        for _, call in calls_of(made.placed):
            if call.key in updates and isinstance(call, UnitCall):
                for key in call.arguments:
                    if key in compiled.graph.replaced and compiled.graph.input_bytes[key] > 1024:
                        assert made.homes[key] == maker[call.key], (call.key, key)


@pytest.mark.parametrize("workers", (4, 8))
def test_in_data_parallelism_sums_and_weights_travel_once(mlp: Draft, workers: int) -> None:
    """To each weight come the sums of all others, and from it go new weights to all others."""
    compiled = cut_for(mlp, 1, workers, batch=8)
    costs = host_costs(exchanged(compiled, workers), workers)
    sent, floor = sum(cost.sent_bytes for cost in costs), 2 * (workers - 1) * (28 << 20)
    assert floor <= sent <= 1.01 * floor
    assert max(cost.received_bytes for cost in costs) < 1.5 * floor / workers


@pytest.mark.parametrize("workers", WORKERS)
def test_workers_have_equal_work(unet: Draft, workers: int) -> None:
    costs = host_costs(exchanged(cut_for(unet, 1, workers, batch=8), workers), workers)
    seconds = [cost.compute_seconds for cost in costs]
    # Eight samples on three workers: one has two.
    assert max(seconds) < 1.05 * -(-8 // workers) / 8 * sum(seconds)


@pytest.mark.parametrize("workers", (2, 4))
def test_in_space_halos_travel(unet: Draft, workers: int) -> None:
    """Of activations planes at each seam, of slabs that are a few planes thick at the bottom."""
    compiled = cut_for(unet, 1, workers, space=(4,))
    costs = host_costs(exchanged(compiled, workers), workers)
    made = sum(planned.written_bytes for planned in compiled.plan.layers)
    assert 0 < sum(cost.sent_bytes for cost in costs) < (0.15 if workers == 2 else 0.35) * made
    seconds = [cost.compute_seconds for cost in costs]
    assert max(seconds) < 1.2 * sum(seconds) / workers


def test_layers_of_large_weights_follow_each_other_over_workers() -> None:
    """Where activations are small and nothing is cut, each worker has a stage of the forward pass."""
    compiled = mlp_draft((1024,) * 9, 16).cut(Limits(24 << 20))
    made = exchanged(compiled, 2)
    maker = worker_of(made.placed)
    units = [call for call in compiled.graph.calls if isinstance(call, UnitCall)]
    forward = [maker[call.key] for call in units if call.key.layer.startswith("linear")]
    assert forward == sorted(forward) and 0 < sum(forward) < len(forward) > 4
    held = [cost.held_bytes for cost in host_costs(made, 2)]
    assert held[0] == held[1]


@pytest.mark.parametrize(("workers", "threads", "most"), ((2, 4, 5), (4, 4, 9), (2, 1, 20)))
def test_backward_of_a_pipeline_is_where_its_weights_are(workers: int, threads: int, most: int) -> None:
    """Activations cross at the seams of stages, and of 32 MiB of weights those that both sides of one read.

    Gradients of weights stay, unless one thread has all the work while another worker is idle.
    """
    compiled = mlp_draft((1024,) * 9, 16).cut(Limits(24 << 20))
    made = exchanged(compiled, workers, threads)
    assert sum(bundle.nbytes for bundle in made.bundles) < most << 20
    gradients = [item for bundle in made.bundles for item in bundle.items if item.value.startswith("grad/w")]
    assert threads == 1 or not gradients


def test_layers_of_few_units_are_spread(unet: Draft) -> None:
    """Samples of a layer in two pieces are not all on the first workers; nor is what cannot be cut."""
    compiled = cut_for(unet, 1, 4, batch=2)
    maker = worker_of(place(compiled.graph, 4))
    used = {maker[call.key] for call in compiled.graph.calls if isinstance(call, UnitCall)}
    assert used == {0, 1, 2, 3}


def test_three_of_four_planned_workers_share_the_work(unet: Draft) -> None:
    compiled = cut_for(unet, 2, 4, batch=8, space=(2,))
    costs = host_costs(exchanged(compiled, 3), 3)
    seconds = [cost.compute_seconds for cost in costs]
    assert max(seconds) < 1.25 * sum(seconds) / 3


def test_no_workers_are_refused_and_one_has_all(mlp: Draft) -> None:
    graph = mlp.cut(Limits(1 << 30)).graph
    with pytest.raises(ValueError, match="needs a worker"):
        place(graph, 0)
    assert set(place(graph, 1).workers.tolist()) == {0}


def random_graph(seed: int) -> TaskGraph:
    """The tasks of a random network with gradients, cut at random."""
    maker = Maker(np.random.default_rng(seed))
    maker.leaf()
    for _ in range(maker.integer(1, 6)):
        maker.step((*STEPS, *LAYERS))
    if not maker.weights:
        maker.pool.append(maker.build("Mul", maker.pool[-1], maker.thin(maker.pool[-1])))
    _, graph = maker.finish()
    layering = Layering(factorize(canonicalize(graph, RULES), RULES), RULES)
    extents = layering.classes.extents
    cuts = {number: maker.one(1, 2, 3, 4) for number, extent in extents.items() if extent > 1}
    plan = plan_pass(layering, Limits(1 << 40, cuts=cuts))
    return expand_pass(replace(plan, workers=maker.integer(1, 5)), versioned_pieces(plan))


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 10_000), workers=st.integers(2, 9))
def test_every_call_has_a_worker_and_reads_what_is_there_or_comes(seed: int, workers: int) -> None:
    graph = random_graph(seed)
    placed = place(graph, workers)
    maker = worker_of(placed)
    assert {call.key for call in graph.calls} <= maker.keys()
    assert set(maker.values()) <= set(range(workers))
    regions: dict[TaskKey, Region] = {key: region for found in graph.pieces.values() for region, key in found}
    strips = {strip.key: strip for strip in strips_of(placed)}
    copied = set(zip(placed.copies.calls.tolist(), placed.copies.workers.tolist(), strict=True))
    for (number, call), before in zip(calls_of(placed), graph.calls, strict=True):
        assert graph.calls[number] is before and call.key == before.key
        if isinstance(call, PickCall):
            assert maker[call.key] == maker[call.source]
        if not isinstance(call, UnitCall) or not isinstance(before, UnitCall):
            continue
        for read in call.reads:
            for place_, part in read.chunks:
                source, wanted = call.arguments[place_], before.arguments[place_]
                if source in strips:
                    strip = strips[source]
                    assert (strip.source, strip.region) == (wanted, part) and part != regions[wanted]
                    assert maker[source] == maker[wanted] != maker[call.key]
                else:
                    assert source == wanted
                    elsewhere = maker.get(source, None) not in (None, maker[call.key])
                    elsewhere &= (maker_of(placed, source), maker[call.key]) not in copied
                    assert part == regions[source] or not elsewhere


def cut_of_layers(compiled: CompiledPass) -> dict[str, frozenset[str]]:
    """Layer -> the kinds of axes in which it is cut, without their numbers."""
    names = compiled.plan.classes.names
    return {
        planned.layer.name: frozenset(
            names[cut].rstrip("0123456789") for cut, n in planned.grid.items() if n > 1
        )
        for planned in compiled.plan.layers
    }


def costs_on(compiled: CompiledPass, workers: int, threads: int) -> tuple[HostCost, ...]:
    """What each worker holds, moves and computes."""
    return host_costs(exchanged(compiled, workers, threads), workers)


def heaviest(compiled: CompiledPass) -> frozenset[str]:
    """How the layer of most arithmetic is cut."""
    return cut_of_layers(compiled)[max(compiled.plan.layers, key=lambda layer: layer.flops).layer.name]


SUITED: dict[str, Callable[[], Draft]] = {
    "batch": lambda: unet_draft(16, 8),
    "space": lambda: unet_draft(64),
    "channels": lambda: mlp_draft((1024,) * 8, 64),
}
"""A network for each kind of parallelism."""


@pytest.mark.parametrize("workers", (2, 4))
@pytest.mark.parametrize("kind", SUITED)
def test_a_kind_is_chosen_that_suits_the_network(kind: str, workers: int) -> None:
    """Many samples: batch. One volume: space. Large weights and few samples, many threads: channels."""
    threads = 8 // workers if kind == "channels" else 1
    compiled = cut_for(SUITED[kind](), threads, workers)
    assert heaviest(compiled) == {kind}
    seconds = [cost.compute_seconds for cost in costs_on(compiled, workers, threads)]
    assert max(seconds) < 1.6 * sum(seconds) / workers


def test_what_nothing_can_cut_becomes_a_pipeline() -> None:
    """One sample, weights that do not fit together: whole layers are on one worker or the other."""
    draft = mlp_draft((1024,) * 9, 1)
    machine = Machine("torch", 1, 256 << 20, 128 << 20, workers=2)
    compiled = draft.cut(machine.limits(draft.request.settings, 32 << 20))
    kinds = cut_of_layers(compiled)
    computing = [name for name in kinds if not name.startswith("update")]
    assert len(computing) > 4 and not any(kinds[name] for name in computing)
    maker = worker_of(place(compiled.graph, 2, 1))
    assert {maker[key] for key in maker if key.layer in computing} == {0, 1}
    held = [cost.held_bytes for cost in costs_on(compiled, 2, 1)]
    assert max(held) <= sum(held) / 2 + (12 << 20)


def test_a_mixture_is_chosen() -> None:
    """Wide layers of many samples: some in batch and channels, some in one of these, updates in channels."""
    compiled = cut_for(mlp_draft((2048,) * 3, 2048), 4, 4)
    kinds = set(cut_of_layers(compiled).values())
    assert {frozenset({"batch"}), frozenset({"channels"}), frozenset({"batch", "channels"})} <= kinds
    seconds = [cost.compute_seconds for cost in costs_on(compiled, 4, 4)]
    assert max(seconds) < 1.2 * sum(seconds) / 4


def test_a_mixture_that_is_asked_for(tmp_path: Path) -> None:
    """Convolutions and what follows in batch and channels; weights are updated in channels."""
    model, data = write_conv_and_dense(tmp_path, samples=64, size=64, width=1024)
    draft = drafted(model, data, loss="cross_entropy", batch_size=64)
    compiled = cut_for(draft, 4, 2, batch=4, channels=4)
    kinds = cut_of_layers(compiled)
    assert kinds["conv0"] == kinds["dense0/einsum"] == {"batch", "channels"}
    assert kinds["update/d0/next"] == {"channels"}
    held = [cost.held_bytes for cost in costs_on(compiled, 2, 4)]
    assert max(held) < 1.2 * sum(held) / 2
