"""The four answers of the page: learning, time left, what limits, the worst layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oocdl.dashboard import answers
from oocdl.dashboard.facts import PassFacts, RunFacts
from oocdl.dashboard.panels import words
from oocdl.dashboard.series import Table
from oocdl.dashboard.view import Lane, LastPass, View
from oocdl.report.layer_facts import LayerFacts

LAYER = LayerFacts(
    name="conv", phase="forward", units=1, cuts="", shape="", operators="Conv", unit_bytes=0, read_bytes=0,
    written_bytes=0, flops=0, predicted_seconds=1.0, sources=(),
)  # fmt: skip
FACTS = RunFacts(
    model="net.onnx", engine="torch", threads=1, budget_bytes=1 << 30, base_bytes=1 << 28, steps=100,
    predicted_seconds=2.0, predicted_peak_bytes=1 << 29, predicted_spill_bytes=0, disk_read_rate=1e9,
    disk_write_rate=1e9, rates_measured=True, dataset="", group="", images=(),
    passes={"main": PassFacts(layers=(LAYER,), layer_of=(0,))},
)  # fmt: skip


def view_of(folder: Path, losses: np.ndarray, moved_bytes: float = 0.0) -> View:
    """What is known after steps of two seconds each with these losses."""
    (folder / "run.json").write_text("{}")
    view = View(folder)
    view.facts = FACTS
    row = {"seconds": 2.0, "read_bytes": moved_bytes}
    view.steps.add({"step": n, "loss": x, **row} for n, x in enumerate(losses, 1))
    view.notes = [{"kind": "started", "at": 1000.0, "text": ""}]
    return view


def last_pass(*times: float, spent: Sequence[Sequence[float]] = ()) -> LastPass:
    """A pass of one task at these times, which computed from the fourth on; ``spent``: by pass and layer."""
    lane = Lane(process="a", thread=0, layers=np.array([0]), times=np.array([times]))
    seconds = np.array(spent or [[times[5] - times[3]]], float)
    return LastPass(plan_id="main", seconds=10.0, lanes=(lane,), spent=seconds)


@pytest.mark.parametrize(
    ("losses", "short", "mood"),
    [
        (np.linspace(3, 1, 40), "yes, falling", "good"),
        (np.linspace(1, 3, 40), "no, rising", "bad"),
        (np.concatenate([np.linspace(3, 1, 20), np.full(40, 1.0)]), "flat", ""),
        (np.concatenate([np.linspace(3, 1, 300), np.linspace(1, 1.5, 60)]), "no, rising", "bad"),
        (np.array([2.0, 1.0]), "too early", ""),
    ],
)
def test_learning(tmp_path: Path, losses: np.ndarray, short: str, mood: str) -> None:
    answer = answers.learning(view_of(tmp_path, losses))
    assert (answer.short, answer.mood) == (short, mood)


def test_time_left_is_that_of_the_steps_that_are_left(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(40))
    assert answers.remaining(view, 1001.0).short == "in 2:00"
    assert answers.remaining(view, 2000.0).short == "silent"
    view.notes.append({"kind": "finished", "at": 1002.0, "text": ""})
    assert answers.remaining(view, 2000.0).short == "done"


def test_a_run_that_ended_early_is_shown_as_whole(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(16))
    assert "width:16.00%" in words._progress(view) and "<b>16 of 100</b>" in words._line(view)
    view.notes.append({"kind": "finished", "at": 1002.0, "text": ""})
    assert "width:100.00%" in words._progress(view) and "<b>16 of 16</b>" in words._line(view)


def test_time_left_is_that_of_validations_too(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(0))
    for n in range(1, 41):
        validation = {} if n % 10 else {"val_loss": 1.0, "val_seconds": 60.0}
        view.steps.add([{"step": n, "loss": 1.0, "seconds": 2.0, **validation}])
    answer = answers.remaining(view, 1001.0)
    told = "2.00 s a step, {} s for validations and commits (measured)"
    assert answer.short == "in 8:00" and told.format("6.00") in answer.long
    view.notes += [{"kind": "commit", "at": 521.0 + 12 * n, "step": n, "text": ""} for n in (10, 40)]
    answer = answers.remaining(view, 1001.0)
    assert answer.short == "in 12:00" and told.format("10.00") in answer.long


@pytest.mark.parametrize(
    ("times", "moved_bytes", "short"),
    [
        ((0, 0, 0, 0, 9, 10), 0.0, "compute"),
        ((0, 7, 7, 7, 9, 10), 0.0, "memory"),
        ((0, 0, 7, 7, 9, 10), 0.0, "slow dataset"),
        ((0, 0, 7, 7, 9, 10), 2e8, "slow disk"),
        ((0, 0, 4, 4, 9, 10), 1.9e9, "disk"),
    ],
)
def test_what_limits(tmp_path: Path, times: tuple[float, ...], moved_bytes: float, short: str) -> None:
    view = view_of(tmp_path, np.ones(10), moved_bytes)
    view.last_pass = last_pass(*times)
    assert answers.bottleneck(view).short == short


def test_the_worst_layer_takes_most(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(10))
    assert answers.worst_layer(view).short == "too early"
    view.last_pass = last_pass(0, 0, 0, 1, 3, 3)
    answer = answers.worst_layer(view)
    assert answer.short == "conv" and "2 times as predicted (" in answer.long
    assert "nominal" not in answers.bottleneck(view).long
    view.facts = replace(FACTS, rates_measured=False)  # nobody has measured them
    assert "by a nominal rate" in answers.bottleneck(view).long
    assert "2 times as predicted by nominal rates" in answers.worst_layer(view).long


def test_a_loss_that_falls_slowly_is_not_flat(tmp_path: Path) -> None:
    """It fell by a third over the last two thirds of its steps, by little beside its first steps."""
    noise = np.random.default_rng(0).normal(0, 0.05, 400)
    steps = np.arange(400)
    losses = (2.0 * np.exp(-steps / 20) + 0.6 * np.exp(-steps / 700)) * (1 + noise)
    told = [answers.learning(view_of(tmp_path, losses[:n])).short for n in range(120, 400)]
    assert told.count("yes, falling") > 0.9 * len(told)


def test_noise_is_flat(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    told = [answers.learning(view_of(tmp_path, random.normal(1, 0.1, 300))).short for _ in range(60)]
    assert told.count("flat") >= 57


def test_a_finished_run_says_from_where_to_where(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.concatenate([np.linspace(3, 1, 40), np.full(60, 1.0)]))
    view.notes.append({"kind": "finished", "at": 1002.0, "text": ""})
    answer = answers.learning(view)
    assert (answer.short, answer.mood) == ("2.769 → 1", "good") and "flat at the end" in answer.long


@pytest.mark.parametrize("seed", range(5))
def test_the_least_is_of_what_is_shown(tmp_path: Path, seed: int) -> None:
    losses = np.linspace(3, 1, 90) * np.random.default_rng(seed).uniform(0.8, 1.2, 90)
    words = answers.learning(view_of(tmp_path, losses)).long
    now, least = (float(words.split(word)[1].split()[0].strip(",;")) for word in ("now ", "least "))
    assert least <= now


@pytest.mark.parametrize(
    ("busy", "idle", "own", "short"),
    [(4.0, 0.0, 2.0, "other processes"), (3.0, 1.0, 2.0, "compute"), (4.0, 0.0, 3.9, "compute")],
)
def test_other_processes_are_named(tmp_path: Path, busy: float, idle: float, own: float, short: str) -> None:
    view = view_of(tmp_path, np.ones(10))
    view.last_pass = last_pass(0, 0, 0, 0, 9, 10)
    table = view.resources["here, process 1"] = Table()
    totals = {"at": 1.0, "busy_seconds": busy, "idle_seconds": idle, "processor_seconds": own}
    table.add({name: rate * second for name, rate in totals.items()} for second in range(10))
    answer = answers.bottleneck(view)
    assert answer.short == short and ("50% of the cores" in answer.long) is (short == "other processes")


def test_the_worst_layer_is_that_of_the_mean(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(10))
    layers = (LAYER, replace(LAYER, name="0.conv"))
    view.facts = replace(FACTS, passes={"main": PassFacts(layers=layers, layer_of=(0,))})
    view.last_pass = last_pass(0, 0, 0, 1, 3, 3, spent=[[2, 3], [0, 3], [9, 6]])
    answer = answers.worst_layer(view)
    assert answer.short == "0.conv" and "4 s a pass, the mean of 3, 4 times as predicted" in answer.long
