"""What a plan says before a run, and what the run says beside it afterwards."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.errors import CorruptError, StoreError
from oocdl.events import Committed
from oocdl.host.heap import Heap
from oocdl.planning.calibrate import store_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.simulation.timeline import Ran, Simulated
from oocdl.planning.task_key import TaskKey, TaskKind
from oocdl.presets.unets import write_unet3d
from oocdl.report.layer_facts import computing_seconds
from oocdl.report.plan_view import KEPT_BYTES, SPARE_BYTES
from oocdl.report.run_report import make_report, read_report
from oocdl.report.tables import MOST_ROWS
from oocdl.runtime.measured import Measured, Spent
from tests.kit import nets, settings

QUICK: dict[str, Any] = {**settings.QUICK, "loss": "dice_ce", "parallel": {"space": (2,)}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("job")
    model = write_unet3d(folder / "unet.onnx", base=4, depth=2, classes=2)
    return model, nets.write_data(folder / "data.zarr", nets.volumes(3, 16))


@pytest.fixture(scope="module")
def run(job: tuple[Path, Path]) -> oocdl.Run:
    return oocdl.fit(*job, epochs=2, **QUICK)


# --- before ------------------------------------------------------------------------------


def test_the_plan_shows_seconds_and_the_budget(
    job: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = oocdl.plan(*job, **QUICK)
    assert max(map(len, str(plan).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "160")
    text = str(plan)
    lines = text.splitlines()
    assert len(plan.layers) <= MOST_ROWS
    seconds = computing_seconds(plan.simulated)
    for layer in plan.layers:
        (row,) = (line for line in lines if line.startswith(f"│ {plan.layer_names[layer.layer.name]} "))
        assert row.split()[-2] == f"{seconds[layer.layer.name]:.4f}"
    assert sum(seconds.values()) == pytest.approx(plan.simulated[-1].compute_seconds)
    spare = ("to spare for them", "freed memory, kept for the next")
    parts = ("base process", "arrays and programs, simulated", *spare)
    memory = {line.split("│")[1].strip(): line.split("│")[2] for line in lines if line.count("│") == 3}
    *terms, peak, budget = (int(memory[name]) for name in (*parts, "predicted peak", "budget"))
    assert peak == pytest.approx(sum(terms), abs=2)  # each is rounded
    assert peak == round(plan.peak_bytes / 2**20) and budget == 4096
    assert "tasks a step" in text and "onnxruntime" in text
    assert "nominal" in text and "oocdl info --machine" in text
    assert f"at most {plan.disk_bytes / 2**20:.1f} MiB" in text


def test_measured_rates_are_called_so(
    job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store_rates("onnxruntime", NOMINAL)
    summary = oocdl.plan(*job, **QUICK).summary()
    assert "measured on this machine" in summary and "nominal" not in summary


# --- afterwards --------------------------------------------------------------------------


def test_measured_stands_beside_predicted(run: oocdl.Run) -> None:
    report, plan = run.report(), run.plan
    names = [plan.layer_names[layer.layer.name] for layer in plan.layers]
    assert [layer.name for layer in report.layers] == names
    assert sum(layer.units for layer in report.layers) == plan.tasks
    assert all(math.isfinite(layer.ratio) and layer.ratio > 0 for layer in report.layers)
    assert report.steps == 5  # the first of six compiles programs
    assert sum(layer.read_bytes for layer in report.layers) == pytest.approx(plan.read_bytes)
    assert sum(layer.made_bytes for layer in report.layers) == pytest.approx(plan.written_bytes)
    assert report.predicted.seconds == plan.seconds and report.predicted.peak_bytes == plan.peak_bytes
    assert report.measured.peak_bytes == run.peak_bytes
    busy = sum(layer.seconds + layer.gather_seconds + layer.wait_seconds for layer in report.layers)
    assert 0 < busy <= 2 * report.measured.seconds  # two units are under way at most
    assert report.measured.seconds <= max(row["seconds"] for row in run.history[1:])
    assert report.measured.spill_written_bytes == 0


def test_freed_memory_is_kept_as_far_as_there_is_room_to_spare(job: tuple[Path, Path]) -> None:
    plan = oocdl.plan(*job, **QUICK)
    most = plan.most_bytes
    assert plan.kept_bytes == most + KEPT_BYTES < plan.room_bytes - most - SPARE_BYTES
    vars(plan)["room_bytes"] = most + SPARE_BYTES + 5
    assert plan.kept_bytes == 5
    vars(plan)["room_bytes"] = most + SPARE_BYTES - 5
    assert plan.kept_bytes == 0


def test_a_run_has_one_peak_of_memory(
    job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may grow while a step is committed: report and history tell of the same moment."""
    readings = itertools.count(1 << 30, 4096)
    monkeypatch.setattr(Heap, "process_bytes", lambda heap: next(readings))
    run = oocdl.fit(*job, workdir=tmp_path / "run", steps=2, optimizer="sgd", **QUICK)
    assert run.report().measured.peak_bytes == run.peak_bytes


