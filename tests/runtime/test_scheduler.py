"""Our own get: order, window, errors, and letting go of results."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from operator import add
from typing import Any, ClassVar

import pytest
from dask._task_spec import DataNode, Task, TaskRef

from oocdl.host import main_heap
from oocdl.host.main_heap import MainHeapThreads
from oocdl.runtime.scheduler import Running, get
from tests.kit.commands import python


def test_results_by_key_and_by_nested_lists() -> None:
    graph: dict[Any, Any] = {"a": 1, "b": (add, "a", 2), ("c", 0): (add, "b", "a")}
    assert get(graph, "b") == 3
    assert get(graph, [["a", "b"], [("c", 0)]]) == ((1, 3), (4,))


def test_tasks_start_in_the_order_of_the_graph() -> None:
    started: list[int] = []

    def note(number: int) -> int:
        started.append(number)
        return number

    graph = {("t", n): Task(("t", n), note, n) for n in range(50)}
    get(graph, [("t", n) for n in range(50)], workers=1)
    assert started == list(range(50))


def test_nothing_starts_beyond_the_window() -> None:
    """The first task is slow: others may run ahead of it by the window and no more."""
    started: list[int] = []
    release = threading.Event()

    def note(number: int) -> None:
        started.append(number)
        if number == 0:
            release.wait(10)

    graph = {("t", n): Task(("t", n), note, n) for n in range(20)}
    running = Running(graph, [("t", 19)], window=5)
    threads = [threading.Thread(target=running.work) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    while len(started) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert sorted(started) == [0, 1, 2, 3, 4]
    release.set()
    for thread in threads:
        thread.join(10)
    assert len(started) == 20


def test_an_order_that_cannot_be_run_still_runs() -> None:
    graph = {n: Task(n, add, TaskRef(n + 1), 1) for n in range(30)} | {30: Task(30, add, 0, 0)}
    assert get(graph, [0], workers=2) == (30,)


class Result:
    """Something that is known while it is alive."""

    alive: ClassVar[weakref.WeakSet[Result]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


def test_a_result_is_dropped_as_soon_as_nothing_needs_it() -> None:
    graph = {
        "make": Task("make", Result),
        "use": Task("use", lambda result: len(Result.alive), TaskRef("make")),
        "look": Task("look", lambda there: (there, len(Result.alive)), TaskRef("use")),
    }
    assert get(graph, ["look"], workers=1) == ((1, 0),)


def test_the_first_error_is_raised_and_nothing_more_starts() -> None:
    started: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        if number == 3:
            raise ValueError("three")

    graph = {("t", n): Task(("t", n), work, n) for n in range(100)}
    with pytest.raises(ValueError, match="three"):
        get(graph, [("t", 99)], workers=2)
    assert len(started) < 10


def test_an_error_that_is_kept_keeps_no_results() -> None:
    """A notebook keeps the last one: what it held counted as the process itself."""
    graph = {
        "made": Task("made", Result),
        "wrong": Task("wrong", lambda: 1 // 0),
        "both": Task("both", lambda *_: None, TaskRef("made"), TaskRef("wrong")),
    }
    with pytest.raises(ZeroDivisionError) as kept:
        get(graph, ["both"], workers=1)
    assert not Result.alive and kept.value.__traceback__ is not None


def test_an_interrupt_stops_the_run() -> None:
    """Ctrl-C: what runs is finished, nothing more is started."""
    started: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        time.sleep(0.1)

    graph = {("t", n): Task(("t", n), work, n) for n in range(50)}
    threading.Timer(0.25, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        get(graph, [("t", 49)], workers=1)
    assert len(started) < 25


def test_what_takes_no_time_is_run_by_whoever_brings_the_last_of_it() -> None:
    """No thread has to be free: here none is there at all."""
    done: list[str] = []
    graph = {
        "comes": DataNode("comes", None),
        "too": DataNode("too", None),
        "sent": Task("sent", lambda *given: done.append("".join(given)), TaskRef("comes"), TaskRef("too")),
    }
    running = Running(graph, [], arriving=["comes", "too"], at_once=["sent"])
    running.arrive("comes", "a")
    assert done == []
    running.arrive("too", "b")
    assert done == ["ab"] and running.order.over and not running.results


HEAPS = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from oocdl.host.main_heap import MainHeapThreads, uses_main_heap

def told(pool, count):
    barrier = Barrier(count)  # each call in a thread of its own
    print(*pool.map(lambda _: (barrier.wait(), uses_main_heap())[1], range(count)))

with ThreadPoolExecutor(4) as before:
    told(before, 4)
    with MainHeapThreads(3) as pool:
        told(pool, 3)
        told(pool, 3)
"""


def test_threads_allocate_from_the_main_heap_whatever_threads_were_there_before() -> None:
    """Other heaps lose their pages whenever they are empty: a MobileNetV2's step took 1.85 s, not 1.6."""
    found = python("-c", HEAPS)
    assert found.stdout.split() == 4 * ["False"] + 6 * ["True"], found.stderr


def test_all_threads_work_where_none_gets_the_main_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_heap, "uses_main_heap", lambda: False)
    at_once = threading.Barrier(3)
    tasks = {name: (lambda _: at_once.wait(10) >= 0, 0) for name in "abc"}
    with MainHeapThreads(3) as pool:
        for _ in range(2):
            assert get(tasks, list(tasks), workers=3, pool=pool) == (True, True, True)
        with pytest.raises(ZeroDivisionError):
            get({"a": (lambda _: 1 // 0, 0)}, "a", workers=3, pool=pool)
    with pytest.raises(RuntimeError, match="the threads have ended"):
        pool.submit(max, 1, 2)
