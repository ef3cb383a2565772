"""What of a plain file is trained: exactly what PyTorch trains, or it is said before the first step.

What is said has to be of what is different; where nothing is said, the list of what is trained is right.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from torch import Tensor, nn

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.onnx.metadata import Fact, Metadata, write_metadata
from oocdl.graph.onnx.reader import Imported, inspect_onnx
from oocdl.graph.onnx.trained import Part
from oocdl.graph.onnx.writer import export_onnx
from oocdl.ops.registry import RULES
from oocdl.presets.unets import write_unet3d
from oocdl.report.plan_parts import UNSAID, trained_text
from tests.kit.nets import save
from tests.kit.onnx_kit import F, run
from tests.kit.plain_files import MODULES, WAYS, export_as, far, losses_of_file, losses_of_module
from tests.kit.torch_modules import CASES, FrozenBatchNorm2d, away_from_start, running
from tests.kit.turns import some_of

MERGED, FOLDED, COMPUTED = (
    "feed several layers each",
    "BatchNormalization folded in",
    "computed by the exporter",
)
EVALUATED, BUFFERS = "in evaluation mode in the file", "may be (a buffer|buffers) of the module"
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
ANNOUNCED: dict[str, dict[str, str]] = {
    # module -> way -> a word of the remark, where the file trains another network, or may
    "odd-buffer": {"torchscript": BUFFERS},
    "norms-asleep": {"torchscript": EVALUATED, "dynamo": FOLDED, "plain": EVALUATED},
    "zero-biases": {"dynamo": "drops biases"},
    "zero-convolution": {"dynamo": "drops biases"},
    "copied-layers": {"dynamo": MERGED},
    "a positional encoding, two equal LayerNorms": {"torchscript": BUFFERS, "dynamo": MERGED},
    "FrozenBatchNorm2d": {"torchscript": BUFFERS, "dynamo": COMPUTED},
    "a BatchNorm in evaluation mode": {
        "torchscript": EVALUATED, "dynamo": FOLDED, "plain": EVALUATED},
    "norms in both modes": {"dynamo": FOLDED},
    "a BatchNorm in training mode": {"dynamo": FOLDED},
    "a module in evaluation mode": {"torchscript": EVALUATED, "dynamo": FOLDED, "plain": EVALUATED},
    "a BatchNorm without weights": {"dynamo": FOLDED},
    "frozen parts": {"dynamo": FOLDED},
    "a frozen part under no_grad": {"dynamo": FOLDED},
    "codes with straight-through gradients": {"torchscript": BUFFERS},
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
    "detach": ("a.*",),
    "frozen parts": ("conv.*", "norm.weight", "norm.bias"),
    "a frozen part under no_grad": ("conv*", "norm.weight", "norm.bias", "fc.*"),
    "codes with straight-through gradients": None,
    "padding_idx": None,
    "a tied head with padding_idx": None,
}
QUICK = {
    "a shared block, an unused layer",
    "norms in both modes",
    "a tied head with padding_idx",
    "GroupNorm",
}
"""Those of ``CASES`` that the dynamo exporter writes without ``--slow`` too: it takes a second for each."""
SILENT = [(name, way) for name in FREEZES for way in WAYS if way not in ANNOUNCED.get(name, {})]
Read = Callable[..., tuple[nn.Module, Imported, float]]


def exact(name: str) -> float:
    """How far losses may be apart; numbers of the code, such as an epsilon, are float32 in a file."""
    return 1e-5 if name in MODULES else 1e-9


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A module, its file as it is read, and how far apart losses of both are."""
    folder = tmp_path_factory.mktemp("plain")
    modules: dict[str, tuple[nn.Module, list[Tensor], list[float]]] = {}

    def made(name: str) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        if name in MODULES:
            make, example = MODULES[name]
            return make(), [example()]
        case = CASES[name]
        module, arrays = away_from_start(case.make()), case.arrays(np.random.default_rng(0))
        return module, [torch.as_tensor(arrays[one]) for one in case.inputs]

    def call(name: str, way: str, *freeze: str) -> tuple[nn.Module, Imported, float]:
        path = folder / f"{[*MODULES, *CASES].index(name)}-{way}.onnx"
        if name not in modules:
            module, inputs = made(name)
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
        *some_of(MODULES, WAYS),
        *(
            pytest.param(name, way, marks=() if way == "torchscript" or name in QUICK else pytest.mark.slow)
            for name in CASES
            for way in WAYS
            if name != "a compiled part"  # PyTorch writes no file of it
        ),
    ],
)
def test_a_plain_file_trains_its_module_or_says_that_it_may_not(name: str, way: str, read: Read) -> None:
    if (name, way) in REFUSED:
        with pytest.raises(UnsupportedError, match=REFUSED[name, way]):
            read(name, way)
        return
    module, imported, difference = read(name, way)
    remarks = imported.trained.remarks
    silent, said = (name, way) in SILENT, ANNOUNCED.get(name, {}).get(way)
    expected = said or CAUTIOUS.get((name, way))
    assert (difference < exact(name)) == (not silent and said is None), difference
    assert all("oocdl.from_torch(module, example, path)" in remark.cure for remark in remarks)
    if expected is None:
        assert remarks == ()
    else:
        assert any(re.search(expected, remark.text) for remark in remarks), remarks
    if silent:
        assert UNSAID in trained_text(imported.trained)
    if said is None:
        lists_what_is_trained(module, imported, way)


