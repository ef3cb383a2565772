"""The fastest cuts that a budget allows, and how many workers get work: what travels counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oocdl.planning.choice import budget, host_search
from oocdl.planning.choice.budget import cut, fastest_cut, predict_pass
from oocdl.planning.choice.pass_kinds import compile_within
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.cost_model import NOMINAL, call_seconds
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import Machine
from oocdl.planning.pass_plan import frozen_cuts
from oocdl.planning.simulation.estimate import estimated_seconds
from oocdl.planning.simulation.hosts import simulate_exchange
from oocdl.planning.simulation.network import Cluster
from oocdl.planning.simulation.one_process import simulate
from oocdl.planning.slot_search import least_work_seconds, travelling_seconds, weight_bytes, weight_cuts
from tests.kit.plans import exchanged, mlp_draft, unet_draft

THREADS = 2
ROOM = 32 << 30
LAYERS, WIDTH, SAMPLES = 6, 2048, 128


def machine_of(workers: int, threads: int = THREADS, room: int = ROOM) -> Machine:
    return Machine("torch", threads, 256 << 20, room, workers=workers)


def found_for(draft: Draft, machine: Machine, **parallel: object) -> CompiledPass:
    """The plan that is chosen; ``parallel``: the cuts that are asked for."""
    settings = replace(draft.request.settings, parallel=parallel or "auto")
    return compile_within(replace(draft, request=replace(draft.request, settings=settings)), machine)


def cut_for_all(draft: Draft, machine: Machine) -> CompiledPass:
    """The plan for all workers, as if nothing had to travel."""
    return compile_within(draft, machine, hosts=machine.workers)


def over(compiled: CompiledPass, machine: Machine) -> Exchange:
    return exchanged(compiled, machine.workers, machine.threads)


def cluster_of(machine: Machine) -> Cluster:
    return Cluster(hosts=machine.workers, bytes_per_second=1.25e9)


def simulated_seconds(compiled: CompiledPass, machine: Machine) -> float:
    going = over(compiled, machine)
    return simulate_exchange(
        going, cluster_of(machine), machine.capacity_bytes, machine.threads, NOMINAL
    ).seconds


def moved_bytes(compiled: CompiledPass, machine: Machine) -> int:
    return int(over(compiled, machine).columns[2].sum())


@pytest.fixture(scope="module")
def volume() -> Draft:
    """One volume of 64³, which is not worth eight hosts."""
    return unet_draft(64)


@pytest.fixture(scope="module")
def spread(volume: Draft) -> CompiledPass:
    """The plan that is chosen for it and eight workers."""
    return found_for(volume, machine_of(8))


def test_workers_with_which_a_step_would_take_longer_get_no_work(volume: Draft, spread: CompiledPass) -> None:
    machine = machine_of(8)
    before, now = cut_for_all(volume, machine), spread
    assert now.plan.hosts is not None and 1 <= now.plan.hosts < 8
    assert set(over(now, machine).placed.workers.tolist()) == set(range(now.plan.hosts))
    assert simulated_seconds(now, machine) < 0.6 * simulated_seconds(before, machine)


def test_workers_that_are_not_tried_would_not_be_worth_it(
    volume: Draft, spread: CompiledPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_search, "_least_seconds", lambda *_: 0.0)
    every = found_for(volume, machine_of(8))
    assert (every.plan.numerics(), every.plan.hosts) == (spread.plan.numerics(), spread.plan.hosts)


def test_a_pass_of_much_work_is_spread_over_all() -> None:
    draft = unet_draft(64, 8)
    assert found_for(draft, machine_of(2)).plan.hosts is None


def test_cuts_that_are_asked_for_are_spread_over_all(volume: Draft) -> None:
    assert found_for(volume, machine_of(8), space=(4, 2)).plan.hosts is None


def test_whole_layers_are_chosen_where_cuts_would_move_more() -> None:
    """Weights that do not fit together, two workers: by batch all gradients and weights would cross."""
    machine = machine_of(2, room=105 << 20)
    draft = mlp_draft((1024,) * 9, 16)
    before, now = cut_for_all(draft, machine), found_for(draft, machine)
    assert now.plan.hosts is None
    assert moved_bytes(before, machine) >= 38 << 20 and moved_bytes(now, machine) <= 11 << 20
    assert simulated_seconds(now, machine) < simulated_seconds(before, machine)


@pytest.mark.parametrize("bound", (True, False))
def test_nobody_is_left_out_where_fewer_would_spill(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bound:  # then each is simulated
        monkeypatch.setattr(host_search, "held_bytes", lambda _: 0)
    draft = mlp_draft((1024,) * 8, 64)
    assert found_for(draft, machine_of(4, 4)).plan.hosts == 1
    assert found_for(draft, machine_of(4, 4, 60 << 20)).plan.hosts is None


def test_a_stored_plan_is_for_as_many_workers_again(volume: Draft, spread: CompiledPass) -> None:
    again = compile_within(volume, machine_of(8), frozen_cuts(spread.plan))
    assert again.plan.hosts == again.graph.hosts == spread.plan.hosts
    assert again.plan.numerics() == spread.plan.numerics()
    fewer = place(again.graph, 2, THREADS)
    assert set(fewer.workers.tolist()) <= {0, 1}


@pytest.mark.parametrize("room", (pytest.param(105 << 20, marks=pytest.mark.slow), 160 << 20, ROOM))
def test_what_is_not_simulated_is_planned_as_if_it_were(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, machine = mlp_draft((1024,) * 9, 16), machine_of(2, room=room)
    simulated: list[int] = []

    def predict(*args: object, **options: object) -> object:
        simulated.append(1)
        return simulate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(budget, "simulate", predict)
    short, tried = found_for(draft, machine), len(simulated)
    monkeypatch.setattr(budget, "stays", lambda *_: False)
    every = found_for(draft, machine)
    assert (short.plan.numerics(), short.plan.hosts) == (every.plan.numerics(), every.plan.hosts)
    assert (tried < len(simulated) - tried) == (room > 105 << 20) and (tried > 0) == (room < ROOM)


def test_the_plan_of_one_process_says_nothing_of_hosts(volume: Draft) -> None:
    found = found_for(volume, machine_of(0))
    assert found.plan.hosts is None and "hosts" not in frozen_cuts(found.plan)


ESTIMATED: dict[str, tuple[Any, int, int]] = {
    "volume": (lambda: unet_draft(64), 2, 8),
    "batch": (lambda: unet_draft(32, 8), 1, 2),
    "wide": (lambda: mlp_draft((2048,) * 3, 2048), 2, 8),
}
"""A network, threads of a worker, and how many workers are tried in each run of the tests."""


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(kind, workers, marks=[] if workers == quick else pytest.mark.slow)
        for kind, (_, _, quick) in ESTIMATED.items()
        for workers in (1, 2, 4, 8)
    ],
)
def test_estimates_are_near_what_is_simulated(kind: str, workers: int) -> None:
    make, threads, _ = ESTIMATED[kind]
    draft, machine = make(), machine_of(workers, threads)
    compiled = cut_for_all(draft, machine)
    found, _ = estimated_seconds(over(compiled, machine), cluster_of(machine), machine.threads)
    assert 0.6 < found / simulated_seconds(compiled, machine) < 1.5


@pytest.fixture(scope="module")
def wide() -> Draft:
    return mlp_draft((WIDTH,) * (LAYERS + 1), SAMPLES)


def test_layers_of_a_perceptron_take_turns(wide: Draft) -> None:
    first, second = weight_cuts(wide.layering)
    weights = {name: wide.layering.classes.of_axes[name] for name in (f"w{n}" for n in range(LAYERS))}
    for cuts in (first, second):
        assert [len(set(axes) & set(cuts)) for axes in weights.values()] == [1] * LAYERS
    assert weight_bytes(wide.layering) == LAYERS * WIDTH * WIDTH * 4


def test_what_travels_at_least_are_partial_sums_of_every_second_layer(wide: Draft) -> None:
    """Each worker makes all channels of them, forward and backward, but for the loss's few numbers."""
    first, _ = weight_cuts(wide.layering)
    activation = SAMPLES * WIDTH * 4
    found = travelling_seconds(wide.layering, first, 3, 1.0) / (2 * activation)
    assert LAYERS / 2 <= found <= LAYERS / 2 + LAYERS / 2 + 1


