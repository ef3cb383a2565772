"""The modules that ``fit(module)`` trains, as plain files of each exporter: equal, or announced.

What is said has to be of what is different; where nothing is said, the list of what is trained is right.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor, nn

from oocdl.errors import UnsupportedError
from oocdl.graph.onnx.reader import Imported, inspect_onnx
from oocdl.graph.onnx.trained import Part
from oocdl.graph.onnx.writer import export_onnx
from oocdl.ops.registry import RULES
from oocdl.report.trained_view import UNSAID, trained_text
from tests.kit.nets import save
from tests.kit.onnx_kit import F
from tests.kit.plain_files import WAYS, export_as, far, losses_of_file, losses_of_module
from tests.kit.torch_modules import CASES, away_from_start

EXACT = 1e-9
MERGED, FOLDED, COMPUTED = (
    "feed several layers each",
    "BatchNormalization folded in",
    "computed by the exporter",
)
EVALUATED, BUFFERS = "in evaluation mode in the file", "may be (a buffer|buffers) of the module"
ANNOUNCED: dict[str, dict[str, str]] = {
    # module -> way -> a word of the remark, where the file trains another network
    "a positional encoding, two equal LayerNorms": {"torchscript": BUFFERS, "dynamo": MERGED},
    "FrozenBatchNorm2d": {"torchscript": BUFFERS, "dynamo": COMPUTED},
    "a BatchNorm in evaluation mode": {
        "torchscript": EVALUATED, "dynamo": FOLDED, "plain": EVALUATED},
    "norms in both modes": {"dynamo": FOLDED},
    "a BatchNorm in training mode": {"dynamo": FOLDED},
    "a module in evaluation mode": {"torchscript": EVALUATED, "dynamo": FOLDED, "plain": EVALUATED},
    "a BatchNorm without weights": {"dynamo": FOLDED},
    "frozen parts": {"dynamo": FOLDED},
    "weight standardisation": {"dynamo": COMPUTED},
    "a tied head": {"dynamo": "was tied to another weight"},
    "a tied head with padding_idx": {"dynamo": "was tied to another weight"},
    "a parametrization": {"dynamo": COMPUTED},
    "TransformerEncoder": {"dynamo": MERGED},
    "GPT": {"dynamo": MERGED},
    "ResNet": {"dynamo": FOLDED},
    "3D U-Net with transposed convolutions": {"dynamo": FOLDED},
    "3D U-Net with interpolation": {"dynamo": MERGED},
}  # fmt: skip
CAUTIOUS = {
    # what is said of a file that trains its module: that it may not
    ("GroupNorm", "dynamo"): COMPUTED,
    ("weight standardisation", "torchscript"): BUFFERS,
}
REFUSED = {
    ("a shared block, an unused layer", "dynamo"): "running statistics that are trained, or read elsewhere"
}
FREEZES: dict[str, tuple[str, ...] | None] = {
    # what no file holds: the user says it by ``freeze``; None: nothing of ours does the same
    "frozen parts": ("conv.*", "norm.weight", "norm.bias"),
    "padding_idx": None,
    "a tied head with padding_idx": None,
}
QUICK = {
    "a shared block, an unused layer",
    "norms in both modes",
    "a tied head with padding_idx",
    "GroupNorm",
}
"""Those that the dynamo exporter writes without ``--slow`` too: it takes a second for each."""
SILENT = [(name, way) for name in FREEZES for way in WAYS if way not in ANNOUNCED.get(name, {})]
Read = Callable[..., tuple[nn.Module, Imported, float]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A module, its file as it is read, and how far apart losses of both are."""
    folder = tmp_path_factory.mktemp("plain")
    modules: dict[str, tuple[nn.Module, list[Tensor], list[float]]] = {}

    def call(name: str, way: str, *freeze: str) -> tuple[nn.Module, Imported, float]:
        case, path = CASES[name], folder / f"{list(CASES).index(name)}-{way}.onnx"
        if name not in modules:
            torch.manual_seed(0)
            module, arrays = away_from_start(case.make()), case.arrays(np.random.default_rng(0))
            inputs = [torch.as_tensor(arrays[one]) for one in case.inputs]
            modules[name] = module, inputs, losses_of_module(module, inputs)
        module, inputs, wanted = modules[name]
        if not path.exists():
            export_as(copy.deepcopy(module), inputs, path, way)  # tracing moves running statistics
        imported = inspect_onnx(path).bind(RULES, precision="float64", freeze=freeze)
        return module, imported, far(losses_of_file(imported, inputs), wanted)

    return call