@pytest.mark.parametrize("name", [name for name, freeze in FREEZES.items() if freeze])
def test_what_no_file_holds_is_the_users_to_say(name: str, read: Read) -> None:
    _, imported, difference = read(name, "torchscript", *(FREEZES[name] or ()))
    assert difference < exact(name)
    frozen = imported.trained.of(Part.FROZEN)
    assert frozen and all(record.why.startswith("freeze pattern '") for record in frozen)
    assert UNSAID not in trained_text(imported.trained), "it is said"


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


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("a positional encoding, two equal LayerNorms", ("pe",)),
        ("odd-buffer", ("offset",)),
        ("FrozenBatchNorm2d", ("norm.*",)),
        ("norms-asleep", ("*running_mean", "*running_var")),
    ],
)
def test_the_cure_cures(name: str, freeze: tuple[str, ...], read: Read) -> None:
    imported = read(name, "torchscript")[1]
    (remark,) = imported.trained.remarks
    assert remark.cure.startswith(f"freeze={list(freeze)} ")
    _, imported, difference = read(name, "torchscript", *freeze)
    assert imported.trained.remarks == () and difference < exact(name)


@pytest.mark.parametrize("way", ["torchscript", "plain"])
def test_a_norm_in_evaluation_mode_beside_others_stays_so(way: str, read: Read) -> None:
    trained = read("norms in both modes", way)[1].trained
    asleep = "its norm is in evaluation mode in the file"
    assert {record.name: record.why for record in trained.of(Part.FROZEN)} == {
        "norm.1.running_mean": asleep,
        "norm.1.running_var": asleep,
    }
    statistics = [record.name for record in trained.of(Part.STATISTICS)]
    assert statistics == ["norm.0.running_mean", "norm.0.running_var"]


def test_the_record_says_what_each_tensor_is_for(read: Read) -> None:
    trained = read("odd-buffer", "plain")[1].trained
    assert trained.count(Part.TRAINED) == (4, 99)
    (buffer,) = trained.of(Part.CONSTANT)
    assert (buffer.name, buffer.shape, buffer.why) == ("offset", (8,), "buffer, as the exporter says")
    trained = read("GPT", "torchscript")[1].trained
    (tied,) = trained.tied
    assert tied.name == "wte.weight" and tied.modules == ("wte", "head")
    assert "tied: 'wte.weight' is one tensor of 'wte', 'head'" in trained_text(trained)


