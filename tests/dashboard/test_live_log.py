"""What a run writes for its page, and what a view reads: resumed, rolled back, cut off, on a full disk."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.dashboard import answers, live_log
from oocdl.dashboard.facts import PassFacts, RunFacts, read_facts
from oocdl.dashboard.live_log import FACTS, LAST_PASS, NOW, RESOURCES, LiveLog
from oocdl.dashboard.panels import machine_panel, words
from oocdl.dashboard.series import Tail
from oocdl.dashboard.view import MOST_NOTES, View
from oocdl.errors import CorruptError, StoreError
from oocdl.events import (
    Committed,
    Event,
    Notice,
    PassTimes,
    ProcessLook,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    StepRunning,
    WorkersChanged,
)
from oocdl.report.layer_facts import LayerFacts
from tests.kit import nets
from tests.kit.settings import QUICK


def layer(name: str, phase: str = "forward", **more: Any) -> LayerFacts:
    options: dict[str, Any] = {
        "units": 2, "cuts": "", "shape": "2", "operators": "Conv", "unit_bytes": 8, "read_bytes": 4,
        "written_bytes": 4, "flops": 10, "predicted_seconds": 0.5, "sources": (),
    }  # fmt: skip
    return LayerFacts(name=name, phase=phase, **{**options, **more})


def facts(layer_of: tuple[int, ...] = (0, 0, 1, -1)) -> RunFacts:
    layers = (layer("a"), layer("b", "backward", sources=(0,)))
    return RunFacts(
        model="net.onnx", engine="numpy", threads=2, budget_bytes=100, base_bytes=10, steps=10,
        predicted_seconds=2.0, predicted_peak_bytes=50, predicted_spill_bytes=0, disk_read_rate=1e9,
        disk_write_rate=1e9, rates_measured=False, dataset="d.zarr", group="", images=(("input", "x"),),
        passes={"main": PassFacts(layers=layers, layer_of=layer_of)},
    )  # fmt: skip


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "history").mkdir()
    return tmp_path


@pytest.fixture
def log(run: Path) -> LiveLog:
    return LiveLog(run, Clock())


def row(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 1.0 / step, "seconds": 0.5}


def steps(log: LiveLog, *numbers: int, **more: Any) -> None:
    """Steps are done, and seconds pass before the last."""
    for number in (*numbers, numbers[-1] + 1):
        log._clock.now += 10 * (number > numbers[-1])  # type: ignore[attr-defined]
        log(StepDone(row(number) | more))


def commit(run: Path, log: LiveLog, *numbers: int) -> None:
    """The history has rows up to a step, which is durable."""
    with (run / "history" / "steps.jsonl").open("a") as out:
        out.writelines(json.dumps(row(number)) + "\n" for number in numbers)
    log(Committed(numbers[-1]))


def look(at: float, phases: bytes = bytes((4, 2, 0, 0)), name: str = "here", **more: Any) -> StepRunning:
    sizes = dict.fromkeys(live_log.OF_PROCESS, 7)
    process = ProcessLook(name=name, threads=1, phases=phases, **{**sizes, **more})
    return StepRunning(at_seconds=at, step=3, pass_number=1, passes=1, plan_id="main", processes=(process,))


def seen_steps(view: View) -> list[float]:
    return view.steps["step"].tolist()


def test_facts_come_back_as_they_were() -> None:
    assert read_facts(facts().to_json()).to_json() == facts().to_json()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}', '{"format": 1}'])
def test_other_facts_are_refused(text: str) -> None:
    with pytest.raises(CorruptError, match="dashboard files"):
        read_facts(text)


def test_there_is_no_view_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run"):
        View(tmp_path)


def test_rows_are_seen_before_they_are_committed_and_once_after(run: Path, log: LiveLog) -> None:
    view = View(run)
    log(RunStarted(None, str(run), 10, 0))
    steps(log, 1, 2)
    assert view.refresh() and seen_steps(view) == [1, 2, 3]
    commit(run, log, 1, 2, 3)
    view.refresh()
    assert seen_steps(view) == [1, 2, 3]
    assert view.steps["train_seconds"].tolist() == [0.5, 1.0, 1.5]
    assert not view.refresh()


def test_steps_that_were_rolled_back_are_forgotten(run: Path, log: LiveLog) -> None:
    view = View(run)
    log(RunStarted(None, str(run), 10, 0))
    commit(run, log, 1, 2)
    steps(log, 3, 4, 5)
    view.refresh()
    assert seen_steps(view) == [1, 2, 3, 4, 5, 6]
    log(WorkersChanged("lost", 1, 2))
    view.refresh()
    assert seen_steps(view) == [1, 2]
    # As many rows come before the next look as there were before: the file is as long again.
    steps(log, 3, 4, 5)
    steps(log, 7)
    view.refresh()
    assert seen_steps(view) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_rows_that_replace_others_between_two_looks_are_seen(run: Path, log: LiveLog) -> None:
    view = View(run)
    log(RunStarted(None, str(run), 10, 0))
    steps(log, 1)
    view.refresh()
    log(WorkersChanged("lost", 1, 0))
    steps(log, *range(1, 9), loss=5.0)
    view.refresh()
    assert seen_steps(view) == list(range(1, 10)) and set(view.steps["loss"]) == {5.0}


def test_a_run_that_goes_on_keeps_its_notes_and_resources(run: Path, log: LiveLog) -> None:
    view = View(run)
    log(RunStarted(None, str(run), 10, 0, ("a note",)))
    log(look(1000.0))
    log(RunStopped("SIGTERM", str(run), 2))
    view.refresh()
    assert view.ended == "stopped" and len(view.resources["here"]) == 1
    with LiveLog(run, log._clock) as again:
        again(RunStarted(None, str(run), 10, 2))
        again(look(1001.0))
        view.refresh()
        assert view.ended == "" and [note["kind"] for note in view.notes].count("started") == 2
        assert view.resources["here"]["at"].tolist() == [1000.0, 1001.0]
        again(RunFinished(10, 1.0))
    view.refresh()
    assert view.ended == "finished"
    LiveLog(run)(RunStarted(None, str(run), 10, 0))  # anew
    view.refresh()
    assert [note["kind"] for note in view.notes] == ["started"] and view.resources == {}


@pytest.mark.parametrize("begins", [RunStarted(None, "", 10, 2), WorkersChanged("lost", 1, 2)])
def test_processes_that_have_ended_do_not_count_as_what_is_there_now(
    run: Path, log: LiveLog, begins: Event
) -> None:
    log(RunStarted(None, str(run), 10, 0))
    (run / "live" / "facts.json").write_text(facts().to_json())
    log._first = -1e7  # lines of a run as long as that are far apart
    log(look(1000.0, name="dead", process_bytes=70 << 20, busy_seconds=1.0))
    log._clock.now = 1010.0  # type: ignore[attr-defined]
    log(begins)
    (run / "live" / "facts.json").write_text(facts().to_json())
    view = View(run)
    view.refresh()
    if isinstance(begins, WorkersChanged):  # else what is shown stays until a step runs
        assert view.present == {} and "memory" not in words._line(view)
    assert machine_panel._chosen(view, machine_panel.LARGEST) is view.resources["dead"]
    for step in range(MOST_NOTES + 1):
        log(Committed(step))
    log(look(1011.0, name="alive", process_bytes=30 << 20))
    view.refresh()
    assert [*view.present] == ["alive"] and [*view.resources] == ["dead", "alive"]
    line = re.sub("<[^>]+>", "", words._line(view))
    assert "memory 30.0 MiB" in line and "processes" not in line
    assert machine_panel._chosen(view, machine_panel.LARGEST) is view.resources["alive"]


def stop(event: Event) -> None:
    if isinstance(event, RunStarted):
        raise oocdl.Stop("enough")


def interrupt(event: Event) -> None:
    if isinstance(event, RunStarted):
        raise KeyboardInterrupt


@pytest.mark.parametrize("ends", [None, stop, interrupt])
def test_a_run_that_is_called_again_for_no_step_shows_its_last_one(
    tmp_path: Path, ends: Callable[[Event], None] | None
) -> None:
    """Of a finished run all stays as it is; only if a validation is due, the files begin anew."""
    job = nets.write_job(tmp_path)
    quick: dict[str, Any] = {**QUICK, "engine": "numpy", "steps": 3, "workdir": tmp_path / "run"}
    path = oocdl.fit(*job, **quick).path
    view = View(path)
    view.refresh()
    names = (FACTS, NOW, LAST_PASS) if ends else (FACTS, NOW, LAST_PASS, RESOURCES)
    files = {name: (path / "live" / name).read_bytes() for name in names}
    answered = [answers.bottleneck(view), answers.worst_layer(view)]
    assert "too early" not in {answer.short for answer in answered}
    quick |= {"memory": "3GiB"}
    with suppress(KeyboardInterrupt):
        oocdl.fit(*job, **quick | ({"steps": 9, "callbacks": [ends]} if ends else {}))
    for seen in (view, View(path)):
        seen.refresh()
        assert [answers.bottleneck(seen), answers.worst_layer(seen)] == answered
        assert ends or (seen.present and seen.ended == "finished")
    assert {name: (path / "live" / name).read_bytes() for name in files} == files
    if ends is None:
        with LiveLog(path) as log:
            log(RunStarted(None, str(path), 3, 3))
            log(look(time.time()))
        view.refresh()
        assert view.ended == "" and [*view.present] == ["here"] and not (path / "live" / LAST_PASS).exists()
    oocdl.fit(*job, **quick | {"steps": 4})
    assert all((path / "live" / name).read_bytes() != files[name] for name in (FACTS, NOW))


LINES = [b"\0" * 300, b"[1]\n", b'{"at": "1"}\n', b"{\n{}\n", b"\xff\n", b'{"at":', b"[" * 10**5 + b"\n"]


@pytest.mark.parametrize("lines", LINES)
def test_damaged_lines_are_in_no_runs_way(run: Path, log: LiveLog, lines: bytes) -> None:
    log(RunStarted(None, str(run), 10, 0))
    for name in (live_log.RESOURCES, live_log.NOTES, live_log.STEPS):
        (run / "live" / name).write_bytes(lines)
    with LiveLog(run) as again:
        again(RunStarted(None, str(run), 10, 4))
        again(Notice("still here"))
    assert "still here" in (run / "live" / live_log.NOTES).read_text(errors="replace")
    for name in (live_log.RESOURCES, live_log.STEPS):
        (run / "live" / name).unlink()
    view = View(run)
    view.refresh()
    assert view.notes[-1]["text"] == "still here" and view.commit is None


@pytest.mark.parametrize("what", [os.mkfifo, Path.mkdir])
@pytest.mark.parametrize(
    "name", [live_log.RESOURCES, live_log.NOTES, f"{live_log.STEPS}.partial", live_log.NOW, live_log.STEPS]
)
def test_what_is_no_file_ends_the_log_at_most(
    run: Path, log: LiveLog, name: str, what: Callable[[Path], object]
) -> None:
    log(RunStarted(None, str(run), 10, 0))
    (run / "live" / name).unlink(missing_ok=True)
    what(run / "live" / name)
    with warnings.catch_warnings(record=True) as told, LiveLog(run) as again:
        warnings.simplefilter("always")
        again(RunStarted(None, str(run), 10, 4))
        again(Notice("still here"))
    notes = run / "live" / live_log.NOTES
    heard = notes.is_file() and "still here" in notes.read_text()
    assert heard != any("no dashboard sees the run" in str(one.message) for one in told)


def test_the_last_pass_has_a_lane_for_each_thread(run: Path, log: LiveLog) -> None:
    (run / "live").mkdir()
    (run / "live" / "facts.json").write_text(facts().to_json())
    times = np.arange(18, dtype=float).reshape(3, 6)
    last = PassTimes(
        plan_id="main", numbers=np.array([0, 2, 1], np.int32), times=times,
        threads=np.array([0, 1, 0], np.uint8),
    )  # fmt: skip
    log(look(2000.0, last_pass=last))
    view = View(run)
    view.refresh()
    assert view.last_pass is not None and view.last_pass.seconds == 17
    assert [lane.layers.tolist() for lane in view.last_pass.lanes] == [[0, 0], [1]]


def test_resources_are_thinned_as_a_run_gets_long(
    run: Path, log: LiveLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_log, "MOST_LINES", 50)
    log(RunStarted(None, str(run), 10, 0))
    for second in range(1000):
        log(look(1000.0 + second, phases=b""))
    lines = (run / "live" / "resources.jsonl").read_text().count("\n")
    assert 50 * (1 + np.log(1000 / 50)) == pytest.approx(lines, rel=0.2)


@pytest.mark.parametrize("columns", [1, 2, 3, 7])
def test_the_map_shows_the_least_far_of_the_tasks_of_a_place(run: Path, log: LiveLog, columns: int) -> None:
    (run / "live").mkdir()
    layer_of = (0, 1, 0, -1, 0, 0, 1, 0)
    phases = bytes((4, 3, 2, 4, 1, 4, 4, 0))
    (run / "live" / "facts.json").write_text(facts(layer_of).to_json())
    log(look(2000.0, phases=phases))
    view = View(run)
    view.refresh()
    found = view.phase_map(columns)
    of = {0: [4, 2, 1, 4, 0], 1: [3, 4]}
    assert found is not None and found.shape == (2, columns)
    for index, tasks in of.items():
        ends = [column * len(tasks) // columns for column in range(columns + 1)]
        expected = [min(tasks[a : max(b, a + 1)]) for a, b in pairwise(ends)]
        assert found[index].tolist() == expected
    log(look(2001.0, phases=b"\x04"))  # of another plan
    view.refresh()
    assert view.phase_map(columns) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_no_more_ends_the_log_and_not_the_run(
    run: Path, log: LiveLog, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log(RunStarted(None, str(run), 10, 0))

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, "no more")

    monkeypatch.setattr(live_log, "regular", fails)
    with pytest.warns(RuntimeWarning, match="no dashboard sees the run"):
        log(Notice("a line"))
    log(Notice("another"))  # silently
    monkeypatch.undo()
    log(Notice("and one more"))
    assert "line" not in (run / "live" / "notes.jsonl").read_text()


def test_a_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read() == [] and not tail.again
    path.write_text('{"a": 1}\n{"a": 2')
    assert tail.read() == [{"a": 1}] and tail.read() == []
    with path.open("a") as out:
        out.write('}\nnot json\n[3]\n{"a": 4}\n')
    assert tail.read() == [{"a": 2}, {"a": 4}] and not tail.again


@pytest.mark.parametrize("change", ["shorter", "other", "gone"])
def test_a_tail_begins_anew_where_the_file_does(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    tail.read()
    if change != "shorter":
        path.rename(tmp_path / "before")
    if change != "gone":
        path.write_text('{"a": 3}\n' * (1 if change == "shorter" else 9))
    found = tail.read()
    assert tail.again and found[:1] == ([] if change == "gone" else [{"a": 3}])


@pytest.mark.parametrize(
    ("end", "phases"), [(RunFinished(3, 9.0), [4, 4, 4, 4]), (RunStopped("SIGTERM", "", 2), [4, 2, 0, 0])]
)
def test_a_finished_run_shows_its_last_step_whole_and_one_that_stops_where(
    run: Path, log: LiveLog, end: Event, phases: list[int]
) -> None:
    for event in (RunStarted(None, str(run), 3, 0), look(1000.0), end):
        log(event)
    view = View(run)
    view.refresh()
    assert view.now is not None and view.now.step == 3 and view.now.phases.tolist() == phases


def times(*began: float) -> PassTimes:
    """Of four tasks that compute for a second, two, three and four, in a pass that begins then."""
    rows = [[at, at, at, at, at, at + number] for at in began for number in (1, 2, 3, 4)]
    numbers, threads = np.arange(4, dtype=np.int32), np.zeros(4, np.uint8)
    return PassTimes(plan_id="main", numbers=numbers, times=np.array(rows), threads=threads)


def test_seconds_of_layers_are_means_of_passes_that_were_seen(run: Path, log: LiveLog) -> None:
    log(RunStarted(None, str(run), 9, 0))
    (run / "live" / "facts.json").write_text(facts().to_json())
    log._layers = {"main": (np.array([0, 0, 1, -1]), 2)}
    one, two = times(5.0), times(20.0)
    two.times[2, 5] += 4.0
    for second, seen in enumerate((one, one, two)):
        log(look(1000.0 + 6 * second, last_pass=seen))
    view = View(run)
    view.refresh()
    found = view.layer_seconds()
    assert found is not None and found.tolist() == [3.0, 5.0]
    assert view.last_pass is not None and view.last_pass.spent is not None and len(view.last_pass.spent) == 2
