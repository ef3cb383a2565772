"""How a budget is spent: what a plan takes of each process that runs its share of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oocdl.config import make_settings
from oocdl.engines.engine_registry import ENGINES
from oocdl.errors import BudgetError
from oocdl.planning.calls import UnitCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import TASK_BYTES, Crew, Machine, check_capacity, machine_for
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit.plans import cut_for, unet_draft

ALONE = Machine("torch", 2, 256 << 20, 1 << 30)
"""Of a process alone, and of a crew of which one worker has come."""


@pytest.fixture
def many() -> CompiledPass:
    """A U-Net on a volume of 64³, cut for eight workers of 16 threads."""
    return cut_for(unet_draft(64), 16, 8)


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