def test_a_file_that_says_itself_what_is_trained_gets_no_remarks(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), FrozenBatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    path = export_as(net, [torch.randn(2, 1, 6, 6)], tmp_path / "plain.onnx", "torchscript")
    kinds = {"0": "parameter", "1": "buffer", "3": "parameter"}
    facts = {
        name: Fact(kind=kinds[name[0]], names=(name,), requires_grad=name[0] == "3")
        for name in inspect_onnx(path).initializers
    }
    model = onnx.load(path)
    write_metadata(model, Metadata(module="Sequential", exporter="torchscript", facts=facts))
    onnx.save(model, tmp_path / "told.onnx")
    trained = inspect_onnx(tmp_path / "told.onnx").bind(RULES).trained
    assert trained.remarks == ()
    assert trained_text(trained).splitlines() == [
        "trained: 2 tensors, 15 parameters (parameter, as the file says × 2)",
        "frozen: 2 tensors, 40 parameters (requires_grad=False, as the file says × 2)",
        "constant: 4 tensors (buffer, as the file says × 4)",
    ]


def test_strict_lists_all_remarks(read: Read) -> None:
    trained = read("copied-layers", "dynamo")[1].trained
    assert len(trained.remarks) == 2
    with pytest.raises(ModelError, match=r"for 2 remarks .* \(1\) .*merge tensors.*; \(2\) .*drops biases"):
        trained.refuse()
    read("mlp", "torchscript")[1].trained.refuse()  # nothing to refuse


def written(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Any],
    producer: str = "",
    shape: Sequence[int] = (2, 3),
) -> Imported:
    """What is read of nodes that make ``y`` of ``x`` [shape], as an exporter of that name writes them."""
    arrays = {name: np.asarray(value, F) for name, value in weights.items()}
    path = save(folder / "m.onnx", nodes, arrays, shape, {"y": ()}, producer)
    return inspect_onnx(path).bind(RULES)


def part_of(imported: Imported, name: str) -> Part:
    (found,) = [one.part for one in imported.trained.tensors if one.name == name]
    return found


def test_a_gap_in_a_row_of_biases_of_an_unknown_exporter(tmp_path: Path) -> None:
    def layers(*with_bias: int) -> Imported:
        nodes, weights, x = [], {}, "x"
        for n in range(4):
            names = [x, f"blocks.{n}.weight"] + ([f"blocks.{n}.bias"] if n in with_bias else [])
            x = "y" if n == 3 else f"a{n}"
            nodes.append(helper.make_node("Gemm", names, [x], f"n{n}"))
            weights |= {name: np.ones((3, 3) if name.endswith("weight") else 3) for name in names[1:]}
        return written(tmp_path, nodes, weights)

    (remark,) = layers(0, 2, 3).trained.remarks
    assert remark.text.startswith("1 bias is missing in a row of numbered ones ('blocks.1.bias')")
    assert layers(0, 1, 2).trained.remarks == ()  # a last layer without a bias is common
    assert layers(0, 1, 2, 3).trained.remarks == ()


def added(folder: Path, name: str, producer: str) -> Imported:
    """x + name, of an exporter."""
    return written(folder, [helper.make_node("Add", ["x", name], ["y"], "add")], {name: range(3)}, producer)


@pytest.mark.parametrize(
    ("names", "of_torch", "of_others"),
    [
        ("pe m.pos_embed position_table m.running_mean attn_mask", True, True),
        ("m.mean blur.kernel anything", True, False),
        ("m.weight m.in_proj_bias m.gamma cls_token m.weight_g logit_scale w", False, False),
    ],
)
def test_names_of_buffers(names: str, of_torch: bool, of_others: bool, tmp_path: Path) -> None:
    for name in names.split():
        for producer, wanted in (("pytorch", of_torch), ("", of_others)):
            remarks = added(tmp_path, name, producer).trained.remarks
            assert any("may be a buffer" in remark.text for remark in remarks) == wanted, name
    assert UNSAID in trained_text(added(tmp_path, "w", "").trained)
    preset = inspect_onnx(write_unet3d(tmp_path / "u.onnx", classes=2, base=2, depth=1, size=(4, 4, 4)))
    assert UNSAID not in trained_text(preset.bind(RULES, {"image": (1, 1, 4, 4, 4)}).trained)


