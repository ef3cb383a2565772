"""What people see of a run, from made-up events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from oocdl.events import Committed, ProcessLook, RunFinished, RunStarted, StepDone, StepRunning
from oocdl.report.progress import Progress, show_progress
from oocdl.report.units import clock_time

MIB = 1 << 20


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def started(steps: int = 10, done: int = 0) -> RunStarted:
    return RunStarted(None, "net.run", steps, done)


def step(number: int, seconds: float = 0.25, moved_bytes: int = 0) -> StepDone:
    row = {"step": number, "epoch": 0, "loss": 1 / number, "seconds": seconds, "lr": 0.1}
    moved = {"process_bytes": 100 * MIB, "read_bytes": moved_bytes, "written_bytes": moved_bytes}
    return StepDone(row | moved)


def plain() -> tuple[Progress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Progress(512 * MIB, Console(file=out, width=40), clock), out, clock


def terminal(width: int = 120) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=True, force_interactive=True, legacy_windows=False
    )
    return Progress(512 * MIB, console), out


def test_plain_lines_are_a_second_apart_but_for_the_first_and_the_last() -> None:
    listener, out, clock = plain()
    listener(started(10))
    for number in range(1, 11):
        listener(step(number))
        clock.now += 0.3
    listener(RunFinished(10, 3.0))
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "10 steps in net.run",
        "step 1/10",
        "step 5/10",
        "step 9/10",
        "step 10/10",
        "finished 10 steps in 3.0 s",
    ]


def test_a_line_says_all_that_matters_and_is_never_wrapped() -> None:
    listener, out, _ = plain()
    listener(started(41))
    listener(step(1, seconds=0.5, moved_bytes=10_000_000))
    assert out.getvalue().splitlines()[1] == (
        "step 1/41, epoch 1, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB, disk 40 MB/s"
    )


def test_slow_steps_are_shown_in_seconds() -> None:
    listener, out, _ = plain()
    listener(started(3))
    listener(step(1, seconds=60.0))
    assert "60.0 s/step, 2:00 left" in out.getvalue()


def test_the_rate_is_that_of_the_last_steps() -> None:
    listener, out, clock = plain()
    listener(started(1000))
    for number, seconds in enumerate([100.0, *[0.5] * 20], start=1):
        clock.now += 2
        listener(step(number, seconds))
    assert "2.0 steps/s" in out.getvalue().splitlines()[-1]


def test_resuming_says_how_far_the_run_is() -> None:
    listener, out, _ = plain()
    listener(started(10, done=4))
    listener(step(5))
    assert out.getvalue().splitlines()[0] == "10 steps in net.run, 4 of them done"
    assert "step 5/10" in out.getvalue()


def test_a_finished_run_says_so() -> None:
    listener, out, _ = plain()
    listener(started(10, done=10))
    listener(RunFinished(10, 0.0))
    assert out.getvalue().splitlines()[-1] == "finished already; nothing to do"


def test_a_commit_is_no_news() -> None:
    listener, out, _ = plain()
    listener(Committed(3))
    assert out.getvalue() == ""


def test_names_are_text_not_markup() -> None:
    listener, out, _ = plain()
    listener(RunStarted(None, "[red]x[/red].run", 1, 0))
    assert "[red]x[/red].run" in out.getvalue()


def test_a_terminal_gets_one_live_line() -> None:
    listener, out = terminal()
    with listener:
        listener(started(4))
        for number in range(1, 5):
            listener(step(number))
        listener(RunFinished(4, 1.0))
    shown = out.getvalue()
    assert "4/4" in shown and "loss 0.2500" in shown and "4.0 steps/s" in shown
    assert shown.rstrip().endswith("finished 4 steps in 1.0 s")
    assert listener.bar is None


def test_on_a_narrow_terminal_the_words_take_the_place_of_the_bar() -> None:
    wide, narrow = terminal(), terminal(width=60)
    for listener, _ in (wide, narrow):
        listener(started(4))
        listener(step(1))
        listener.close()
    assert "━" in wide[1].getvalue() and "━" not in narrow[1].getvalue()
    assert "step 1/4, loss 1.0000, 4.0 steps/s, 0:01 left" in narrow[1].getvalue()


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (80, "step 1/41, epoch 1, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB"),
        (70, "step 1/41, loss 1.0000, 2.0 steps/s, 0:20 left, peak 100 of 512 MiB"),
        (50, "step 1/41, loss 1.0000, 2.0 steps/s, 0:20 left"),
        (40, "step 1/41, loss 1.0000, 0:20 left"),
    ],
)
def test_what_matters_least_goes_first_where_there_is_no_room(width: int, parts: str) -> None:
    listener, out = terminal(width)
    listener(started(41))
    listener(step(1, seconds=0.5, moved_bytes=10_000_000))
    listener.close()
    assert f"{parts}\x1b" in out.getvalue() or f"{parts}\n" in out.getvalue()


def test_a_terminal_says_at_once_that_a_run_is_planned() -> None:
    listener, out = terminal()
    with listener:
        assert "planning .." in out.getvalue()
        listener(started(4))
        assert listener.bar is not None and "the first step .." in out.getvalue()
    quiet, plain_out, _ = plain()
    with quiet:
        assert plain_out.getvalue() == ""


def running(number: int, done: int, pass_number: int = 1) -> StepRunning:
    """Of four tasks of one of two passes so many are done, by two processes."""
    sizes = dict.fromkeys(
        ("process_bytes", "base_bytes", "reserved_bytes", "tier_bytes", "spilled_bytes", "read_bytes",
         "written_bytes"), 0,
    )  # fmt: skip
    phases = [bytes([4] * (done - 1) + [0] * (5 - done)), bytes([0] * (done - 1) + [4] + [2] * (4 - done))]
    looks = [
        ProcessLook(name=str(n), threads=1, processor_seconds=0, phases=one, **sizes)
        for n, one in enumerate(phases)
    ]
    return StepRunning(
        at_seconds=0, step=number, pass_number=pass_number, passes=2, plan_id="main", processes=tuple(looks)
    )


def test_a_long_step_moves_while_it_runs() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=120, force_terminal=True, force_interactive=True, legacy_windows=False)
    listener = Progress(512 * MIB, console, clock)
    listener(started(4))
    for seconds, number, done, pass_number in ((2, 1, 1, 1), (2, 1, 2, 1), (6, 1, 3, 2)):
        clock.now += seconds
        listener(running(number, done, pass_number))
    listener(step(1, seconds=12.0))
    clock.now += 1
    listener(running(2, 3, 2))
    clock.now += 8
    listener(running(2, 2, 2))
    listener.close()
    shown = out.getvalue()
    assert "the first step: 12%" not in shown  # too short yet
    assert "the first step: 25%" in shown and "the first step: 88%" in shown
    assert "88% of the next" not in shown
    assert "step 1/4, 75% of the next, epoch 1, loss 1.0000, 12.0 s/step, 0:27 left" in shown


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    listener, out = terminal()
    with pytest.raises(RuntimeError), listener:
        listener(started(4))
        raise RuntimeError
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 2
    listener.close()


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    show_progress(MIB)(started())
    found = capsys.readouterr()
    assert found.out == "" and "net.run" in found.err


def test_rounding_never_gives_sixty_seconds() -> None:
    assert clock_time(59.7) == "1:00"
