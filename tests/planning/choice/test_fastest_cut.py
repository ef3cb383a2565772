"""The search for the fastest cuts that a budget allows."""

from __future__ import annotations

from oocdl.planning.choice.budget import cut, fastest_cut, predict_pass
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Machine
from tests.kit.plans import mlp_draft


def test_large_units_are_cut_along_classes_that_only_small_ones_need() -> None:
    """A perceptron whose samples alone are cut reads all weights for each piece of them."""
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