def folded_by(tool: str, net: nn.Module, x: Tensor, path: Path) -> Sequence[str]:
    """What is said of a file of a module in evaluation mode that a tool has folded norms into layers of."""
    export_as(net.eval(), [x], path, "dynamo" if tool == "dynamo" else "torchscript")
    if tool == "onnxruntime":
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return [remark.text for remark in inspect_onnx(path).bind(RULES).trained.remarks]


@pytest.mark.parametrize("tool", ["dynamo", "onnxruntime"])
def test_a_norm_that_a_tool_folds_is_told(tool: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4, bias=False), running(nn.BatchNorm1d(4)))
    (said,) = folded_by(tool, net, torch.randn(2, 8), tmp_path / "linear.onnx")
    assert said.startswith(f"1 layer has a {FOLDED}")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), running(nn.BatchNorm2d(4)))
    (said,) = folded_by(tool, net, torch.randn(2, 1, 5, 5), tmp_path / "convolution.onnx")
    assert said.startswith(f"1 layer has a {FOLDED}")


@pytest.mark.parametrize(
    ("names", "label", "wanted"),
    [
        ("_v_1 _v_2 _v_3 _v_4", "/conv", "4 trained tensors were computed by the exporter"),
        ("0.weight 0.weight_bias 3.weight 3.weight_bias", "n", "2 layers have a BatchNormalization folded"),
        ("0.weight 0.bias 3.weight 3.bias", "node_Conv_1", "2 layers have a BatchNormalization folded"),
        ("0.weight 0.bias 3.weight 3.bias", "node_conv2d", ""),
    ],
)
def test_names_tell_what_onnxsim_has_kept_no_other_trace_of(
    names: str, label: str, wanted: str, tmp_path: Path
) -> None:
    first, second = names.split()[:2], names.split()[2:]
    nodes = [
        helper.make_node("Conv", ["x", *first], ["a"], f"{label}1"),
        helper.make_node("Mul", ["a", "_v_9"], ["h"], "scale"),
        helper.make_node("Conv", ["h", *second], ["y"], f"{label}2"),
    ]
    shapes = [(3, 3, 1), (3,)] * 2
    weights = {name: np.ones(shape) for name, shape in zip(names.split(), shapes, strict=True)}
    trained = written(tmp_path, nodes, weights | {"_v_9": 0.5}, "pytorch", (2, 3, 4)).trained
    assert [record.name for record in trained.of(Part.CONSTANT)] == ["_v_9"]
    assert len(trained.remarks) == bool(wanted) and all(
        remark.text.startswith(wanted) for remark in trained.remarks
    )


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    name = "pe\x1b[31m\nall is well"
    text = trained_text(added(tmp_path, f"m.{name}", "pytorch").trained)
    assert "m.pe\\x1b[31m\\nall is well" in text and "\x1b" not in text
    assert "all is well" not in [line.strip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("op", "name", "value", "producer", "part"),
    [
        ("Pow", "p", [1.0, 2, 3], "pytorch", Part.TRAINED),
        ("Pow", "p", 2.0, "", Part.CONSTANT),
        ("Pow", "val_3", [1.0, 2, 3], "pytorch", Part.CONSTANT),
        ("Add", "3", [0.5], "", Part.TRAINED),
        ("Add", "/fc/b", [0.5], "", Part.TRAINED),
        ("Add", "/fc/b", [0.5], "pytorch", Part.CONSTANT),
        ("Mul", "auto.cast.4", [0.5], "", Part.CONSTANT),
        ("Sub", "model/normalization/Sub/y:0", [0.0, 1, 2], "tf2onnx", Part.CONSTANT),
        ("Sub", "model/normalization/Sub/y:0", [0.0, 1, 2], "another", Part.TRAINED),
        ("Sub", "model/Const_2:0", [0.0, 1, 2], "tf2onnx", Part.CONSTANT),
        ("Sub", "model/dense/BiasAdd/ReadVariableOp:0", [0.0, 1, 2], "tf2onnx", Part.TRAINED),
    ],
)
def test_what_a_name_and_a_value_tell(
    op: str, name: str, value: object, producer: str, part: Part, tmp_path: Path
) -> None:
    """Of exponents, of numbers of the code, and of what TensorFlow names."""
    nodes = [helper.make_node("MatMul", ["x", "m"], ["h"]), helper.make_node(op, ["h", name], ["y"])]
    assert part_of(written(tmp_path, nodes, {"m": np.eye(3), name: value}, producer), name) is part