def test_the_least_work_of_cut_weights_is_about_that_of_their_plan(wide: Draft) -> None:
    """By it most such plans need not be made."""
    cuts, _ = weight_cuts(wide.layering)
    found = fastest_cut(replace(wide, side=0), machine_of(2))
    assert found is not None
    work = sum(call_seconds(found.compiled.graph.calls))
    assert 0.8 * work < least_work_seconds(wide.layering, cuts, 2) <= work


@pytest.mark.parametrize("workers", (2, 4))
def test_a_wide_perceptron_does_not_send_its_weights(
    wide: Draft, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of(workers)
    now = found_for(wide, machine)
    names = now.plan.classes.names
    assert {names[cut][:8] for cut in now.plan.cuts} == {"channels"}
    assert 0 < moved_bytes(now, machine) < 0.3 * moved_bytes(cut_for_all(wide, machine), machine)
    monkeypatch.setattr(host_search, "MOST_WEIGHT_HOSTS", 0)
    before = found_for(wide, machine)
    assert simulated_seconds(now, machine) < 0.8 * simulated_seconds(before, machine)


def test_few_weights_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_search, "weight_cuts", lambda _: pytest.fail("tried"))
    found_for(unet_draft(64), machine_of(2))


def test_large_units_are_cut_along_classes_that_only_small_ones_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A perceptron whose samples alone are cut reads all weights for each piece of them."""
    monkeypatch.setattr(budget, "PIECE_SECONDS", 0.0)  # each thread runs units of its own
    draft = mlp_draft((256, 1024, 1024, 1024, 256), 256)
    machine = Machine("torch", 2, 256 << 20, 70 << 20)
    found = fastest_cut(draft, machine)
    plain = cut(draft, machine, machine.unit_bytes)
    assert found is not None and isinstance(plain, CompiledPass)
    assert set(plain.plan.cuts) < set(found.compiled.plan.cuts)
    assert found.compiled.plan.peak_unit_bytes > machine.unit_bytes / 2
    simulated = predict_pass(plain.graph, machine, machine.capacity_bytes, keeps_old=True)
    assert found.simulated.seconds < 0.8 * simulated.seconds
    assert found.moved_bytes < simulated.moved_bytes
