"""Steps over hosts take the seconds that one counts by hand; messages queue, cores are shared evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.graph.ir.index import Region, whole
from oocdl.graph.ir.program import Operand, make_program
from oocdl.graph.ir.region_index import RegionIndex
from oocdl.graph.partition.unit import Unit
from oocdl.planning.calls import Read, UnitCall
from oocdl.planning.cost_model import (
    BEGIN_SECONDS,
    GATHER_SECONDS,
    NOMINAL,
    SCHEDULING_SECONDS,
    SLOWDOWN_FACTOR,
    TASK_SECONDS,
    UNIT_SECONDS,
    Costs,
    Rates,
)
from oocdl.planning.hosts import placement
from oocdl.planning.hosts.exchange import SMALL_BYTES, exchange, homes_of
from oocdl.planning.hosts.flat_pass import flatten
from oocdl.planning.hosts.local_order import local_order
from oocdl.planning.hosts.placement import placed_on
from oocdl.planning.hosts.share import shares_of
from oocdl.planning.simulation.hosts import SimulatedHosts, simulate_exchange, simulate_hosts
from oocdl.planning.simulation.network import EVENT_LOOP_SHARE, Clock, Cluster, Cores, Network
from oocdl.planning.simulation.one_process import simulate
from oocdl.planning.simulation.process import SAMPLE_SECONDS
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind, stored_key
from tests.kit.plans import exchanged, plan_of

NARROW = Cluster(hosts=3, bytes_per_second=100.0, latency_seconds=0.5, scheduler_seconds=2.0)


@pytest.mark.parametrize(
    ("begins", "first", "second", "ended"),
    [
        (1.0, (0, 1), (1, 2), (1.0 + 0.5 + 10.0, 11.5)),  # latency and bytes
        (0.0, (0, 1), (0, 2), (10.5, 20.5)),  # of one sender: the second leaves at 10
        (0.0, (0, 2), (1, 2), (10.5, 20.5)),  # to one receiver
        (0.0, (0, 1), (1, 0), (10.5, 10.5)),  # a host sends and receives at once
    ],
)
def test_messages_queue_where_they_leave_and_where_they_arrive(
    begins: float, first: tuple[int, int], second: tuple[int, int], ended: tuple[float, float]
) -> None:
    network = Network(NARROW)
    assert tuple(network.transfer(begins, *ends, 1000) for ends in (first, second)) == ended
    assert network.sent_bytes == [1000 * (first[0] == n) + 1000 * (second[0] == n) for n in range(3)]
    assert network.received_bytes == [1000 * (first[1] == n) + 1000 * (second[1] == n) for n in range(3)]


def test_the_scheduler_handles_tasks_in_turn() -> None:
    cluster = replace(NARROW, notice_seconds=1.0, pass_seconds=0.5, submit_seconds=0.25)
    around = 0.5 + 1.0 + 3 * 0.25
    assert cluster.seconds(3.0, [2, 1]) == around + 3.0 + 2 * 4  # one after the other computes, with notices
    assert replace(cluster, notice_seconds=0.0).seconds(1.0, [1, 1, 1]) == 0.5 + 3 * 0.25 + 3 * 2.0
    assert replace(cluster, hosts=1).seconds(5.0, [2]) == 5.0


def test_a_host_handles_messages_in_turn() -> None:
    network = Network(replace(NARROW, message_seconds=1.0, loop_bytes_per_second=10.0))
    given = (0.0, 0, 0), (0.5, 0, 5), (0.5, 1, 0)  # when, host, bytes
    assert [network.handle(*one) for one in given] == [1.0, 2.5, 1.5]
    assert network.loop_seconds == [2.5, 1.0, 0.0]


def test_small_messages_overtake_large_ones_which_take_longer_for_it() -> None:
    network = Network(Cluster(hosts=2, bytes_per_second=SMALL_BYTES, latency_seconds=0.0))
    assert network.transfer(0.0, 0, 1, 10 * SMALL_BYTES) == 10
    assert network.transfer(1.0, 0, 1, SMALL_BYTES) == 2
    assert network.transfer(1.0, 0, 1, SMALL_BYTES) == 3
    assert network.transfer(1.0, 0, 1, 2 * SMALL_BYTES) == 10 + 1 + 1 + 2


@pytest.mark.parametrize(
    ("number", "ended"), [(2, [2.0, 3.0, 3.0]), (1, [5.0, 5.0, 6.0])], ids=["two cores", "one core"]
)
def test_what_runs_has_equal_shares(number: int, ended: list[float]) -> None:
    clock, found = Clock(), list[float]()
    cores = Cores(clock, number, 0.0)
    for begins, seconds in ((0.0, 2.0), (0.0, 3.0), (2.0, 1.0)):
        clock.at(begins, partial(cores.spend, seconds, lambda: found.append(clock.now)))
    clock.run()
    assert found == pytest.approx(ended)


def test_what_ends_begins_what_is_next() -> None:
    clock, found = Clock(), list[float]()
    cores = Cores(clock, 1, 0.0)
    clock.at(1.0, lambda: cores.spend(1.0, lambda: cores.spend(2.0, lambda: found.append(clock.now))))
    clock.run()
    assert found == [4.0]


def test_an_event_loop_takes_its_share_where_all_cores_are_busy() -> None:
    clock, found = Clock(), list[float]()
    cores = Cores(clock, 2, 0.5)
    for seconds in (3.0, 4.5):  # three quarters of a core each, and then a whole one
        cores.spend(seconds, lambda: found.append(clock.now))
    clock.run()
    assert found == pytest.approx([4.0, 5.5])


SHAPE = (256,)
BYTES = 4 * SHAPE[0]
RATES = Rates({}, {}, 1e30, 0.0, 1.0, 1e30, 1e30, 0)
"""Each program takes a second, and nothing else takes any."""
UNIT = TASK_SECONDS + SLOWDOWN_FACTOR
CLUSTER = Cluster(
    hosts=2,
    bytes_per_second=BYTES / 10,
    latency_seconds=0.5,
    scheduler_seconds=1.0,
    submit_seconds=0.0,
    message_seconds=0.0,
    wake_seconds=0.0,
    loop_bytes_per_second=inf,
    task_seconds=0.0,
    pass_seconds=0.0,
    notice_seconds=10.0,
    shares_cores=False,
)


def unit(name: str, number: int) -> TaskKey:
    return TaskKey(TaskKind.UNIT, name, "", number)


def step(calls: Sequence[tuple[TaskKey, Sequence[TaskKey]]], updates: Mapping[TaskKey, TaskKey]) -> TaskGraph:
    """Units that each copy their arguments, all of one shape; ``updates``: what the next step reads."""
    region: Region = whole(SHAPE)
    program = make_program((0,), (SHAPE,), ("float32",), (), (Operand(0, None, SHAPE, None),))
    _, parts = RegionIndex([region]).overlaps(region)
    readers: dict[TaskKey, list[int]] = {}
    for position, (_, arguments) in enumerate(calls):
        for argument in arguments:
            readers.setdefault(argument, []).append(position)
    made = [
        UnitCall(
            key=key,
            position=position,
            unit=Unit(0, (position,), (), program, ((key.layer, region),), (1,)),
            arguments=tuple(arguments),
            reads=tuple(Read("x", region, "float32", parts, n) for n in range(len(arguments))),
            partial_sums=(None,),
            combines=(None,),
            dtypes=("float32",),
            uses=(tuple(readers.get(key, ())),),
            buffer_bytes=(len(arguments) + 1) * 4096,
            scratch_bytes=0,
        )
        for position, (key, arguments) in enumerate(calls)
    ]
    inputs = tuple(updates)
    return TaskGraph(
        calls=tuple(made),
        pieces={"x": tuple((region, key) for key in (*inputs, *(key for key, _ in calls)))},
        inputs=inputs,
        outputs=(calls[-1][0], *updates.values()),
        input_uses={key: tuple(readers.get(key, ())) for key in inputs},
        input_bytes=dict.fromkeys(inputs, BYTES),
        replaced=dict(updates),
    )


def over(graph: TaskGraph, hosts: Mapping[TaskKey, int], cluster: Cluster = CLUSTER) -> SimulatedHosts:
    placed = placed_on(flatten(graph), np.array([hosts[call.key] for call in graph.calls]))
    going = exchange(placed, homes_of([placed]), cluster.hosts)
    return simulate_exchange(going, cluster, 1 << 20, 1, RATES)


A, A1, B, C = unit("a", 0), unit("a", 1), unit("b", 0), unit("c", 0)
CHAIN, OF_TWO = step([(A, ()), (B, (A,))], {}), {A: 0, B: 1}
APART, EACH = step([(A, ()), (A1, ())], {}), {A: 0, A1: 1}
QUIET = replace(CLUSTER, scheduler_seconds=0.0, notice_seconds=0.0)
SHARED = replace(QUIET, shares_cores=True)
CHARGED = BEGIN_SECONDS + GATHER_SECONDS + UNIT_SECONDS + SCHEDULING_SECONDS + 1.0
"""What a unit takes where cores are shared, and nothing waits for it."""


def test_what_is_made_elsewhere_is_sent_as_soon_as_it_is_made() -> None:
    found = over(CHAIN, OF_TWO)
    # Both begin at 10, and the second asks at once. The scheduler hears of the ends, and tells the driver.
    done = 10 + UNIT + 0.5 + 10 + UNIT
    assert found.seconds == pytest.approx(done + 10 + 1 + 10)
    slow = over(CHAIN, OF_TWO, replace(CLUSTER, bytes_per_second=BYTES / 50))
    assert slow.seconds == pytest.approx(10 + UNIT + 0.5 + 50 + UNIT + 10 + 1 + 10)
    assert (found.sent_bytes, found.received_bytes) == ((BYTES, 0), (0, BYTES))
    assert found.tasks == 2
    assert found.busy_shares == pytest.approx((UNIT / found.seconds,) * 2)
    assert found.limit == "dependencies"


SECONDS: dict[str, tuple[TaskGraph, Mapping[TaskKey, int], Cluster, float]] = {
    "where cores are shared, what slows programs is charged by itself": (
        CHAIN, {A: 0, B: 0}, replace(CLUSTER, hosts=1, shares_cores=True),
        2 * CHARGED / (1 - EVENT_LOOP_SHARE)),
    "one bundle takes all that a layer makes for a host": (
        step([(A, ()), (A1, ()), (B, (A, A1))], {}), {A: 0, A1: 0, B: 1}, QUIET, 2 * UNIT + 0.5 + 20 + UNIT),
    # They go there and back again, which one bundle for all of them could not.
    "partial sums within a layer travel one by one": (
        step([(A, ()), (A1, (A,)), (unit("a", 2), (A1,))], {}), {A: 0, A1: 1, unit("a", 2): 0}, QUIET,
        3 * UNIT + 2 * (0.5 + 10)),
    "event loops take their time for each message": (  # the asking takes 2.5
        CHAIN, OF_TWO, replace(QUIET, message_seconds=1.0), max(UNIT, 2.5) + 1 + 0.5 + 10 + 1 + UNIT),
    "event loops take their time for bytes": (
        CHAIN, OF_TWO, replace(QUIET, loop_bytes_per_second=BYTES), UNIT + 1 + 0.5 + 10 + 1 + UNIT),
    "independent hosts compute at once and wait for nobody": (APART, EACH, QUIET, UNIT),
    "all tasks are handed in before the first begins": (
        APART, EACH, replace(QUIET, submit_seconds=3.0), 2 * 3.0 + UNIT),
    "the driver takes its time before and after": (
        APART, EACH, replace(QUIET, pass_seconds=3.0), 3.0 + UNIT),
}  # fmt: skip


@pytest.mark.parametrize("what", SECONDS)
def test_seconds_are_those_that_one_counts(what: str) -> None:
    graph, hosts, cluster, seconds = SECONDS[what]
    found = over(graph, hosts, cluster)
    assert found.seconds == pytest.approx(seconds)


def test_a_large_bundle_is_asked_for_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oocdl.planning.simulation.hosts.SMALL_BYTES", BYTES - 1)
    monkeypatch.setattr("oocdl.planning.simulation.hosts.DIRECT_BYTES", BYTES - 1)
    found = over(CHAIN, OF_TWO, QUIET)
    assert found.seconds == pytest.approx(2 * UNIT + 3 * 0.5 + 10)  # it is there; give it; here it is


def test_tasks_of_the_cluster_take_of_a_core() -> None:
    one, other = (over(APART, EACH, replace(SHARED, task_seconds=task)).seconds for task in (0.0, 0.1))
    assert other - one == pytest.approx(0.1 / (1 - EVENT_LOOP_SHARE))


def test_event_loops_wait_for_a_core_where_all_of_them_compute() -> None:
    graph = step([(A, ()), (C, ()), (B, (A,))], {})
    one, other = (
        over(graph, {**OF_TWO, C: 0}, replace(QUIET, wake_seconds=wake)).seconds for wake in (0.0, 0.25)
    )
    # Of the two event loops that the bundle passes, that of the sender has to wait: it computes meanwhile.
    assert other - one == pytest.approx(0.25)


def test_weights_are_fetched_from_where_the_step_before_has_made_them() -> None:
    weight = stored_key("w", 0)
    graph = step([(A, (weight,)), (B, (A,))], {weight: B})
    found = over(graph, OF_TWO)
    assert found.sent_bytes == (BYTES, BYTES)  # what was made of the weight, and the weight of the next step
    assert over(graph, {A: 0, B: 0}).sent_bytes == (0, 0)


def test_what_is_slow_is_named() -> None:
    assert over(CHAIN, OF_TWO, replace(CLUSTER, bytes_per_second=1.0)).limit == "network"
    assert over(CHAIN, OF_TWO, replace(CLUSTER, scheduler_seconds=100.0)).limit == "scheduler"
    assert over(APART, EACH, QUIET).limit == "compute"


@pytest.fixture(params=["resnet", "unet"])
def plan(request: pytest.FixtureRequest) -> oocdl.Plan:
    return plan_of(request.param)


@pytest.mark.parametrize("times", [1.2, 1000.0])
def test_one_host_is_one_process(plan: oocdl.Plan, times: float) -> None:
    room = int(times * plan.compiled.plan.peak_unit_bytes)
    one = simulate(plan.compiled.graph, room, 2, 3, Costs(NOMINAL))
    found = simulate_hosts(plan.compiled, replace(CLUSTER, hosts=1), room, 2, NOMINAL)
    assert found.seconds == pytest.approx(one.seconds, rel=1e-12)
    assert found.peak_tier_bytes == (one.peak_tier_bytes,)
    assert found.spilled_bytes == (one.moved_bytes,)


def test_each_sample_that_is_read_takes_its_time_once(plan: oocdl.Plan) -> None:
    def seconds(compiled: Any) -> float:
        cluster = Cluster(hosts=1, bytes_per_second=1e9)
        return simulate_hosts(compiled, cluster, 1 << 40, 1, NOMINAL).seconds

    more = seconds(plan.compiled) - seconds(replace(plan.compiled, feeds={}))
    # Four samples, or four pieces of one, of input and labels; halos make more regions of these.
    assert 8 * SAMPLE_SECONDS <= more <= 24 * SAMPLE_SECONDS


@pytest.mark.parametrize(("hosts", "times"), [(2, 1.5), (3, 1000.0), (12, 1000.0)])
def test_every_host_comes_to_its_end_within_its_room(plan: oocdl.Plan, hosts: int, times: float) -> None:
    room = int(times * plan.compiled.plan.peak_unit_bytes)
    cluster = Cluster(hosts=hosts, bytes_per_second=1e9)
    found = simulate_hosts(plan.compiled, cluster, room, 2, NOMINAL)
    assert 0 < found.seconds < inf and max(found.peak_tier_bytes) <= room
    assert sum(found.sent_bytes) == sum(found.received_bytes) > 0


def test_every_call_is_done_by_one_host(plan: oocdl.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no sums are combined by several, each for itself."""
    monkeypatch.setattr(placement, "MOST_COPYING_WORKERS", 0)
    compiled = plan.compiled
    going = exchanged(compiled, 3)
    orders = [local_order(share) for share in shares_of(going, range(3))]
    done = [one.key for order in orders for one in order.steps if one.number >= 0]
    assert sorted(done) == sorted(call.key for call in compiled.graph.calls)
    (alone,) = shares_of(going, [1])
    assert list(map(repr, local_order(alone).steps)) == list(map(repr, orders[1].steps))
