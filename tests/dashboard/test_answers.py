"""The four answers of the page: learning, time left, what limits, the worst layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oocdl.dashboard import answers
from oocdl.dashboard.facts import LayerFacts, PassFacts, RunFacts
from oocdl.dashboard.view import Lane, LastPass, View

LAYER = LayerFacts(
    name="conv", phase="forward", units=1, cuts="", shape="", operators="Conv", unit_bytes=0, read_bytes=0,
    written_bytes=0, flops=0, predicted_seconds=1.0, sources=(),
)  # fmt: skip
FACTS = RunFacts(
    model="net.onnx", workdir="net.run", engine="torch", threads=1, budget_bytes=1 << 30, base_bytes=1 << 28,
    steps=100, begun_at_seconds=0.0, predicted_seconds=2.0, predicted_peak_bytes=1 << 29,
    predicted_spill_bytes=0, disk_read_rate=1e9, disk_write_rate=1e9, rates_measured=True, dataset="",
    group="", images=(), passes={"main": PassFacts(layers=(LAYER,), layer_of=(0,))},
)  # fmt: skip


def view_of(folder: Path, losses: np.ndarray, moved_bytes: float = 0.0) -> View:
    """What is known after steps of two seconds each with these losses."""
    (folder / "run.json").write_text("{}")
    view = View(folder)
    view.facts = FACTS
    rows = (
        {"step": n, "loss": x, "seconds": 2.0, "read_bytes": moved_bytes} for n, x in enumerate(losses, 1)
    )
    view.steps.add(rows)
    view.notes = [{"kind": "started", "at": 1000.0, "text": ""}]
    return view


def lane(*times: float) -> Lane:
    return Lane(process="a", thread=0, layers=np.array([0]), times=np.array([times]))


@pytest.mark.parametrize(
    ("losses", "short", "mood"),
    [
        (np.linspace(3, 1, 40), "yes, falling", "good"),
        (np.linspace(1, 3, 40), "no, rising", "bad"),
        (np.concatenate([np.linspace(3, 1, 20), np.full(40, 1.0)]), "flat", ""),
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


@pytest.mark.parametrize(
    ("times", "moved_bytes", "short"),
    [
        ((0, 0, 0, 0, 9, 10), 0.0, "compute"),
        ((0, 7, 7, 7, 9, 10), 0.0, "memory"),
        ((0, 0, 7, 7, 9, 10), 0.0, "disk"),
        ((0, 0, 4, 4, 9, 10), 1.9e9, "disk"),
    ],
)
def test_what_limits(tmp_path: Path, times: tuple[float, ...], moved_bytes: float, short: str) -> None:
    view = view_of(tmp_path, np.ones(10), moved_bytes)
    view.last_pass = LastPass(plan_id="main", seconds=10.0, lanes=(lane(*times),))
    assert answers.bottleneck(view).short == short


def test_the_worst_layer_takes_most(tmp_path: Path) -> None:
    view = view_of(tmp_path, np.ones(10))
    assert answers.worst_layer(view).short == "too early"
    view.last_pass = LastPass(plan_id="main", seconds=10.0, lanes=(lane(0, 0, 0, 1, 3, 3),))
    answer = answers.worst_layer(view)
    assert answer.short == "conv" and "2 times as predicted" in answer.long
