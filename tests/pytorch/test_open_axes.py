"""Other sizes than a file was written at: the network is the module's there too, or refuses by axis."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.pytorch import export as exporting
from oocdl.pytorch.comparison.file_pass import inference_pass
from oocdl.pytorch.exporters import EXPORTERS
from tests.kit.beside import error
from tests.kit.plain_files import WAYS, export_as
from tests.kit.sized_nets import NETWORKS, OTHER, SIZE, network
from tests.kit.turns import some_of

FIXED = {
    "AdaptiveAvgPool2d(4)": "adaptive",
    "AdaptiveMaxPool2d(2)": "adaptive",
    "divided by the root of h w": "sized_nets.py",
    "twice where it is large": "x_2 <= 12",
    "a loop over columns": "sized_nets.py",
    "a grid of places": "sized_nets.py",
    "rolled by half": "its file is another network",
}
"""Networks that are not free of size, and what the refusal names."""

UNSEEN = ("AdaptiveAvgPool2d(4)", "AdaptiveMaxPool2d(2)", "twice where it is large", "rolled by half")
"""Networks of which a file written at one size may hold nothing that tells them from others."""

EXACT_TO = 1e-7
"""Of float64: the TorchScript exporter writes the steps of ``linspace`` as float32."""


def predicted(model: OnnxModel, x: Tensor, weights: nn.Module) -> Tensor:
    """What a file predicts with a module's weights."""
    (port,) = model.inputs
    made = inference_pass(model, {port.name: tuple(x.shape)}, "float64")
    held = {name: torch.as_tensor(item.raw()).double() for name, item in model.initializers.items()}
    (result,) = made.run(held, {port.name: x}, {}).values()
    return result


@pytest.mark.parametrize(("name", "exporter"), some_of(NETWORKS, EXPORTERS))
def test_a_module_at_other_sizes(
    name: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    module, example = network(name), torch.zeros(1, 1, *SIZE, dtype=torch.float64)
    try:
        model = inspect_onnx(oocdl.from_torch(module, example, tmp_path / "net.onnx"))
    except UnsupportedError as why:
        assert f"{exporter}: " in str(why)
        pytest.skip(f"not written: {str(why)[:200]}")
    for size in (SIZE, (12, 12), OTHER, (9, 7)):
        x = torch.randn(2, 1, *size, dtype=torch.float64)
        try:
            found = predicted(model, x, module)
        except ModelError as why:
            assert size != SIZE and name in FIXED, f"{size}: {why}"
            assert "axis" in str(why) or FIXED[name] in str(why)
            continue
        with torch.no_grad():
            assert error(found, module(x)) <= EXACT_TO, size


@pytest.mark.parametrize(("name", "way"), some_of(NETWORKS, WAYS))
def test_a_plain_file_at_other_sizes(name: str, way: str, tmp_path: Path) -> None:
    """Exported at one size, with no axis named: what looks like a size is refused, and the rest is said."""
    module = network(name).float()
    try:
        file = export_as(module, [torch.zeros(2, 1, *SIZE)], tmp_path / "net.onnx", way)
        model = inspect_onnx(file)
        model.bind(exporting.RULES)
    except Exception as why:  # exporters raise whatever they like
        pytest.skip(f"not exported: {str(why)[:100]}")
    for size in (SIZE, OTHER):
        x = torch.randn(2, 1, *size, dtype=torch.float64)
        try:
            found = predicted(model, x, module)
        except ModelError as why:
            assert size != SIZE and "\n" not in str(why)
            continue
        with torch.no_grad():
            wanted = module.double()(x)
        if size == SIZE or name not in UNSEEN:
            assert error(found, wanted) <= 1e-6, size
        if size != SIZE:
            remarks = model.bind(exporting.RULES, {model.inputs[0].name: (2, 1, *size)}).trained.remarks
            assert "the file fixes input" in remarks[-1].text and "dynamic axes" in remarks[-1].cure
