"""Reading ONNX: the graph computes what PyTorch computes, and bad files get one clear line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, parser

import oocdl
from oocdl.errors import InputError, ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.lower.structure import rebound
from oocdl.graph.onnx.model_file import load
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.onnx.trained import Part
from oocdl.graph.onnx.writer import export_onnx
from oocdl.ops.registry import RULES
from tests.kit.lowered import model_of
from tests.kit.models import GPT, MLP, ResNet, TwoHeads, UNet3d, exact, export, families
from tests.kit.onnx_kit import F, bound, conv_model, error, perturbed, run
from tests.kit.settings import EXACT
from tests.kit.turns import some_of

BOTH = ("torchscript", "dynamo")
OPEN, SLOW = (0, 2, 3, 4), pytest.mark.slow
VOLUMES = [
    case if case[1] == "torchscript" or case == ("group", "dynamo", ()) else pytest.param(*case, marks=SLOW)
    for case in itertools.product(("instance", "batch", "group"), BOTH, ((), OPEN))
]


@pytest.mark.parametrize(("family", "exporter"), some_of(families(), BOTH))
def test_equals_pytorch(family: str, exporter: str, tmp_path: Path) -> None:
    make, example = families()[family]
    model, inputs = perturbed(make()), example()
    outputs = ("map", "class") if family == "two-heads" else ("y",)
    path = export(model, inputs, tmp_path / "model.onnx", exporter, outputs=outputs)
    imported = inspect_onnx(path).bind(RULES, precision="float64")
    values = run(imported, *inputs)
    tolerance = 1e-7 if family.startswith("gpt") else 1e-13  # sqrt(2) and the like are float32 in the file
    assert [name for name, _ in imported.outputs] == list(outputs)
    for (_, value), wanted in zip(imported.outputs, exact(model, *inputs), strict=True):
        assert error(values[value], wanted) < tolerance
    state = model.state_dict()  # ``exact`` ran one training-mode forward pass
    trained = {name for name, _ in model.named_parameters()}
    assert {value.name for value in imported.graph.of_role(Role.WEIGHT)} >= trained - {
        "head.weight",
        "wte.weight",
    }
    assert len(imported.graph.of_role(Role.WEIGHT)) == len(trained)
    for old, new in imported.graph.updates.items():
        assert imported.graph.values[old].role is Role.STATE
        assert error(values[new], state[old]) < 1e-13
    assert len(imported.graph.updates) == sum(name.endswith(("_mean", "_var")) for name in state)


@pytest.mark.parametrize(("norm", "exporter", "dynamic"), VOLUMES)
def test_volume_of_another_size(norm: str, dynamic: tuple[int, ...], exporter: str, tmp_path: Path) -> None:
    model = perturbed(UNet3d(norm=norm, base=2, up="trilinear" if norm == "group" else "transpose"))
    first = torch.randn(2 if dynamic else 1, 1, 32, 32, 32)
    path = export(model, (first,), tmp_path / "model.onnx", exporter, dynamic=dynamic)
    x = torch.randn(3, 1, 24, 20, 28)
    imported = inspect_onnx(path).bind(RULES, {"x": tuple(x.shape)}, precision="float64")
    assert error(run(imported, x)[imported.outputs[0][1]], exact(model, x)[0]) < 1e-13
    space = 24 * 20 * 28  # group norms must leave the axes of space alone, so that they can be cut
    assert all(space not in value.shape for value in imported.graph.values.values())


def test_a_slice_of_two_axes_is_read_at_other_sizes(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,2,8,8] x) => (float[1,2,p,q] y) {
        axes = Constant <value_ints=[2,3]> () starts = Constant <value_ints=[1,1]> ()
        ends = Constant <value_ints=[9223372036854775807,9223372036854775807]> ()
        y = Slice (x, starts, ends, axes) }"""
    imported = bound(parser.parse_model(text), tmp_path, {"x": (1, 2, 6, 9)})
    assert imported.graph.values[imported.outputs[0][1]].shape == (1, 2, 5, 8)


