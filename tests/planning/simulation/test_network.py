"""Messages queue where they leave and where they arrive; a scheduler handles one task after another.

Cores are shared evenly by what runs on them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from oocdl.planning.hosts.exchange import SMALL_BYTES
from oocdl.planning.simulation.network import Clock, Cluster, Cores, Network

CLUSTER = Cluster(hosts=3, bytes_per_second=100.0, latency_seconds=0.5, scheduler_seconds=2.0)


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
    network = Network(CLUSTER)
    assert tuple(network.transfer(begins, *ends, 1000) for ends in (first, second)) == ended
    assert network.sent_bytes == [1000 * (first[0] == n) + 1000 * (second[0] == n) for n in range(3)]
    assert network.received_bytes == [1000 * (first[1] == n) + 1000 * (second[1] == n) for n in range(3)]


def test_the_scheduler_handles_tasks_in_turn() -> None:
    cluster = replace(CLUSTER, notice_seconds=1.0, pass_seconds=0.5, submit_seconds=0.25)
    around = 0.5 + 1.0 + 3 * 0.25
    assert cluster.seconds(3.0, [2, 1]) == around + 3.0 + 2 * 4  # one after the other computes, with notices
    assert replace(cluster, notice_seconds=0.0).seconds(1.0, [1, 1, 1]) == 0.5 + 3 * 0.25 + 3 * 2.0
    assert replace(cluster, hosts=1).seconds(5.0, [2]) == 5.0


def test_a_host_handles_messages_in_turn() -> None:
    network = Network(replace(CLUSTER, message_seconds=1.0, loop_bytes_per_second=10.0))
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