def lists_what_is_trained(module: nn.Module, imported: Imported, way: str) -> None:
    """The list has the parameters that forward reads, each once, and nothing else."""
    trained = imported.trained.of(Part.TRAINED)
    sizes = [p.numel() for name, p in module.named_parameters() if not name.startswith("unused.")]
    assert sorted(int(np.prod(record.shape)) for record in trained) == sorted(sizes)
    if way != "dynamo":  # which numbers what it has transposed
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        assert {record.name for record in trained} <= names


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if way == "torchscript" or name in QUICK else pytest.mark.slow)
        for name in CASES
        for way in WAYS
    ],
)
def test_a_plain_file_trains_its_module_or_says_that_it_may_not(name: str, way: str, read: Read) -> None:
    if (name, way) in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name, way]):
            read(name, way)
        return
    module, imported, difference = read(name, way)
    remarks = [remark.text for remark in imported.trained.remarks]
    if (name, way) in SILENT:
        assert remarks == [] and difference > EXACT
        assert UNSAID in trained_text(imported.trained)
        lists_what_is_trained(module, imported, way)
        return
    said = ANNOUNCED.get(name, {}).get(way)
    expected = said or CAUTIOUS.get((name, way))
    if expected is None:
        assert remarks == []
    else:
        assert any(re.search(expected, text) for text in remarks), remarks
    assert (difference < EXACT) == (said is None), difference
    if said is None:
        lists_what_is_trained(module, imported, way)


@pytest.mark.parametrize("name", [name for name, freeze in FREEZES.items() if freeze])
def test_what_no_file_holds_is_the_users_to_say(name: str, read: Read) -> None:
    _, imported, difference = read(name, "torchscript", *(FREEZES[name] or ()))
    assert difference < EXACT
    assert len(imported.trained.of(Part.TRAINED)) == 4 and len(imported.trained.of(Part.FROZEN)) == 4


class ReadsStatistics(nn.Module):
    """A BatchNorm in training mode, whose running mean is added to what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.running_mean is not None
        result: Tensor = self.norm(x) + self.norm.running_mean
        return result


@pytest.mark.parametrize("way", ["torchscript", "plain"])
def test_running_statistics_that_are_read_elsewhere_are_refused(way: str, tmp_path: Path) -> None:
    path = export_as(ReadsStatistics(), [torch.randn(3, 4)], tmp_path / "m.onnx", way)
    with pytest.raises(UnsupportedError, match="running statistics that are trained, or read elsewhere"):
        inspect_onnx(path).bind(RULES)


def test_a_norm_that_is_called_twice_is_exported_in_evaluation_mode(tmp_path: Path) -> None:
    """A file that gives its statistics to the second call through Identity."""
    nodes = [
        helper.make_node("BatchNormalization", ["x", "w", "b", "m", "v"], ["a", "", ""], training_mode=1),
        helper.make_node("Identity", ["m"], ["m1"]),
        helper.make_node("BatchNormalization", ["a", "w", "b", "m1", "v"], ["y", "", ""], training_mode=1),
    ]
    weights = {name: np.full(3, number, F) for number, name in enumerate("wbmv", 1)}
    path = save(tmp_path / "m.onnx", nodes, weights, ["b", 3], {"y": ["b", 3]})
    imported = inspect_onnx(path).bind(RULES, {"x": (2, 3)})
    assert set(imported.graph.updates) == {"m", "v"}
    export_onnx(path, tmp_path / "out.onnx", lambda name: None)
    found = onnx.load(tmp_path / "out.onnx").graph.node
    assert [[item.name for item in node.attribute] for node in found] == [[], [], []]