@pytest.mark.parametrize("exporter", BOTH)
@pytest.mark.parametrize("dynamic", [(), (0, 1)])
def test_gpt_with_another_batch(dynamic: tuple[int, ...], exporter: str, tmp_path: Path) -> None:
    model = perturbed(GPT())
    path = export(
        model,
        (torch.randint(0, 50, (2 if dynamic else 1, 12)),),
        tmp_path / "m.onnx",
        exporter,
        dynamic=dynamic,
    )
    ids = torch.randint(0, 50, (3, 9 if dynamic else 12))
    imported = inspect_onnx(path).bind(RULES, {"x": tuple(ids.shape)}, precision="float64")
    assert error(run(imported, ids)[imported.outputs[0][1]], exact(model, ids)[0]) < 1e-7
    if not dynamic:
        with pytest.raises(ModelError, match=r"^node '"):
            inspect_onnx(path).bind(RULES, {"x": (1, 9)})


def test_float32_and_inference_agree_with_onnxruntime(tmp_path: Path) -> None:
    model = perturbed(ResNet())
    x = torch.randn(4, 3, 16, 16)
    model.train()(x)  # running statistics other than 0 and 1
    path = export(model, (x,), tmp_path / "model.onnx", training=True)
    imported = inspect_onnx(path).bind(RULES, training=False)
    assert not imported.graph.updates and len(imported.graph.of_role(Role.STATE)) == 12
    quiet = export_onnx(path, tmp_path / "quiet.onnx", lambda name: None)
    wanted = onnxruntime.InferenceSession(quiet).run(None, {"x": x.numpy()})[0]
    assert error(run(imported, x)[imported.outputs[0][1]], torch.as_tensor(wanted)) < 1e-5


def test_freeze(tmp_path: Path) -> None:
    model = perturbed(ResNet())
    x = torch.randn(4, 3, 16, 16)
    path = export(model, (x,), tmp_path / "model.onnx")
    imported = inspect_onnx(path).bind(RULES, precision="float64", freeze=("bn1.*", "layers.0.*"))
    assert "bn1.running_mean" in imported.frozen and "layers.0.convs.0.weight" in imported.frozen
    assert not any(name.startswith(("bn1", "layers.0")) for name in imported.graph.updates)
    assert "layers.1.norms.0.running_var" in imported.graph.updates
    model.double().train()
    for part in ("bn1", "layers.0"):
        model.get_submodule(part).eval()
    with torch.no_grad():
        wanted = model(x.double())
    assert error(run(imported, x)[imported.outputs[0][1]], wanted) < 1e-13


@pytest.mark.parametrize("exporter", BOTH)
def test_dropout_is_active_in_training_only(exporter: str, tmp_path: Path) -> None:
    path = export(MLP(dropout=0.25), (torch.randn(5, 8),), tmp_path / "model.onnx", exporter)
    graph = inspect_onnx(path).bind(RULES).graph
    (node,) = (node for node in graph.nodes if node.op == "Dropout")
    assert node.attrs == {"ratio": 0.25}
    (uniform,) = graph.of_role(Role.RANDOM)
    assert uniform.name == f"{node.name}/uniform" and uniform.shape == (5, 16)
    assert not inspect_onnx(path).bind(RULES, training=False).graph.of_role(Role.RANDOM)


@pytest.mark.parametrize(("final", "op"), [("softmax", "Softmax"), ("sigmoid", "Sigmoid"), ("", None)])
def test_final_activation(final: str, op: str | None, tmp_path: Path) -> None:
    path = export(MLP(final=final), (torch.randn(5, 8),), tmp_path / "model.onnx")
    imported = inspect_onnx(path).bind(RULES)
    assert imported.final_activation.get("y") == op
    assert imported.logits.get("y") == (None if op is None else "layers.1/Gemm/add")


MAPS, KINDS = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4


def loss_of(path: Path, labels: torch.Tensor, **how: Any) -> float:
    """The first loss on ``MAPS``; cross entropy, unless ``how`` names another."""
    how = {
        **EXACT,
        "loss": "cross_entropy",
        "steps": 1,
        "batch_size": 2,
        "optimizer": "sgd",
        "lr": 0.0,
        **how,
    }
    data = {"x": MAPS.numpy(), "t": labels.numpy()}
    run = oocdl.fit(path, data, targets={"y": "t"}, workdir=path.with_suffix(".run"), **how)
    return float(run.history[0]["loss"])


class Head(torch.nn.Module):
    """A convolution to 4 classes, and what makes its output of that."""

    def __init__(self, end: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.end = torch.nn.Conv2d(3, 4, 1), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.conv(x))


