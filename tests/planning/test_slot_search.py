"""Cuts for many slots: work for all of them where the network has it, and the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.pass_plan import frozen_cuts, plan_pass, replan_pass
from oocdl.planning.slot_search import COMBINED_AT_ONCE, FEW_SLOTS
from oocdl.planning.tile_search import Limits
from oocdl.presets.unets import write_unet3d
from tests.kit import nets
from tests.kit.machine import THIS, Small, fit
from tests.kit.placed import ideal_seconds
from tests.kit.plans import cut_for, unet_draft
from tests.kit.settings import EXACT


@pytest.fixture
def unet() -> Draft:
    """A U-Net on a volume of 64³."""
    return unet_draft(64)


@pytest.fixture
def many(unet: Draft) -> CompiledPass:
    """The same, cut for eight workers of 16 threads."""
    return cut_for(unet, 16, 8)


@pytest.mark.slow
def test_speedup_grows_with_slots(unet: Draft) -> None:
    """As far as the network allows; one class alone has work for 8, and for 128 nothing was cut at all."""
    one = ideal_seconds(cut_for(unet, 1, 0).graph, 1)
    found = {}
    for threads, workers in ((8, 0), (8, 8), (16, 8)):
        slots = threads * max(workers, 1)
        found[slots] = one / ideal_seconds(cut_for(unet, threads, workers).graph, slots)
    assert sorted(found.values()) == list(found.values())
    assert found[8] > 5 and found[64] > 18 and found[128] > 20, found


def test_space_is_cut_along_several_axes(unet: Draft, many: CompiledPass) -> None:
    plan = many.plan
    names = {plan.classes.names[cut] for planned in plan.layers for cut, n in planned.grid.items() if n > 1}
    assert {"space0", "space1"} <= names
    assert not {"space1"} & {unet.layering.classes.names[cut] for cut in cut_for(unet, 2, 0).plan.cuts}


def test_cuts_that_were_asked_for_are_kept_and_no_other_class_is_cut(unet: Draft) -> None:
    plan = plan_pass(unet.layering, Limits(1 << 30, 64, {"space": (2, 4)}, workers=8))
    least = {
        cut: n for cut, name in plan.classes.names.items() if (n := {"space0": 2, "space1": 4}.get(name))
    }
    assert set(plan.cuts) == set(least)
    assert all(planned.grid[cut] >= least[cut] for planned in plan.layers for cut in planned.grid)


def test_a_plan_for_which_there_is_no_room_is_made_for_fewer_slots(unet: Draft) -> None:
    many = plan_pass(unet.layering, Limits(1 << 30, 128, workers=8))
    fewer = plan_pass(unet.layering, Limits(1 << 30, 128, most_units=many.tasks // 2, workers=8))
    assert FEW_SLOTS < fewer.tasks <= many.tasks // 2


def test_a_stored_plan_is_made_again(unet: Draft, many: CompiledPass) -> None:
    plan = many.plan
    again = replan_pass(unet.layering, frozen_cuts(plan))
    assert (again.slots, again.workers) == (plan.slots, plan.workers) == (128, 8)
    assert again.numerics() == plan.numerics()


def test_no_worker_of_the_plan_waits_for_the_sums_of_another(unet: Draft) -> None:
    """Units that add to one partial sum are of one run of shards, of as many as there are workers."""
    workers = 4
    compiled = unet.cut(Limits(1 << 30, 8, {"space": (16, 8)}, workers=workers))
    count = {planned.layer.name: len(planned.units) for planned in compiled.plan.layers}
    added = [
        (call.key, call.arguments[found[0]])
        for call in compiled.graph.calls
        if isinstance(call, UnitCall)
        for found in call.partial_sums
        if found is not None
    ]
    assert added
    for key, before in added:
        each = count[key.layer] / workers
        assert key.number // each == before.number // each, (key, before)


def test_many_sums_are_combined_in_groups(many: CompiledPass) -> None:
    combines = [call for call in many.graph.calls if isinstance(call, CombineCall)]
    known = {call.key for call in combines}
    nested = [
        call
        for call in combines
        if any(key._replace(value=call.key.value) in known for key in call.arguments)
    ]
    assert nested
    assert max(len(call.counts) for call in combines) <= COMBINED_AT_ONCE


@pytest.mark.parametrize("slots", [pytest.param((8, 0), marks=pytest.mark.slow), (5, 7)])
def test_losses_and_weights_are_those_of_a_plan_for_one_slot(slots: tuple[int, int], tmp_path: Path) -> None:
    """A batch norm and gradients whose partial sums are combined in groups, in float64."""
    model = write_unet3d(tmp_path / "unet.onnx", base=2, depth=1, classes=2, norm="batch")
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(2, 16))
    options = {**EXACT, "threads": 1, "steps": 1, "batch_size": 2, "loss": "dice_ce", "seed": 5}
    cuts = {"parallel": {"batch": 2, "space": (8, 4)}}
    alone = fit(model, data, machine=THIS, workdir=tmp_path / "alone", **options)
    many = fit(model, data, machine=Small(slots=slots), workdir=tmp_path / "many", **options, **cuts)
    assert many.plan.compiled.plan.slots == slots[0] * max(slots[1], 1)
    for name in alone.weights:
        np.testing.assert_allclose(many.weights[name][...], alone.weights[name][...], rtol=1e-9, atol=1e-10)
    for one, other in zip(alone.history, many.history, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
