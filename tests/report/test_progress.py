"""What people see of a run, from made-up events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from oocdl.events import Committed, Event, ProcessLook, RunFinished, RunStarted, StepDone, StepRunning
from oocdl.report.progress import Progress

MIB = 1 << 20


def started(steps: int = 10, done: int = 0) -> RunStarted:
    return RunStarted(None, "net.run", steps, done)


def step(number: int, seconds: float = 0.25, moved_bytes: int = 0) -> StepDone:
    row = {"step": number, "epoch": 0, "loss": 1 / number, "seconds": seconds, "lr": 0.1}
    moved = {"process_bytes": 100 * MIB, "read_bytes": moved_bytes, "written_bytes": moved_bytes}
    return StepDone(row | moved)


class Shown:
    """A listener whose console is a file or, of a width, a terminal; seconds pass when they are told to."""

    def __init__(self, width: int = 0) -> None:
        self.out, self.now, is_terminal = io.StringIO(), 0.0, width > 0
        console = Console(
            file=self.out, width=width or 40, force_terminal=is_terminal, force_interactive=is_terminal,
            legacy_windows=False,
        )  # fmt: skip
        self.listener = Progress(512 * MIB, console, lambda: self.now)

    def takes(self, *events: Event, seconds: float = 0.0) -> Shown:
        """Take events, and let so much time pass after each."""
        for event in events:
            self.listener(event)
            self.now += seconds
        return self

    @property
    def text(self) -> str:
        return self.out.getvalue()


def test_plain_lines_are_a_second_apart_but_for_the_first_and_the_last() -> None:
    shown = Shown().takes(started(), *map(step, range(1, 11)), RunFinished(10, 3.0), seconds=0.3)
    steps = [f"step {number}/10" for number in (1, 5, 9, 10)]
    lines = [line.split(",")[0] for line in shown.text.splitlines()]
    assert lines == ["10 steps in net.run", *steps, "finished 10 steps in 3.0 s"]


FAST_AT_LAST = [step(number, 100.0 if number == 1 else 0.5) for number in range(1, 22)]


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (
            [started(41), step(1, 0.5, moved_bytes=10_000_000)],
            "step 1/41, epoch 1, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB, disk 40 MB/s",
        ),
        ([started(3), step(1, 60.0)], "60.0 s/step, 2:00 left"),
        ([started(1000), *FAST_AT_LAST], "step 21/1000, epoch 1, loss 0.0476, 2.0 steps/s"),
        ([started(10, done=4)], "10 steps in net.run, 4 of them done"),
        ([started(10, done=10), RunFinished(10, 0.0)], "finished already; nothing to do"),
        ([RunStarted(None, "[red]x[/red].run", 1, 0)], "1 step in [red]x[/red].run"),
    ],
)
def test_the_last_line(events: list[Event], line: str) -> None:
    """It says all that matters, and is not wrapped; rates are those of the last steps, names are text."""
    assert line in Shown().takes(*events, seconds=2.0).text.splitlines()[-1]


def test_what_is_left_has_validations_and_commits_in_it() -> None:
    """Two of ten steps took 4 s each; a commit of 3 s followed the first, a validation of 8 s the second."""
    second = step(2, 4.0)
    validated = StepDone({**second.row, "val_loss": 0.3, "val_dice": 0.8, "val_seconds": 8.0})
    shown = Shown().takes(started(), step(1, 4.0), validated, seconds=15.0)
    assert "loss 0.5000, val_loss 0.3000, val_dice 0.8000, 4.0 s/step, 1:16 left" in shown.text


def test_a_terminal_gets_one_live_line_from_the_first_moment_on() -> None:
    shown = Shown(width=120)
    with shown.listener as listener:
        assert "planning .." in shown.text
        shown.takes(started(4))
        assert listener.bar is not None and "the first step .." in shown.text
        shown.takes(*map(step, range(1, 5)), RunFinished(4, 1.0))
    assert "4/4" in shown.text and "loss 0.2500" in shown.text and "4.0 steps/s" in shown.text
    assert shown.text.rstrip().endswith("finished 4 steps in 1.0 s") and listener.bar is None
    assert Shown().takes(Committed(3)).text == ""  # that is no news
    with Shown().listener as quiet:
        assert quiet.console.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "has_bar", "parts"),
    [
        (120, True, "step 1/41, epoch 1, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB"),
        (80, False, "step 1/41, epoch 1, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB"),
        (70, False, "step 1/41, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB"),
        (50, False, "step 1/41, loss 1.0000, 2.0 steps/s, 0:20 left"),
        (40, False, "step 1/41, loss 1.0000, 0:20 left"),
    ],
)
def test_what_matters_least_goes_first_where_there_is_no_room(width: int, has_bar: bool, parts: str) -> None:
    """The time that is left stays on the narrowest terminal."""
    shown = Shown(width).takes(started(41), step(1, 0.5, moved_bytes=10_000_000))
    shown.listener.close()
    assert ("━" in shown.text) == has_bar
    assert f"{parts}\x1b" in shown.text or f"{parts}\n" in shown.text or f"{parts}, disk" in shown.text


def running(number: int, done: int, pass_number: int = 1) -> StepRunning:
    """Of four tasks of one of two passes so many are done, by two processes."""
    sizes = {f"{of}_bytes": 0 for of in ["process", "base", "reserved", "tier", "spilled", "read", "written"]}
    phases = [bytes([4] * (done - 1) + [0] * (5 - done)), bytes([0] * (done - 1) + [4] + [2] * (4 - done))]
    looks = [ProcessLook(name="x", threads=1, processor_seconds=0, phases=one, **sizes) for one in phases]
    where = {"step": number, "pass_number": pass_number, "passes": 2, "plan_id": "main"}
    return StepRunning(at_seconds=0, processes=tuple(looks), **where)


def test_a_long_step_moves_while_it_runs() -> None:
    shown = Shown(width=120).takes(started(4))
    for seconds, number, done, pass_number in ((2, 1, 1, 1), (2, 1, 2, 1), (6, 1, 3, 2)):
        shown.now += seconds
        shown.takes(running(number, done, pass_number))
    shown.takes(step(1, seconds=12.0), seconds=1.0).takes(running(2, 3, 2), seconds=8.0)
    shown.takes(running(2, 2, 2)).listener.close()
    assert "the first step: 12%" not in shown.text  # too short yet
    assert "the first step: 25%" in shown.text and "the first step: 88%" in shown.text
    assert "88% of the next" not in shown.text
    assert "step 1/4, 75% of the next, epoch 1, loss 1.0000, 12.0 s/step, 0:27 left" in shown.text


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    shown = Shown(width=120)
    with pytest.raises(RuntimeError), shown.listener as listener:
        listener(started(4))
        raise RuntimeError
    assert shown.text.count("\x1b[?25l") == shown.text.count("\x1b[?25h") == 2
    listener.close()


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Progress(MIB)(started())
    found = capsys.readouterr()
    assert found.out == "" and "net.run" in found.err
