"""Gradients at bounds, ties and zeros are PyTorch's, on every engine, whole and in pieces."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.kit.code import ROOT
from tests.kit.kink_cases import KINKS, Several, table
from tests.kit.lowered import weights_of, with_gradients
from tests.kit.models import export

RUNS = [
    ("torch", "float64", 1),
    ("torch", "float64", 2),
    ("numpy", "float32", 1),
    ("onnxruntime", "float32", 2),
]
EXPORTERS = {"torchscript": {name: kink for name, kink in KINKS.items() if kink.torchscript}, "dynamo": KINKS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    """All kinks in one file of each exporter."""
    folder, made = tmp_path_factory.mktemp("kinks"), {}
    for exporter, kinks in EXPORTERS.items():
        net, names = Several(list(kinks.values())), [f"y{number}" for number in range(len(kinks))]
        path = export(net, [net.start()], folder / f"{exporter}.onnx", exporter, outputs=names)
        made[exporter] = onnx.load(path)
    return made


@pytest.mark.parametrize(("engine", "precision", "pieces"), RUNS)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_gradients_are_pytorchs(
    exporter: str, engine: str, precision: str, pieces: int, files: dict[str, onnx.ModelProto], tmp_path: Path
) -> None:
    kinks = EXPORTERS[exporter]
    net = Several(list(kinks.values()))
    given = {"x": net.start().numpy().astype(precision)}
    graph, _, (gradient,) = with_gradients(files[exporter], tmp_path, given, precision)
    ran = run_graph(graph, RULES, given, engine=engine, cuts=dict.fromkeys(range(4), pieces))
    found, different = iter(torch.as_tensor(-ran.outputs[gradient]).split(net.sizes)), {}
    for number, (name, kink) in enumerate(kinks.items()):
        for slope in kink.wanted(partial(weights_of, number)):
            ours = next(found)
            if not np.allclose(ours, slope, rtol=1e-6, atol=1e-7, equal_nan=True):
                different[name] = ours.tolist(), slope.tolist()
    assert not different


@pytest.mark.parametrize("name", [name for name, kink in KINKS.items() if kink.versions])
def test_versions_differ_as_the_table_says(name: str) -> None:
    older, newer = KINKS[name].versions or ((), ())
    found = [tuple(slope.tolist()) for slope in KINKS[name].slopes()]
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert found == list(newer) or version < (2, 15)
    assert found == list(older) or version > (2, 13)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "explanation" / "kinks.md").read_text()
    assert "\n".join(table()) in page, "write it anew: python -m tests.kit.kink_cases"
