"""The picture of a plan: what is in it, and what is said where it cannot be drawn."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

import oocdl
from oocdl.errors import InputError, StoreError
from oocdl.planning.simulation.timeline import Moment, Ran, Simulated, Transfer
from oocdl.planning.task_key import TaskKey, TaskKind
from oocdl.presets.unets import write_unet3d
from oocdl.report import figure as picture
from oocdl.report import history_view
from oocdl.report.figure import LABEL_LETTERS, PHASES, RED, figure_of, highest, written
from oocdl.report.layer_facts import layer_names
from oocdl.report.tables import shortened
from tests.kit import nets
from tests.kit.settings import QUICK

MIB = 1 << 20


def scene(layers: int = 3, passes: int = 1, workers: int = 2) -> dict[str, Any]:
    """Each layer has a unit on each worker, which waits a second and runs a second, and a combining task."""
    units: list[Ran] = []
    for layer in range(layers):
        name, start = f"layer{layer}", 2.0 * layer
        for worker in range(workers):
            unit = TaskKey(TaskKind.UNIT, name, "", worker)
            units.append(Ran(len(units), unit, worker, start, start + 1, start + 2))
        combine = TaskKey(TaskKind.COMBINE, name, "sum", 0)
        units.append(Ran(len(units), combine, 0, start + 2, start + 2, start + 2))
    moments = tuple(Moment(float(second), 10 * MIB, 21 * MIB, 20 * MIB) for second in range(2 * layers))
    one = Simulated(2.0 * layers, 0, 0, 11 * MIB, 0, 1.0, moments, tuple(units))
    sizes = {"base_bytes": 100 * MIB, "peak_bytes": 131 * MIB, "budget_bytes": 200 * MIB}
    return {"title": "a step", "passes": (one,) * passes, **sizes}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> oocdl.Plan:
    folder = tmp_path_factory.mktemp("plan")
    model = write_unet3d(folder / "unet.onnx", base=4, depth=2, classes=2)
    data = nets.write_data(folder / "data.zarr", nets.volumes(2, 16))
    return oocdl.plan(model, data, **{**QUICK, "loss": "dice_ce", "threads": 2, "parallel": {"space": (2,)}})


def test_a_png_of_the_figures_size_and_an_svg(plan: oocdl.Plan, tmp_path: Path) -> None:
    path = plan.plot(tmp_path / "plan.png")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width == round(11.0 * picture.DOTS_PER_INCH)
        found = image.convert("RGB").getcolors(1 << 20)
        assert found is not None and len(found) > 50  # not an empty page
    assert ElementTree.parse(plan.plot(tmp_path / "plan.SVG")).getroot().tag.endswith("svg")


def test_a_row_for_each_layer_and_one_axis_of_time(plan: oocdl.Plan) -> None:
    figure = figure_of(**{**scene(), "passes": plan.simulated, "budget_bytes": 4 << 30})
    above, below, disk = figure.axes
    names = [shortened(layer.layer.name, LABEL_LETTERS) for layer in plan.layers]
    assert [label.get_text() for label in below.get_yticklabels()] == names
    assert above.get_xlim() == below.get_xlim() == disk.get_xlim()
    assert "ms" in disk.get_xlabel() and "GiB" in above.get_ylabel()


def test_memory_is_stacked_under_the_budget() -> None:
    above, *_ = figure_of(**scene()).axes
    assert above.get_legend_handles_labels()[1] == [
        "base process", "chunks in the RAM tier", "reserved by units", "scratch of programs",
        "predicted peak, 131 MiB", "budget, 200 MiB",
    ]  # fmt: skip
    tops = [float(area.get_paths()[0].vertices[:, 1].max()) for area in above.collections[:4]]
    assert tops == [100, 110, 111, 131]
    (budget,) = (line for line in above.lines if line.get_color() == RED)
    assert budget.get_ydata() == [200, 200]


def bars(axes: Any) -> list[tuple[float, float, float, float]]:
    """(left, right, top, bottom) of all units and their waiting."""
    found = []
    for collection in axes.collections:
        for path in collection.get_paths():
            (left, top), (right, bottom) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            found.append((left, right, top, bottom))
    return found


def test_units_that_run_side_by_side_are_below_each_other() -> None:
    _, below, _ = figure_of(**scene(layers=1)).axes
    working = [bar for bar in bars(below) if bar[:2] == (1.0, 2.0)]
    waiting = [bar for bar in bars(below) if bar[:2] == (0.0, 1.0)]
    assert len(working) == len(waiting) == 2
    first, second = sorted(working, key=lambda bar: bar[2])
    assert -0.5 < first[2] < first[3] <= second[2] + 1e-9 and second[3] < 0.5


def test_passes_follow_each_other() -> None:
    figure = figure_of(**scene(layers=2, passes=3))
    _, below, _ = figure.axes
    assert below.get_xlim() == (0, 12)
    assert len(below.get_yticklabels()) == 2  # the same layers again
    assert sum(line.get_linestyle() == ":" for line in below.lines) == 2
    assert max(right for _, right, _, _ in bars(below)) == 12


@pytest.mark.parametrize(
    ("seconds", "name", "end"), [(6.0, "s", 6.0), (600.0, "min", 10.0), (0.6, "ms", 600.0)]
)
def test_time_is_in_a_unit_in_which_it_is_easily_read(seconds: float, name: str, end: float) -> None:
    one = scene()
    _, _, disk = figure_of(**one | {"passes": (replace(one["passes"][0], seconds=seconds),)}).axes
    assert f"[{name}]" in disk.get_xlabel() and disk.get_xlim() == (0, end)


def test_no_peak_is_lost_where_moments_are_many() -> None:
    moments = [Moment(n / 1000, (n == 123) * MIB + n, 0, 0) for n in range(1000)]
    shown = highest(moments, 1.0, columns=10)
    assert len(shown) == 10 and moments[123] in shown and moments[999] in shown
    assert highest(moments[:5], 1.0, columns=1000) == moments[:5]
    many = scene()
    moments = [Moment(n / 1000, n * MIB, 0, 0) for n in range(6000)]
    above, *_ = figure_of(**many | {"passes": (replace(many["passes"][0], moments=tuple(moments)),)}).axes
    assert len(above.collections[1].get_paths()[0].vertices) < 5 * picture.MOST_MOMENTS


def test_labels_are_thinned_out() -> None:
    _, below, _ = figure_of(**scene(layers=400)).axes
    shown = below.get_yticks()
    assert 30 < len(shown) < 80 and len(set(shown[1:] - shown[:-1])) == 1
    assert "of 400" in below.get_ylabel()
    assert LABEL_LETTERS > 32


def test_names_of_layers_are_shortened_and_harmless() -> None:
    labels = {"layer0": "x" * 50, "layer1": "a\x1b[0m\nb"}
    _, below, _ = figure_of(**scene(), labels=labels).axes
    shown = [label.get_text() for label in below.get_yticklabels()]
    assert shown == ["x" * 16 + "…" + "x" * 16, "a\\x1b[0m\\nb", "layer2"]


def test_parts_of_a_pass_are_told_apart_by_colour_and_said() -> None:
    one = scene(layers=3, workers=1)
    names = {"layer0": "layer0", "layer1": "grad/layer0", "layer2": "update/w"}
    (done,) = one["passes"]
    units = tuple(ran._replace(key=ran.key._replace(layer=names[ran.key.layer])) for ran in done.units)
    passes = (replace(done, units=units),)
    labels = {"grad/layer0": "layer0", "update/w": "weights"}
    _, below, _ = figure_of(**one | {"passes": passes, "labels": labels}).axes
    assert [text.get_text() for text in below.get_yticklabels()] == ["layer0", "layer0", "weights"]
    assert below.get_legend_handles_labels()[1][:3] == list(PHASES)
    assert len(set(PHASES.values())) == 3


def test_the_disk_has_a_lane() -> None:
    quiet = scene()
    moves = (Transfer(0.0, 1.0, 3 * MIB, 0), Transfer(1.0, 1.5, 0, 5 * MIB), Transfer(2.0, 3.0, 4 * MIB, 0))
    busy = quiet | {"passes": (replace(quiet["passes"][0], transfers=moves),) * 2}
    assert [text.get_text() for text in figure_of(**quiet).axes[2].texts] == ["nothing is spilled"]
    lane = figure_of(**busy).axes[2]
    assert lane.get_legend_handles_labels()[1] == ["reads, 14 MiB", "writes, 10 MiB"]
    spans = sorted(bar[:2] for bar in bars(lane))
    assert spans == [(0, 1), (1, 1.5), (2, 3), (6, 7), (7, 7.5), (8, 9)]


def test_layers_have_names_of_the_model(plan: oocdl.Plan) -> None:
    names = layer_names(plan.compiled)
    assert list(names) == [layer.layer.name for layer in plan.layers]
    roots = {node.name.partition("/")[0] for node in plan.compiled.imported.graph.nodes}
    known = roots | set(plan.compiled.pieces)
    for layer, name in names.items():
        own = name.removeprefix("grad/").removeprefix("update/").partition(",")[0].partition(" ")[0]
        assert own in known or own in ("loss", "weights"), layer
    assert names["down1.conv1"] == "down1.conv1" and any("loss" in name for name in names.values())
    assert len(set(names.values())) == len(names)
    assert "grad/down2.pool" in names.values() and "update/weights" in names.values()


def test_what_cannot_be_drawn_is_said(
    plan: oocdl.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oocdl.Plan, "simulated", property(lambda _: pytest.fail("it works before it looks")))
    with pytest.raises(InputError, match=r"\.png or \.svg, not 'plan\.gif'"):
        plan.plot(tmp_path / "plan.gif")
    with pytest.raises(StoreError, match="cannot write"):
        written(figure_of(**scene()), tmp_path / "absent" / "plan.png")

    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(InputError, match=r"matplotlib.*pip install 'oocdl\[plot\]'"):
        figure_of(**scene())
    assert not list(tmp_path.iterdir())


def test_a_history_shows_metrics_of_each_class(tmp_path: Path) -> None:
    row = {"epoch": 0, "loss": 1.0, "lr": 0.1, "seconds": 1.0, "process_bytes": 1}
    rows = [{**row, "step": 1}, {**row, "step": 2, "val_loss": 0.5, "val_dice": 0.7, "val_dice/1": 0.6}]
    text = history_view.plot(rows, "run", tmp_path / "history.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("val_loss", "val_dice", "val_dice/1", "metrics"))
    text = history_view.plot(rows[:1], "run", tmp_path / "plain.svg").read_text()
    assert "<!-- metrics -->" not in text
