"""What a notebook shows: one line for ``repr``, a small page of text for plans, runs, reports and weights."""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from rich.console import Console

import oocdl
from oocdl.events import Notice, RunFinished, RunStarted, StepDone
from oocdl.presets.unets import write_unet3d
from oocdl.report.notebook import Block, NotebookProgress, block_here, progress_here
from oocdl.report.progress import Progress
from oocdl.report.run_report import LayerReport, Report, Total
from oocdl.report.search_view import SearchProgress
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore
from oocdl.training.versions import Weights
from tests.kit import nets
from tests.kit.code import ROOT
from tests.kit.settings import QUICK

EVIL = "<script>alert(1)</script>"
MOST_BYTES = 100_000


def words_of(text: str) -> str:
    """The words of HTML that has lines and bars only: nothing that runs or loads."""
    for tag in re.findall("<[^>]*>", text):
        assert re.fullmatch(r'</?(div|progress|pre)( (style|value)="[^"]*")?>', tag), tag
    return unescape(re.sub("<[^>]*>", "", text))


def page_of(shown: Any) -> str:
    """The words that a notebook shows of something; few, without a script."""
    text: str = shown._repr_html_()
    assert len(text.encode()) < MOST_BYTES
    return words_of(text)


def is_one_short_line(shown: Any) -> bool:
    return len(repr(shown)) < 300 and "\n" not in repr(shown)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    folder = tmp_path_factory.mktemp("run")
    model = write_unet3d(folder / "unet.onnx", base=2, depth=1, classes=2)
    data = nets.write_data(folder / "data.zarr", nets.volumes(2, 16))
    return oocdl.fit(model, data, loss="dice_ce", steps=3, **QUICK)


def named(plan: oocdl.Plan, count: int, name: str) -> oocdl.Plan:
    """The plan with so many layers that are called so, or begin so."""
    main = plan.kinds["main"]
    one = main.plan.layers[0]
    layers = tuple(replace(one, layer=replace(one.layer, name=f"{name}{n}")) for n in range(count))
    unit = plan.simulated[0].units[0]
    keys = [unit.key._replace(layer=layer.layer.name) for layer in layers]
    ran = tuple(unit._replace(position=n, key=key) for n, key in enumerate(keys))
    kinds = {"main": replace(main, plan=replace(main.plan, layers=layers))}
    made = replace(plan, kinds=kinds, model=f"{name}.onnx")
    made.__dict__["simulated"] = (replace(plan.simulated[0], units=ran),)
    made.__dict__["room_bytes"] = plan.room_bytes
    return made


def report(count: int, name: str) -> Report:
    layers = tuple(LayerReport(f"{name}{n}", 8, 0.5, 0.25 + n, 0.1, 0.1, 1.0, 1.0) for n in range(count))
    return Report(3, layers, Total(2.0, 1 << 20, 0, 0), Total(3.0, 1 << 20, 0, 0))


def test_what_users_get_is_one_line(run: oocdl.Run) -> None:
    plan = run.plan
    scaling = oocdl.Scaling("unet.onnx", True, ())
    shown = [plan, plan.compiled, plan.trained, *plan.layers, run, run.weights, run.report(), scaling]
    assert all(is_one_short_line(one) for one in shown), [repr(one)[:300] for one in shown]
    assert "unet.onnx" in repr(plan) and f"{len(plan.layers)} layers" in repr(plan)
    assert f"{len(run.weights)} arrays" in repr(run.weights)

    assert is_one_short_line(replace(plan, model="\n\x1b" * 120 + ".onnx"))
    assert is_one_short_line(named(plan, 500, "layer"))


def test_plan_run_weights_and_report_as_a_page(run: oocdl.Run) -> None:
    page = page_of(run.plan)
    assert all(run.plan.layer_names[layer.layer.name] in page for layer in run.plan.layers)
    assert f"of {run.plan.settings.memory_bytes / 2**20:.0f} MiB" in page
    assert all(line in page for line in run.plan.summary().splitlines())
    page = page_of(run)
    assert "3 of 3 steps" in page and f"→ {run.history[-1]['loss']:.4g}" in page
    weights = page_of(run.weights)
    assert all(name in weights for name in run.weights)
    assert "list(run.weights)" not in weights
    shown = page_of(run.report())
    assert all(layer.name in shown for layer in run.report().layers) and "ratio" in shown