def test_the_report_stays_with_the_run_and_is_a_table(run: oocdl.Run) -> None:
    report = oocdl.open(run.path).report()
    assert report == run.report()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    for word in ("predicted s", "measured s", "ratio", "a step, s", "written to the spill, MiB", "5 steps"):
        assert word in str(report)
    assert sum(line.startswith("│ down1.conv1 ") for line in lines) == 1


def test_a_step_of_several_passes(job: tuple[Path, Path], tmp_path: Path) -> None:
    """Three rows, two a step: the second step of an epoch has one pass, and is not counted."""
    how = {**QUICK, "accumulate": 2, "epochs": 2, "optimizer": "sgd"}
    run = oocdl.fit(*job, workdir=tmp_path / "run", **how)
    report = run.report()
    assert report.steps == 1
    assert sum(layer.units for layer in report.layers) == run.plan.tasks
    assert sum(layer.read_bytes for layer in report.layers) == pytest.approx(run.plan.read_bytes)


def test_a_report_waits_for_a_full_batch_of_the_largest_size(tmp_path: Path) -> None:
    data = nets.write_samples(tmp_path / "data.zarr", ((8, 8, 8), (12, 8, 8)))
    how = {**settings.QUICK, "loss": "dice_ce", "workdir": tmp_path / "run", "shuffle": False}
    model = write_unet3d(tmp_path / "unet.onnx", base=4, depth=2, classes=2)
    run = oocdl.fit(model, data, steps=1, **how)
    with pytest.raises(StoreError, match="once a full batch of samples of the largest size was trained on"):
        run.report()
    assert oocdl.fit(model, data, steps=2, **how).report().steps == 1


def test_a_new_run_does_not_show_the_report_of_the_old_one(job: tuple[Path, Path], tmp_path: Path) -> None:
    options = {**QUICK, "workdir": tmp_path / "run", "steps": 1}
    oocdl.fit(*job, **options)

    def stop(event: object) -> None:
        if isinstance(event, Committed):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at the commit of the weights that it begins with
        oocdl.fit(*job, resume="restart", callbacks=[stop], **options)
    with pytest.raises(StoreError, match="no report is in"):
        oocdl.open(tmp_path / "run").report()


def test_a_report_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="client's workers"):
        read_report(tmp_path)
    for text in ("{", "[]", '{"steps": 1, "layers": [{"nam": 1}], "predicted": {}, "measured": {}}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(CorruptError, match="report.json is damaged"):
            read_report(tmp_path)


# --- sums --------------------------------------------------------------------------------


def simulated(seconds: float) -> Simulated:
    units = (
        Ran(1, TaskKey(TaskKind.UNIT, "b", "", 0), 0, 0, 2, 2 + seconds),
        Ran(0, TaskKey(TaskKind.UNIT, "a", "", 0), 0, 0, 1, 2),
        Ran(2, TaskKey(TaskKind.COMBINE, "b", "sum", 0), 0, 2, 3, 4),
    )
    return Simulated(9, 5, 6, 0, 0, 0, (), units)


def test_means_are_of_each_kind_of_pass() -> None:
    measured = Measured()
    for number in range(3):  # of each kind a first pass, and two that count
        for kind, count in (("first", 10), ("next", 20), ("next", 20), ("main", 30)):
            measured.add("a", Spent(1, 0.1, 0.2, 1000.0 if number == 0 else count, 7, 8))
            measured.add("b", Spent(0, 0.0, 0.0, 0.5))
            measured.end(kind, 2.0, 3, 4)
    kinds = ("first", "next", "next", "main")
    report = make_report(kinds, [simulated(1.0)] * 4, 100, measured, 50)
    assert report is not None and report.steps == 2
    a, b = report.layers
    assert (a.name, b.name) == ("a", "b") and (a.units, b.units) == (4, 4)
    assert (a.predicted_seconds, b.predicted_seconds) == (4.0, 8.0)
    # Of "next" two passes a step, of which the first of the run is left out.
    assert a.seconds == pytest.approx(10 + 2 * (1000 + 4 * 20) / 5 + 30)
    assert b.seconds == pytest.approx(2.0) and b.ratio == pytest.approx(0.25)
    assert (a.read_bytes, a.made_bytes) == (28, 32)
    assert report.measured.seconds == pytest.approx(8) and report.predicted.seconds == 36
    assert (report.measured.spill_read_bytes, report.measured.spill_written_bytes) == (12, 16)
    assert measured.read_bytes == 12 * 7 and measured.made_bytes == 12 * 8


def test_nothing_is_reported_before_a_whole_step_and_the_first_counts_where_it_is_alone() -> None:
    measured = Measured()
    for kind in ("ragged", "main"):
        measured.add("a", Spent(1))
        assert make_report(("main",), [simulated(1.0)], 1, measured, 1) is None
        measured.end(kind, 1.0, 0, 0)
    report = make_report(("main",), [simulated(1.0)], 1, measured, 1)
    assert report is not None and report.steps == 1
