"""Written models: valid, run by onnxruntime, and never in place of the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from oocdl.errors import ModelError
from oocdl.graph.onnx import writer
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.onnx.writer import export_onnx
from oocdl.ops.registry import RULES
from oocdl.presets.unets import write_unet3d
from tests.kit.models import GPT, UNet3d, export
from tests.kit.nets import save
from tests.kit.onnx_kit import F, conv_model, error, external, run

RANDOM = np.random.default_rng(0)


def as_it_is(name: str) -> None:
    """New contents of no tensor."""


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(
    "model", [UNet3d(norm="batch", dropout=0.5), UNet3d(norm="group"), GPT()], ids=("batch", "group", "gpt")
)
def test_round_trip(
    model: torch.nn.Module, outside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_FROM_BYTES", 0 if outside else 2**30)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 1000)
    x = torch.randint(0, 50, (2, 12)) if isinstance(model, GPT) else torch.randn(2, 1, 8, 8, 8)
    path = export(model, (x,), tmp_path / "model.onnx")
    before = path.read_bytes()
    imported = inspect_onnx(path).bind(RULES, training=False)
    weights = {name: np.abs(item.read() + 0.1) for name, item in imported.weights.items()}
    target = export_onnx(
        path, tmp_path / "trained.onnx", lambda name: [weights[name]] if name in weights else None
    )
    assert path.read_bytes() == before
    assert (tmp_path / "trained.onnx.data").exists() == outside
    assert sorted(p.name for p in tmp_path.iterdir())[0] == "model.onnx"  # no drafts are left
    onnx.checker.check_model(target, full_check=True)
    again = inspect_onnx(target).bind(RULES, training=False)
    assert all((again.weights[name].read() == array).all() for name, array in weights.items())
    found = onnxruntime.InferenceSession(target).run(None, {"x": x.numpy()})[0]
    wanted = run(imported, x, weights=weights)[imported.outputs[0][1]]
    assert error(torch.as_tensor(found), wanted) < 1e-4


def test_export_of_a_file_with_external_data_from_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = external(tmp_path)
    new = RANDOM.normal(size=(8, 4, 3, 3))
    target = export_onnx(path, tmp_path / "new.onnx", lambda name: iter([new[:3], new[3:]]))
    assert (inspect_onnx(target).initializers["w"].read() == new.astype(F)).all()
    monkeypatch.setattr(writer, "EXTERNAL_FROM_BYTES", 0)
    monkeypatch.setattr(writer, "BLOCK_BYTES", 100)
    same = export_onnx(path, tmp_path / "same.onnx", as_it_is)
    assert (inspect_onnx(same).initializers["w"].read() == inspect_onnx(path).initializers["w"].read()).all()


def test_export_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(conv_model().SerializeToString())
    with pytest.raises(ModelError, match="is the original model"):
        export_onnx(path, path, as_it_is)
    (tmp_path / "link.onnx").symlink_to(path)
    with pytest.raises(ModelError, match="is the original model"):
        export_onnx(path, tmp_path / "link.onnx", as_it_is)
    with pytest.raises(ModelError, match="there is no folder"):
        export_onnx(path, tmp_path / "no" / "x.onnx", as_it_is)
    with pytest.raises(ModelError, match="are 8 numbers, not 288"):
        export_onnx(path, tmp_path / "x.onnx", lambda name: [np.zeros(8)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.onnx", "model.onnx"]


@pytest.mark.parametrize("norm", ["instance", "batch", "none"])
def test_zoo(norm: str, tmp_path: Path) -> None:
    path = write_unet3d(tmp_path / "unet.onnx", norm=norm, base=2, depth=2)
    x = torch.randn(2, 1, 8, 12, 16)
    imported = inspect_onnx(path).bind(RULES, {"image": tuple(x.shape)}, training=False)
    fixed = export_onnx(path, tmp_path / "inference.onnx", as_it_is)
    wanted = onnxruntime.InferenceSession(fixed).run(None, {"image": x.numpy()})[0]
    assert error(run(imported, x)[imported.outputs[0][1]], torch.as_tensor(wanted)) < 1e-4
    assert "down1.conv1.weight" in imported.weights
    fixed = write_unet3d(tmp_path / "fixed.onnx", norm=norm, base=2, depth=2, size=(8, 8, 8), in_channels=2)
    assert inspect_onnx(fixed).inputs[0].dims == ("batch", 2, 8, 8, 8)


def test_a_norm_that_keeps_no_statistics_stays_as_it_is(tmp_path: Path) -> None:
    """Its statistics are no initializers: it normalizes by the batch when it predicts, too."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], "mean", axes=[0], keepdims=0),
        helper.make_node("BatchNormalization", ["x", "g", "g", "m", "m"], ["y"], "norm", training_mode=1),
    ]
    path = save(tmp_path / "model.onnx", nodes, {"g": np.ones(3)}, ["n", 3], {"y": ["n", 3]})
    written = onnx.load(str(export_onnx(path, tmp_path / "out.onnx", as_it_is)))
    assert helper.get_node_attr_value(written.graph.node[1], "training_mode") == 1