@pytest.mark.parametrize(
    "name", [EVIL, "x" * 10_000, '"><img src=x onerror=alert(1)>'], ids=["script", "long", "image"]
)
def test_names_are_text_however_many_there_are(run: oocdl.Run, tmp_path: Path, name: str) -> None:
    with RunStore.create(tmp_path / "r", {"model": name}) as store:
        specs = [TensorSpec(f"{name}{n}", "weights", (1,), "float32", (1,)) for n in range(500)]
        commit = store.begin(0, specs)
        for spec in specs:
            commit.write(spec.name, ((0, 1),), np.ones(1, np.float32))
        commit.finish({"step": 0})
        weights = page_of(Weights(store, tmp_path / "none.onnx"))
    plan = page_of(named(run.plan, 500, name))
    assert "and 460 more\nlist(run.weights) names them all" in weights and "500 layers" in plan
    for page in (weights, plan, page_of(report(500, name))):
        assert name[:14] in page


def test_a_search_and_scaling_as_pages(tmp_path: Path) -> None:
    search = oocdl.search(*nets.write_job(tmp_path), space={"lr": [0.1, 0.01]}, steps=1, **QUICK)
    page = page_of(search)
    assert page.count("finished") == 2 and "0.01" in page and is_one_short_line(search)
    assert "weak scaling" in page_of(oocdl.Scaling(EVIL, True, ()))


def test_the_example_runs_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    path = ROOT / "examples/notebook.ipynb"
    book = nbformat.read(path, 4)
    stored = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert len(stored) == 7 and "/notebook-example" not in path.read_text()  # seen before it is run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own
        NotebookClient(book, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(nbformat.writes(book)) < 500_000
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert all(output.output_type in ("display_data", "execute_result") for output in outputs), outputs
    (progress,) = (output for output in outputs if output.output_type == "display_data")
    assert "step 24/24" in progress.data["text/plain"] and "first step" not in progress.data["text/html"]
    assert sum("text/html" in output.data for output in outputs) == 5  # plan, progress, run, report, weights


class Published:
    """What IPython would be told: the output of a cell, by its id."""

    def __init__(self) -> None:
        self.shown: dict[str, dict[str, str]] = {}
        self.times = 0

    def __call__(self, data: dict[str, str], transient: dict[str, str], update: bool) -> None:
        assert update == (transient["display_id"] in self.shown)
        self.shown[transient["display_id"]] = data
        self.times += 1


def test_progress_is_one_output_that_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a kernel
    published, now = Published(), [0.0]
    with NotebookProgress(Block(published), 512 << 20, lambda: now[0]) as listener:
        listener(RunStarted(None, f"{EVIL}.run", 1000, 0))
        assert "the first step" in next(iter(published.shown.values()))["text/plain"]
        for number in range(1, 1001):
            now[0] += 0.01
            row = {"step": number, "epoch": 0, "loss": 1 / number, "seconds": 0.01, "peak_bytes": 1 << 20}
            listener(StepDone(row))
        listener(RunFinished(1000, 10.0))
    (data,) = published.shown.values()
    assert published.times < 20
    for text in (words_of(data["text/html"]), data["text/plain"]):
        assert f"1000 steps in {EVIL}.run" in text and "finished 1000 steps in 10.0 s" in text
        assert text.count("step 1000/1000") == 1 and "step 999" not in text
    assert 'value="1.0000"' in data["text/html"]


def test_lines_of_a_week_stay_few() -> None:
    published = Published()
    block = Block(published)
    for number in range(10_000):
        block.line(f"notice {number}")
    (data,) = published.shown.values()
    assert len(data["text/html"]) < MOST_BYTES and "notice 9999" in data["text/plain"]


def test_no_notebook_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert block_here() is None and type(progress_here(1 << 20)) is Progress
    on_a_terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", on_a_terminal)
    assert block_here() is None
    published = Published()
    shell = SimpleNamespace(kernel=object(), display_pub=SimpleNamespace(publish=published))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(progress_here(1 << 20), NotebookProgress)
    SearchProgress()(Notice("a line"))
    SearchProgress(Console(file=io.StringIO()))(Notice("elsewhere"))
    assert [data["text/plain"] for data in published.shown.values()] == ["a line"]
