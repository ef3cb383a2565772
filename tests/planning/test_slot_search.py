"""How a budget is spent by many processes and slots: what a plan takes of each, and cuts for all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oocdl.config import make_settings
from oocdl.engines.engine_registry import ENGINES
from oocdl.errors import BudgetError
from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.compiler import CompiledPass, Draft
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import TASK_BYTES, Crew, Machine, check_capacity, machine_for
from oocdl.planning.pass_plan import frozen_cuts, plan_pass, replan_pass
from oocdl.planning.slot_search import COMBINED_AT_ONCE, FEW_SLOTS
from oocdl.planning.tile_search import Limits
from oocdl.presets.unets import write_unet3d
from oocdl.storage.dataset.dataset import open_dataset
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


ALONE = Machine("torch", 2, 256 << 20, 1 << 30)
"""Of a process alone, and of a crew of which one worker has come."""


def units_that_count(machine: Machine, counts: tuple[int, ...]) -> int:
    """How many units a process is taken to have of a plan, by what the plan takes of it."""
    many = tuple(count + 8192 for count in counts)  # beyond what any plan may take by itself
    taken = machine.growth_bytes(many) - machine.growth_bytes(tuple(8192 for _ in counts))
    return taken // TASK_BYTES


def test_a_member_of_a_crew_knows_only_its_share_of_a_plan(many: CompiledPass) -> None:
    """What is counted covers what the largest member has, and is not twice that."""
    counts = many.plan.counts
    placed = place(many.graph, 8, 16)
    units = [isinstance(call, UnitCall) for call in many.graph.calls]
    largest = int(np.bincount(placed.workers[units], minlength=8).max())
    assert units_that_count(ALONE, counts) == sum(counts) == sum(units)
    crew = replace(ALONE, workers=8, sharing=8)
    assert largest <= units_that_count(crew, counts) < 2 * largest < sum(counts) / 2
    assert units_that_count(replace(ALONE, workers=8), counts) == sum(counts)  # one of eight has come


@pytest.mark.slow
def test_workers_that_get_no_work_have_no_share(many: CompiledPass) -> None:
    """Where a plan is made for fewer of them, or was."""
    plan, counts = many.plan, many.plan.counts
    eight, two = (replace(ALONE, workers=number, sharing=number) for number in (8, 2))
    assert units_that_count(replace(eight, workers=2), counts) == units_that_count(two, counts)
    assert eight.growth_bytes(counts, hosts=2) == two.growth_bytes(counts) > eight.growth_bytes(counts)
    tight = replace(eight, capacity_bytes=plan.peak_unit_bytes + eight.growth_bytes(counts))
    check_capacity(plan, tight)
    with pytest.raises(BudgetError, match="may take"):
        check_capacity(replace(plan, hosts=2), tight)


def test_a_crew_has_room_for_more_units_and_its_driver_for_all_of_them() -> None:
    settings = make_settings(memory="2GiB")
    crew = replace(ALONE, workers=8, sharing=8)
    alone, together = (machine.limits(settings, 1 << 30).most_units for machine in (ALONE, crew))
    assert alone is not None and together is not None and 5 * alone < together < 8 * alone
    driver = replace(crew, driver_bytes=1 << 30)
    assert driver.limits(settings, 1 << 30).most_units == (1 << 30) // TASK_BYTES < together


def test_a_plan_that_fits_a_crew_only_is_refused_alone(many: CompiledPass) -> None:
    plan = many.plan
    peak = max(layer.peak_bytes for layer in plan.layers)
    tight = replace(ALONE, capacity_bytes=peak + (20 << 20))
    check_capacity(plan, replace(tight, workers=8, sharing=8))
    with pytest.raises(BudgetError, match="may take"):
        check_capacity(plan, tight)


@pytest.mark.parametrize("crew", [None, Crew(threads=2, processes=2, there=2, own_bytes=100 << 20)])
def test_what_this_process_takes_to_begin_is_none_of_a_workers_budget(
    crew: Crew | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_dataset({"image": np.zeros((2, 1, 8, 8), "float32")})
    monkeypatch.setattr("oocdl.planning.machine.loaded_bytes", lambda engine: 1 << 40)
    found = machine_for(make_settings(engine="onnxruntime", memory="4GiB"), dataset, crew=crew)
    assert (found.capacity_bytes > 1 << 30) == (crew is not None)


def test_what_loading_an_engine_takes_depends_on_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "built_with_cuda" / "lib"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    without = ENGINES["torch"].least_loading_bytes("built_with_cuda")
    (package / "libtorch_cuda.so").touch()
    assert ENGINES["torch"].least_loading_bytes("built_with_cuda") > without + (100 << 20) > 200 << 20
    assert ENGINES["torch"].least_loading_bytes("not_there") == 0