@pytest.mark.parametrize("opset", [11, 12, 13])
@pytest.mark.parametrize("final", ["softmax", "log_softmax"])
def test_a_softmax_over_channels(final: str, opset: int, tmp_path: Path) -> None:
    """Before opset 13 PyTorch writes it between two Transposes."""
    head, labels = Head(lambda x: getattr(x, final)(1)), KINDS.reshape(2, 5, 6)
    path = export(head, (MAPS,), tmp_path / "model.onnx", opset=opset)
    with pytest.raises(InputError, match="ends in (Log)?Softmax, .*logits='auto'"):
        loss_of(path, labels)
    imported = inspect_onnx(path).bind(RULES, precision="float64")
    assert error(run(imported, MAPS)[imported.outputs[0][1]], exact(head, MAPS)[0]) < 1e-13
    wanted = torch.nn.functional.cross_entropy(head.conv(MAPS.double()), labels).item()
    assert loss_of(path, labels, logits="auto") == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("opset", [11, 13])
@pytest.mark.parametrize(
    "end",
    [
        lambda x: x.softmax(1).flatten(2),
        lambda x: x.sigmoid().unsqueeze(1).squeeze(1),
        lambda x: x.softmax(1).flatten(2).transpose(1, 2).reshape(2, 4, 30),
    ],
    ids=["reshaped", "squeezed", "turned"],
)
def test_an_activation_before_what_moves_its_numbers_is_refused(end: Any, opset: int, tmp_path: Path) -> None:
    path = export(Head(end), (MAPS,), tmp_path / "model.onnx", opset=opset)
    for logits in ("strict", "auto"):
        with pytest.raises(
            InputError, match=r"ends in S\w+, but the loss takes logits; export the model without"
        ):
            loss_of(path, KINDS.reshape(2, 30), logits=logits)


def test_an_old_softmax_over_several_axes_before_a_transpose_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Softmax", ["c"], ["s"], axis=1),
        helper.make_node("Transpose", ["s"], ["y"], perm=[0, 1, 3, 2]),
    ]
    model = model_of(nodes, {"x": MAPS.numpy()}, ["y"], {"w": np.ones((4, 3, 1, 1))}, opset=11)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(InputError, match="ends in Softmax, but the loss takes logits; export"):
        loss_of(tmp_path / "model.onnx", KINDS.reshape(2, 6, 5), logits="auto")


@pytest.mark.parametrize(
    ("opset", "axis", "shape", "labels", "how", "said"),
    [
        (17, -1, (4, 5, 6), (5, 6), {}, r"over axes \[3\], but the classes of its loss are axis 1"),
        (11, 1, (4, 5, 6), (5, 6), {"loss": "dice"}, r"over axes \[1, 2, 3\], but .* axis 1"),
        (17, 1, (30, 4), (30,), {}, r"over axes \[1\], but .* axis 2"),
        (17, 1, (30, 4), (3,), {"loss": "ctc", "logits": "strict"}, r"over axes \[1\], but .* axis 2"),
        (17, 2, (30, 4), (3,), {"loss": "ctc", "logits": "strict"}, ""),
        (11, 1, (120, 1, 1), (1, 1), {}, ""),
        (17, 2, (30, 4), (30,), {}, ""),
    ],
)
def test_a_softmax_over_other_axes_than_the_classes_is_refused(
    opset: int, axis: int, shape: Any, labels: Any, how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("LogSoftmax", ["r"], ["y"], axis=axis),
    ]
    known = {"w": np.ones((4, 3, 1, 1)), "shape": np.array((2, *shape))}
    onnx.save(model_of(nodes, {"x": MAPS.numpy()}, ["y"], known, opset=opset), tmp_path / "model.onnx")
    how = {"logits": "auto", **how}
    with pytest.raises(InputError, match=said) if said else nullcontext():
        loss_of(tmp_path / "model.onnx", torch.ones((2, *labels), dtype=torch.int64), **how)


@pytest.mark.parametrize("exporter", BOTH)
def test_exported_for_inference(exporter: str, tmp_path: Path) -> None:
    """Weights lose their names, numbers become initializers, equal tensors are merged."""
    model = GPT()
    ids = torch.randint(0, 50, (2, 12))
    path = export(model, (ids,), tmp_path / "model.onnx", exporter, training=False)
    imported = inspect_onnx(path).bind(RULES, precision="float64")
    assert error(run(imported, ids)[imported.outputs[0][1]], exact(model, ids)[0]) < 1e-7
    assert all(value.shape for value in imported.graph.of_role(Role.WEIGHT))
    text = " ".join(remark.text for remark in imported.trained.remarks)
    assert "feed several layers" in text  # all its LayerNorms share one weight
    assert "computed by the exporter" in text


