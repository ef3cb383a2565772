"""A simulated step comes to its end, however little room there is, and keeps to it."""

from __future__ import annotations

import gc
from bisect import bisect_left
from dataclasses import replace

import pytest

import oocdl
from oocdl.planning.calls import UnitCall, copied, parts_of
from oocdl.planning.cost_model import NOMINAL, Costs
from oocdl.planning.simulation.one_process import simulate, stays
from oocdl.planning.task_graph import TaskGraph
from tests.kit.plans import plan_of


@pytest.fixture(params=["gpt", "unet"])
def plan(request: pytest.FixtureRequest) -> oocdl.Plan:
    return plan_of(request.param)


@pytest.mark.parametrize("keeps_old", [True, False])
@pytest.mark.parametrize("times", [1.0, 1.3, 5.0])
def test_a_step_ends_within_its_room(plan: oocdl.Plan, times: float, keeps_old: bool) -> None:
    compiled = plan.compiled
    room = int(times * compiled.plan.peak_unit_bytes)
    rates = replace(NOMINAL, disk_read_bytes_per_second=1e8, disk_write_bytes_per_second=1e8)
    found = simulate(compiled.graph, room, 2, 3, Costs(rates), keeps_old)
    assert found.seconds > 0 and found.peak_tier_bytes <= room
    assert len(found.units) == sum(hasattr(call, "arguments") for call in compiled.graph.calls)
    without = simulate(compiled.graph, room, 2, 3, Costs(rates), keeps_old, timeline=False)
    assert found.moments and replace(found, moments=(), units=(), transfers=()) == without


def test_less_room_never_moves_less(plan: oocdl.Plan) -> None:
    peak = plan.compiled.plan.peak_unit_bytes
    moved = [
        simulate(plan.compiled.graph, int(times * peak), 2, 3, Costs(NOMINAL)).moved_bytes
        for times in (1.2, 3.0, 1000.0)
    ]
    assert moved[0] > 0 and moved[0] >= 0.9 * moved[1] and moved[1] >= moved[2] == 0


@pytest.mark.parametrize("keeps_old", [True, False])
def test_what_surely_stays_moves_nothing(plan: oocdl.Plan, keeps_old: bool) -> None:
    """The bound is no less than what a step takes; with room for it a simulation would say the same."""
    graph = plan.compiled.graph
    bound = least_that_stays(graph)
    found = simulate(graph, bound, 2, 3, Costs(NOMINAL), keeps_old)
    assert found.moved_bytes == 0 and found.peak_tier_bytes <= bound
    assert simulate(graph, plan.compiled.plan.peak_unit_bytes, 2, 3, Costs(NOMINAL), keeps_old).moved_bytes


def least_that_stays(graph: TaskGraph) -> int:
    """The least room in which two programs at once, and three units under way, surely move nothing."""
    found = bisect_left(range(1 << 40), True, key=lambda room: stays(graph, room, 3))
    assert not stays(graph, found - 1, 3) and stays(graph, found, 3) and not stays(graph, found, 4)
    return found


def test_what_is_kept_as_it_is_may_be_read_in_each_step(plan: oocdl.Plan) -> None:
    """Such as the weights of a network that only predicts: no bound is known for it."""
    graph = plan.compiled.graph
    assert stays(graph, 1 << 40, 3)
    assert not stays(replace(graph, replaced=dict(list(graph.replaced.items())[1:])), 1 << 40, 3)


def test_chunks_of_a_simulation_are_freed_without_the_collector(plan: oocdl.Plan) -> None:
    """It is off while a plan is made, and several simulations are made for one."""
    gc.disable()
    try:
        simulate(plan.compiled.graph, int(1.2 * plan.compiled.plan.peak_unit_bytes), 2, 3, Costs(NOMINAL))
        left = [found for found in gc.get_objects() if type(found).__module__ == simulate.__module__]
    finally:
        gc.enable()
    assert not left


def test_what_is_copied_is_what_the_parts_are_together(plan: oocdl.Plan) -> None:
    for call in plan.compiled.graph.calls:
        if isinstance(call, UnitCall):
            pins = {read.first for read in call.reads if read.parts.is_one and not read.overwritten}
            numbers = range(len(call.arguments))
            expected = sum(nbytes for number, nbytes in parts_of(call) if number not in pins)
            assert copied(call, numbers, pins)[1] == expected
