"""Cores are shared evenly by what runs on them."""

from __future__ import annotations

from functools import partial

import pytest

from oocdl.planning.simulation.cores import Clock, Cores


@pytest.mark.parametrize(
    ("number", "ended"),
    [(2, [2.0, 3.0, 3.0]), (1, [5.0, 5.0, 6.0])],
    ids=["two cores", "one core"],
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
