"""Which parallelism comes about: batch, space, channels, layers, and mixtures, chosen or asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import Machine
from tests.kit.nets import write_conv_and_dense
from tests.kit.placed import HostCost, host_costs, worker_of
from tests.kit.plans import cut_for, drafted, exchanged, mlp_draft, unet_draft


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