@pytest.mark.parametrize(
    ("before", "after", "now", "batch", "wanted"),
    [
        ((1, 32, 8, 8, 8), (1, 4, 4096), (3, 32, 8, 8, 8), (1, 3), (3, 4, 4096)),
        ((2, 12, 64), (2, 12, 4, 16), (5, 12, 64), (2, 5), (5, 12, 4, 16)),
        ((17, 1, 16), (17, 16), (17, 5, 16), (1, 5), (85, 16)),
        ((17, 16), (17, 1, 16), (85, 16), (1, 5), (17, 5, 16)),
        ((12, 9, 8), (1, 12, 9, 8), (60, 9, 8), (1, 5), (5, 12, 9, 8)),
        ((64,), (8, 8), (144,), (1, 2), None),
    ],
)
def test_rebound(before: Any, after: Any, now: Any, batch: Any, wanted: Any) -> None:
    assert rebound(before, after, now, batch) == wanted


def test_two_heads_names(tmp_path: Path) -> None:
    path = export(TwoHeads(), (torch.randn(2, 1, 6, 6),), tmp_path / "model.onnx", outputs=("map", "class"))
    model = inspect_onnx(path)
    assert [(port.name, port.dims, port.dtype) for port in model.inputs] == [("x", (2, 1, 6, 6), "float32")]
    assert [port.name for port in model.outputs] == ["map", "class"]


def numbers_of(nodes: list[onnx.NodeProto], **arrays: Any) -> onnx.ModelProto:
    """x [2, 3] -> y, without the name of a producer."""
    return model_of(nodes, {"x": np.zeros((2, 3))}, ["y"], arrays, opset=17)


def test_numbers_and_masks_are_no_weights(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["a"]),
        helper.make_node("Add", ["a", "val_3"], ["b"]),
        helper.make_node("Mul", ["b", "gain"], ["y"]),
    ]
    known = {"scale": 0.5, "val_3": [0, -np.inf, 0], "gain": np.ones(3), "unused": np.ones(3)}
    imported = bound(numbers_of(nodes, **known), tmp_path)
    assert tuple(imported.weights) == ("gain",)
    assert [record.name for record in imported.trained.of(Part.CONSTANT)] == ["scale", "val_3"]


@pytest.mark.parametrize("shape", [(), (2, 1)])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_no_weights(
    number: float, shape: tuple[int, ...], tmp_path: Path
) -> None:
    node = helper.make_node("Where", ["which", "x", "other"], ["y"])
    known = {"which": np.array([True, False, True]), "other": np.full(shape, number, F)}
    imported = bound(numbers_of([node], **known), tmp_path)
    found = run(imported, torch.ones(2, 3))[imported.outputs[0][1]]
    np.testing.assert_array_equal(found, [[1, number, 1]] * 2)
    assert not imported.weights


def test_half_precision_is_read_as_the_precision(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["h", "weight"], ["g"]),
        helper.make_node("Cast", ["g"], ["y"], to=TensorProto.FLOAT),
    ]
    model = numbers_of(nodes, weight=np.full((3, 4), 0.1, np.float16))
    for precision in ("float32", "float64"):
        imported = bound(model, tmp_path, precision=precision)
        assert {value.dtype for value in imported.graph.values.values()} == {precision}
        assert imported.weights["weight"].read().dtype == precision
        assert [node.op for node in imported.graph.nodes] == ["Einsum"]


def test_weights_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    weight = np.arange(300_000, dtype=F).reshape(100, 3000)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    onnx.save(numbers_of(nodes, w=weight[:3]), path)
    assert load(path)[0].ByteSize() < 1000 < path.stat().st_size
    source = inspect_onnx(path).bind(RULES).weights["w"]
    assert source.data is None and source.path == path
    assert (source.read(((1, 3), (7, 2000))) == weight[1:3, 7:2000]).all()


def test_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(conv_model().SerializeToString())
    first = inspect_onnx(path).fingerprint()
    assert inspect_onnx(path).fingerprint() == first
    path.write_bytes(conv_model(opset=18).SerializeToString())
    assert inspect_onnx(path).fingerprint() != first