@pytest.mark.parametrize(("kind", "part"), [("PARAMETER", Part.TRAINED), ("CONSTANT_TENSOR", Part.CONSTANT)])
def test_an_exponent_is_what_the_exporter_says(kind: str, part: Part, tmp_path: Path) -> None:
    node, path = helper.make_node("Pow", ["x", "p"], ["y"]), tmp_path / "m.onnx"
    model = onnx.load(save(path, [node], {"p": np.array(2.0)}, (2, 3), {"y": ()}, "pytorch"))
    model.graph.value_info.append(helper.make_tensor_value_info("p", onnx.TensorProto.FLOAT, []))
    model.graph.value_info[0].metadata_props.add(key=KIND, value=kind)
    onnx.save(model, path)
    assert part_of(inspect_onnx(path).bind(RULES), "p") is part


@pytest.mark.parametrize(
    ("name", "value", "producer", "part"),
    [
        ("h0", 0.0, "", Part.CONSTANT),
        ("h0", 0.5, "", Part.TRAINED),
        ("h0", 0.0, "pytorch", Part.TRAINED),
        ("onnx::GRU_12", 0.0, "pytorch", Part.CONSTANT),
    ],
)
def test_zeros_with_which_sequences_begin(
    name: str, value: float, producer: str, part: Part, tmp_path: Path
) -> None:
    """A state that PyTorch's files have by its name is a parameter; others write zeros for none."""
    weights = {"w": np.ones((1, 2, 3)), "r": np.ones((1, 2, 2)), name: np.full((1, 4, 2), value)}
    node = helper.make_node("RNN", ["x", "w", "r", "", "", name], ["y"], "n", hidden_size=2)
    assert part_of(written(tmp_path, [node], weights, producer, (5, 4, 3)), name) is part


@pytest.mark.parametrize(
    ("name", "producer", "told"), [("w", "", True), ("_v_4", "pytorch", True), ("w", "pytorch", False)]
)
def test_weights_in_constant_nodes_are_told(name: str, producer: str, told: bool, tmp_path: Path) -> None:
    """PyTorch writes parameters as initializers; onnxsim makes Constant nodes of some."""
    nodes = [
        helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.eye(3, dtype=F))),
        helper.make_node("MatMul", ["x", name], ["h"]),
        helper.make_node("Add", ["h", "b.bias"], ["y"]),
    ]
    remarks = written(tmp_path, nodes, {"b.bias": np.ones(3)}, producer).trained.remarks
    wanted = [f"1 weight is in a Constant node ('{name}')"] * told
    assert [remark.text.partition(":")[0] for remark in remarks] == wanted


@pytest.mark.parametrize("producer", ["", "pytorch"])
def test_running_variances_are_those_of_the_framework(producer: str, tmp_path: Path) -> None:
    """ONNX defines them by the biased variance of a batch, PyTorch by the unbiased one."""
    names, made = ["x", "s", "b", "m", "v"], ["y", "m1", "v1"]
    node = helper.make_node("BatchNormalization", names, made, training_mode=1)
    weights = {"s": np.ones(2), "b": np.zeros(2), "m": np.zeros(2), "v": np.ones(2)}
    x = np.random.default_rng(0).standard_normal((4, 2)).astype(F)
    read = written(tmp_path, [node], weights, producer, (4, 2))
    found = run(read, torch.tensor(x))[read.graph.updates["v"]].numpy()
    norm = nn.BatchNorm1d(2)
    norm(torch.tensor(x))
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.output.append(helper.make_tensor_value_info("v1", onnx.TensorProto.FLOAT, [2]))
    _, wanted = ReferenceEvaluator(model.SerializeToString()).run(None, {"x": x})
    assert found == pytest.approx(norm.running_var.numpy() if producer else wanted, rel=1e-6)
