"""A crew of which nobody moves is told and given up; one that moves, however slowly, never is."""

from __future__ import annotations

import threading
from time import monotonic

import pytest

from oocdl.runtime.cluster import watch
from oocdl.runtime.cluster.cluster_progress import LEAST_RATE_BYTES, STILL_SECONDS, Report, Stillness, Work
from oocdl.runtime.lost import WorkersLost

IDLE = Report(0, (5,), 0, "has nothing to do")
WAITS = Report(0, (5,), 0, "waits for layer 'conv' of b")


def test_who_waits_for_what_is_told_once_and_the_crew_given_up() -> None:
    told: list[str] = []
    still = Stillness(told.append)
    with pytest.raises(WorkersLost, match=f"moved for {STILL_SECONDS:.0f} s .*layer 'conv' of b"):
        for _ in range(70):
            still.look({"a": WAITS, "b": None}, 1.0)
    assert len(told) == 1 and told[0].startswith("no worker has moved for 8 s (a waits for layer 'conv'")
    assert "b does not answer" in told[0] and "gathered anew after 60 s" in told[0]


def test_whoever_moves_is_waited_for() -> None:
    told: list[str] = []
    still = Stillness(told.append)
    for _ in range(500):  # one unit that takes long, and then units of another member every 50 s
        still.look({"a": Report(1, (5,), 0, ""), "b": IDLE}, 1.0)
    for number in range(500):
        still.look({"a": IDLE, "b": Report(0, (number // 50,), 0, "")}, 1.0)
    assert told.count("workers go on") == 9 and len(told) == 19


def test_of_a_member_that_is_silent_one_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for it are none that nobody moves."""
    told: list[str] = []
    looked = watch.Watch(None, ["a", "b"], told.append)
    for second in range(40):
        seen = {"a": watch.Seen(0.0, WAITS), "b": watch.Seen(min(10.0 + second, 19.0), IDLE)}
        monkeypatch.setattr(watch, "roll", lambda *_, seen=seen: seen)
        looked._looked = monotonic() - 2
        looked.look()
    assert len(told) == 1 and "b has been silent for 10 s" in told[0]


def test_whoever_was_stopped_with_the_driver_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine is that sleeps: the scheduler reads the heartbeats a moment later."""
    looked = watch.Watch(None, ["a"], print)
    monkeypatch.setattr(watch, "on_scheduler", lambda *_: None)
    for silent, since in ((0.0, 1.0), (300.0, 300.0), (0.0, 1.0)):
        there = {"a": watch.Seen(silent, IDLE)}
        monkeypatch.setattr(watch, "roll", lambda *_, there=there: there)
        looked._looked = monotonic() - since
        looked.look()
    with pytest.raises(WorkersLost, match="silent for 300 s"):
        monkeypatch.setattr(watch, "roll", lambda *_: {"a": watch.Seen(300.0, IDLE)})
        looked.look(now=True)


def test_what_is_on_its_way_has_time_to_come() -> None:
    still = Stillness(lambda _: None)
    arriving = Report(0, (5,), 100 * LEAST_RATE_BYTES, "waits")
    for _ in range(150):
        still.look({"a": arriving}, 1.0)
    with pytest.raises(WorkersLost):
        for _ in range(20):
            still.look({"a": arriving}, 1.0)
    still.begin(1000 * LEAST_RATE_BYTES)
    for _ in range(1000):
        still.look({"a": IDLE}, 1.0)


def test_work_is_counted_while_it_lasts() -> None:
    work, seen = Work(), []
    threads = [threading.Thread(target=work.run, args=[lambda: seen.append(work.running)]) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    with pytest.raises(KeyError):
        work.run({}.__getitem__, "x")
    work.count()
    assert seen == [1, 1, 1] and work.running == 0 and work.done == 5
