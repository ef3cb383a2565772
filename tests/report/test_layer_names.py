"""A layer has one name, that of its module, wherever it is told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.dashboard.view import View
from oocdl.graph.onnx.model_file import OnnxNode
from oocdl.graph.onnx.onnx_file import module_path
from tests.kit.nets import write_data
from tests.kit.settings import QUICK

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(inside, out, 3, padding=1)
        self.act = torch.nn.PReLU()

    def forward(self, x: Any) -> Any:
        return self.act(self.conv(x))


def network() -> Any:
    """Convolutions in lists of lists, whose files call them "node_conv2d_1" and the like."""
    inner = torch.nn.Sequential(Block(4, 4), torch.nn.MaxPool2d(2), torch.nn.Conv2d(4, 8, 3, padding=1))
    outer = torch.nn.Sequential(Block(1, 4), inner, torch.nn.Upsample(scale_factor=2))
    return torch.nn.Sequential(outer, torch.nn.Conv2d(8, 2, 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    x, y = random.random((4, 1, 64, 64), np.float32), (random.random((4, 64, 64)) > 0.5).astype(np.uint8)
    return write_data(tmp_path_factory.mktemp("data") / "d.zarr", {"x": x, "y": y})


@pytest.mark.parametrize(
    ("name", "scopes", "path"),
    [
        ("node_conv2d_1", ("", "a", "a.0", "a.0.conv", "conv2d_1"), "a.0.conv"),
        ("node_conv2d_2", ("", "a", "a.0", "a.0.conv@1", "conv2d_2"), "a.0.conv"),
        ("node_mul", ("", "mul"), ""),
        ("/a/a.0/a.0.0/conv/Conv", (), "a.0.0.conv"),
        ("/a/b/Conv", (), "a.b"),
        ("/Mul", (), ""),
        ("Conv_7", (), ""),
    ],
)
def test_the_path_of_a_module(name: str, scopes: tuple[str, ...], path: str) -> None:
    assert module_path(OnnxNode(name, "Conv", (), (), {}, scopes)) == path


def test_plan_report_trace_and_page_have_the_same_names(data: Path, tmp_path: Path) -> None:
    options = {**QUICK, "parallel": {"space": (2, 2)}, "steps": 4, "trace": tmp_path / "trace.json"}
    run = oocdl.fit(network(), data, workdir=tmp_path / "run", **options)
    names = {row[0] for row in run.plan.table(every=True).rows}
    assert {"0.1.2", "grad/0.1.1", "update/weights"} <= names
    assert not [name for name in names if "conv2d" in name]
    assert {layer.name for layer in run.report().layers} == names
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    units = [event for event in events if event.get("cat") == "unit"]
    assert {event["name"] for event in units} == {event["args"]["layer"] for event in units} == names
    view = View(run.path)
    view.refresh()
    assert view.main is not None and {layer.name for layer in view.main.layers} == names
    assert run.plan.show("tasks", layer=sorted(names)[0])
