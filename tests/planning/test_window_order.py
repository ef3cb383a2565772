"""The order in which tasks start: within a window, each once, and results go when nothing needs them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocdl.planning.window_order import WindowOrder


@st.composite
def dags(draw: st.DrawFn) -> list[list[int]]:
    """Tasks by the numbers of those that they need, in an order that can be run or in any other."""
    count = draw(st.integers(1, 40))
    sources = [draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=3, unique=True)) for n in range(count)]
    sources[0] = []
    places = draw(st.one_of(st.just(list(range(count))), st.permutations(range(count))))
    found: list[list[int]] = [[] for _ in range(count)]
    for number, needed in enumerate(sources):
        found[places[number]] = [places[source] for source in needed]
    return found


@given(dags(), st.integers(1, 10), st.integers(1, 6), st.data())
def test_any_graph_runs_within_the_window(
    needs: list[list[int]], window: int, workers: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.sets(st.integers(0, len(needs) - 1)))
    order = WindowOrder(needs, wanted, window)
    running: list[int] = []
    done: set[int] = set()
    started: list[int] = []
    held: set[int] = set()
    while not order.over:
        while len(running) < workers and (number := order.next()) is not None:
            assert done.issuperset(needs[number])
            assert held.issuperset(needs[number]), "a result went while a task needs it"
            oldest = min(set(range(len(needs))) - done)
            assert not running or number < oldest + window
            started.append(number)
            running.append(number)
        finished = running.pop(data.draw(st.integers(0, len(running) - 1)))
        done.add(finished)
        useless = order.finish(finished)
        held = (held | {finished}) - set(useless)
        left = set(range(len(needs))) - done
        assert held == {n for n in done if n in wanted or any(n in needs[task] for task in left)}
    assert sorted(started) == list(range(len(needs)))
    assert order.next() is None
    assert held == wanted


def one_by_one(order: WindowOrder) -> list[int]:
    """Tasks as they start where each is over before the next."""
    started = []
    while (number := order.next()) is not None:
        started.append(number)
        order.finish(number)
    assert order.over
    return started


def test_alone_tasks_start_in_order_whenever_that_can_be_run() -> None:
    assert one_by_one(WindowOrder([[], [0], [], [1, 2]], wanted=[3])) == [0, 1, 2, 3]


def test_out_of_order_the_first_that_is_ready_goes_on() -> None:
    assert one_by_one(WindowOrder([[2], [], [3], []], wanted=[0], window_tasks=1)) == [1, 3, 2, 0]


def test_a_circle_is_told() -> None:
    order = WindowOrder([[], [2], [1]], wanted=[2])
    assert order.next() == 0
    assert order.next() is None
    order.finish(0)
    with pytest.raises(ValueError, match="circle"):
        order.next()


def test_who_waits_for_others_goes_on_beyond_the_window() -> None:
    """Others may wait for what is made there: all would stand still."""
    order = WindowOrder([[], [0], [], []], wanted=[3], window_tasks=2, arriving=[0])
    assert order.next() == 2  # beyond the window of the task that arrives
    assert order.next() == 3
    order.finish(2)
    order.finish(3)
    assert order.next() is None and not order.over  # no circle: something is still to arrive
    order.finish(0)
    assert order.next() == 1


def test_a_circle_is_told_once_all_has_arrived() -> None:
    order = WindowOrder([[], [2], [1]], wanted=[2], arriving=[0])
    order.finish(0)
    with pytest.raises(ValueError, match="circle"):
        order.next()


def test_who_waits_for_what_arrives_holds_up_no_others() -> None:
    """Two workers go on together, however far behind the task is that waits."""
    chain = [[], [0], *([] for _ in range(8))]  # 1 waits for 0, which arrives; all others wait for nobody
    order = WindowOrder(chain, wanted=[1], window_tasks=2, arriving=[0])
    for first in range(2, 10, 2):
        assert [order.next(), order.next(), order.next()] == [first, first + 1, None]
        order.finish(first)
        order.finish(first + 1)
    order.finish(0)
    assert order.next() == 1
    order.finish(1)
    assert order.over


def test_what_runs_at_once_waits_for_no_window() -> None:
    """It is due when the last of what it needs is there, and holds that until it has run."""
    order = WindowOrder([[], [], [0, 1], []], wanted=[], window_tasks=1, arriving=[1], at_once=[2])
    assert order.next() == 0 and order.finish(0) == [] and order.due() is None
    assert order.next() == 3
    assert order.finish(1) == [] and order.due() == 2 and order.due() is None
    assert sorted(order.finish(2)) == [0, 1, 2]
    assert order.finish(3) == [3] and order.over
