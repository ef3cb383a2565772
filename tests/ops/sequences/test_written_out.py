"""Attention that is written out becomes one node, of the same values and gradients; what is not stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor, nn

import oocdl
from oocdl.graph.ir.graph import Array, Graph, Role, needed
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.verify import verify
from oocdl.ops import RULES
from oocdl.ops.sequences.written_out import with_attention
from tests.kit import lowered
from tests.kit.interpret import evaluate
from tests.kit.nets import write_data
from tests.kit.plain_files import export_as
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT

RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(2, 3, length, 4)) for length in (5, 6, 6))
CAUSAL = np.tril(np.ones((5, 6), bool))
SEEN = RANDOM.uniform(size=(2, 1, 5, 6)) < 0.6
SEEN[..., 2] = True
BLIND = SEEN.copy()
BLIND[1, 0, 3] = False
SHIFTED = np.where(SEEN, 0.0, -100.0)
LEAST = float(np.finfo(np.float32).min)


def node(text: str, **attrs: Any) -> Any:
    """A node from ``"y = Op a b"``."""
    made, _, op, *given = text.split()
    return helper.make_node(op, given, [made], name=made, **attrs)


def ops(graph: Graph) -> list[str]:
    """The operators of what the outputs need."""
    return [item.op for item in needed(graph, []).nodes]


def rewritten(graph: Graph, count: int = 1) -> Graph:
    """The graph with ``count`` attentions as one node each, and none written out."""
    found = with_attention(graph, RULES)
    verify(found, RULES, "attention", found.outputs)
    assert (ops(found).count("Attend"), ops(found).count("Softmax")) == (count, 0)
    return found


TURN = node("t = Transpose k", perm=[0, 1, 3, 2])
END = [node("w = Softmax s", axis=-1), node("y = MatMul w v")]
PLAIN = [TURN, node("s = MatMul q t"), *END]
CLEAN = [END[0], node("n = IsNaN w"), node("c = Where n zero w"), node("y = MatMul c v")]
SCORES = [TURN, node("r = MatMul q t")]
ADDED, CHOSEN = [*SCORES, node("s = Add r m")], [*SCORES, node("s = Where m r none")]


def math(q: Tensor, k: Tensor, v: Tensor, *, scale: float = 1.0, mask: Any = None) -> Tensor:
    """PyTorch's attention."""
    mask = torch.as_tensor(mask) if isinstance(mask, np.ndarray) else mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def filled(q: Tensor, k: Tensor, v: Tensor, *, number: float) -> Tensor:
    """Scores are a number where the mask is false."""
    return torch.where(torch.as_tensor(BLIND), q @ k.transpose(2, 3), number).softmax(3) @ v


def scored(q: Tensor, k: Tensor, v: Tensor, mask: Array, chosen: Array | None = None) -> Tensor:
    """A mask is added to the scores, which are -1.5 where they are not chosen."""
    scores = q @ k.transpose(2, 3) + torch.tensor(mask)
    return (scores if chosen is None else torch.where(torch.tensor(chosen), scores, -1.5)).softmax(3) @ v


BEFORE, LATE = np.where(CAUSAL, 0, -inf), np.arange(6) < 4
FORMS: dict[str, tuple[Sequence[Any], dict[str, Any], Callable[..., Any], dict[str, Array]]] = {
    "plain": (PLAIN, {}, math, {}),
    "scale on both, and on scores": (
        [TURN, node("a = Mul q half"), node("b = Div t two"), node("r = MatMul a b"), node("s = Mul r two"),
         *END],
        {"half": np.array(0.5), "two": np.array([2.0])}, partial(math, scale=0.5), {}),
    "added mask": (
        [*ADDED, *END], {}, lambda q, k, v, m: math(q, k, v, mask=m), {"m": RANDOM.normal(size=(3, 5, 6))}),
    "causal constant, cleaned": (
        [*ADDED, *CLEAN], {"m": BEFORE, "zero": np.array(0.0)}, partial(math, mask=CAUSAL), {}),
    "padding, the same for all queries": (
        [*ADDED, *END], {"m": np.where(LATE, 0, -inf)[None, None, None]},
        partial(math, mask=np.tile(LATE, (5, 1))), {}),
    "blind row, cleaned": (
        [*CHOSEN, *CLEAN], {"m": BLIND, "none": np.array(-inf), "zero": np.array(0.0)},
        partial(math, mask=BLIND), {}),
    "blind row of a number": (
        [*CHOSEN, *END], {"m": BLIND, "none": np.array(-1.5)}, partial(filled, number=-1.5), {}),
    "masked where true, the least number": (
        [*SCORES, node("s = Where m none r"), *END], {"m": ~BLIND, "none": np.array(LEAST)},
        partial(filled, number=LEAST), {}),
    "heads side by side, as Keras has it": (
        [helper.make_node("Einsum", ["k", "q"], ["r"], equation="bhkd,bhqd->bhqk"), node("s = Mul r half"),
         node("w = Softmax s", axis=3),
         helper.make_node("Einsum", ["w", "v"], ["y"], equation="bhqk,bhkd->bqhd")],
        {"half": np.array(0.5)}, lambda q, k, v: math(q, k, v, scale=0.5).transpose(1, 2), {}),
    "a trained bias, and a mask of shifted windows": (
        [*SCORES, node("p = Add r m"), node("p5 = Reshape p split"), node("s5 = Add p5 shifted"),
         node("s = Reshape s5 joint"), *END],
        {"split": np.array([2, 2, 3, 5, 6]), "joint": np.array([-1, 3, 5, 6]), "shifted": SHIFTED[None]},
        lambda q, k, v, m: math(q, k, v, mask=m + torch.tensor(SHIFTED).repeat(2, 1, 1, 1)),
        {**{name: RANDOM.normal(size=(4, 3, 5 if name == "q" else 6, 4)) for name in "qkv"},
         "m": RANDOM.normal(size=(1, 3, 5, 6))}),
    "a trained scale of each head, and a mask": (
        [*SCORES, node("p = Mul r a"), node("p2 = Div p b"), node("s = Add p2 m"), *END], {"m": BEFORE},
        lambda q, k, v, a, b: math(q * a / b, k, v, mask=CAUSAL),
        {"a": RANDOM.normal(size=(3, 1, 1)), "b": np.array(1.3)}),
    "a number after the mask, and causal before": (
        [*SCORES, node("p = Add r c"), node("s = Where m p none"), *END],
        {"c": BEFORE, "m": BLIND, "none": np.array(-1.5)}, partial(scored, mask=BEFORE, chosen=BLIND), {}),
    "causal by the least number, and padding by it": (
        [*SCORES, node("p = Add r c"), node("s = Add p m"), *END],
        {"c": np.where(CAUSAL, 0, LEAST), "m": np.where(np.arange(6) < 2, LEAST, 0.0)},
        partial(scored, mask=np.where(CAUSAL, 0, LEAST) + np.where(np.arange(6) < 2, LEAST, 0.0)), {}),
    "batch and heads in one axis": (
        [*(node(f"{x}f = Reshape {x} {x}three") for x in "qkv"), node("t = Transpose kf", perm=[0, 2, 1]),
         node("p = MatMul qf t"), node("p4 = Reshape p four"), node("s4 = Add p4 m"),
         node("w4 = Softmax s4", axis=3), node("w = Reshape w4 scores"), node("y = MatMul w vf")],
        {"qthree": np.array([6, 5, 4]), "kthree": np.array([6, 6, 4]), "vthree": np.array([6, 6, 4]),
         "four": np.array([2, 3, 5, 6]), "scores": np.array([6, 5, 6]), "m": np.where(SEEN, 0.0, LEAST)},
        lambda q, k, v: math(q, k, v, mask=SEEN).flatten(0, 1), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_stay_in_every_cut(name: str, tmp_path: Path) -> None:
    nodes, constants, formula, more = FORMS[name]
    inputs = {"q": Q, "k": K, "v": V, **more}
    model = model_of(nodes, constants, inputs, ["y"])
    lowered.check(model, inputs, formula, tmp_path, counts=(1, 3), tolerances=(1e-7, 2e-5), rewrite=rewritten)


def test_a_blind_row_that_nobody_cleans_stays_no_number(tmp_path: Path) -> None:
    inputs, formula = {"q": Q, "k": K, "v": V}, partial(filled, number=-inf)
    model = model_of([*CHOSEN, *END], {"m": BLIND, "none": np.array(-inf)}, inputs, ["y"])
    lowered.check(model, inputs, formula, tmp_path, counts=(2,), tolerances=(1e-7, 2e-5), rewrite=rewritten)


def model_of(
    nodes: Sequence[Any], constants: dict[str, Array], inputs: dict[str, Array], outputs: Sequence[str]
) -> Any:
    """A model whose constants are nodes, as initializers of floats are trained."""
    floats = {name: array for name, array in constants.items() if array.dtype.kind == "f"}
    values = {name: numpy_helper.from_array(array.astype(np.float32)) for name, array in floats.items()}
    given = [helper.make_node("Constant", [], [name], value=value) for name, value in values.items()]
    rest = {name: array for name, array in constants.items() if name not in floats}
    return lowered.model_of([*given, *nodes], inputs, outputs, rest, opset=20)


def read(model: Any, folder: Path, training: bool = False) -> Graph:
    """The graph of a model."""
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    imported = inspect_onnx(folder / "model.onnx").bind(RULES, precision="float64", training=training)
    return replace(imported.graph, outputs=tuple(value for _, value in imported.outputs))


STAY = {
    "the weights are an output": (PLAIN, {}, ["y", "w"]),
    "something else reads the scores": ([*PLAIN, node("z = Exp s")], {}, ["y", "z"]),
    "Softmax over queries": ([*PLAIN[:2], node("w = Softmax s", axis=2), END[1]], {}, ["y"]),
    "the mask is scaled, too": (
        [*SCORES, node("p = Add r m"), node("s = Mul p two"), *END], {"m": BEFORE, "two": np.array(2.0)},
        ["y"]),
    "something between": (
        [*PLAIN[:2], node("w0 = Softmax s", axis=3), node("w = Relu w0"), END[1]], {}, ["y"]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_is_more_than_attention_stays(name: str, tmp_path: Path) -> None:
    nodes, constants, outputs = STAY[name]
    graph = read(model_of(nodes, constants, {"q": Q, "k": K, "v": V}, outputs), tmp_path)
    assert [item.op for item in with_attention(graph, RULES).nodes] == [item.op for item in graph.nodes]


@pytest.mark.parametrize(("size", "keys", "stays"), [(300, 5, True), (300, 301, False), (64, 5, False)])
def test_channels_that_attend_to_each_other_stay(size: int, keys: int, stays: bool, tmp_path: Path) -> None:
    """What is their size may be space, which is to be cut."""
    q, k = np.zeros((1, 2, 5, size)), np.zeros((1, 2, keys, size))
    graph = read(model_of(PLAIN, {}, {"q": q, "k": k, "v": k}, ["y"]), tmp_path)
    assert ("Softmax" in ops(with_attention(graph, RULES))) == stays


def test_values_that_are_kept_stay(tmp_path: Path) -> None:
    path, inputs = tmp_path / "model.onnx", {"q": Q, "k": K, "v": V}
    path.write_bytes(model_of(PLAIN, {}, inputs, ["y"]).SerializeToString())
    imported = inspect_onnx(path).bind(RULES, {n: a.shape for n, a in inputs.items()}, precision="float32")
    assert "Softmax" in ops(with_attention(imported.graph, RULES, {imported.names["w"], imported.names["y"]}))


class Attentions(nn.Module):
    """PyTorch's attention in all its forms, one after the other."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("seen", torch.ones(6, 6).tril(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads(x, x, x, need_weights=False)[0]
        q = x.view(2, 6, 2, 4).transpose(1, 2)
        for more in ({}, {"is_causal": True}, {"attn_mask": self.seen}):
            q = q + F.scaled_dot_product_attention(q, q, q, **more)
        if self.grouped:
            k = q[:, :1]
            q = q + F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        return q


@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_what_pytorch_exports_is_recognized(dynamo: bool, tmp_path: Path) -> None:
    path, x = tmp_path / "net.onnx", torch.randn(2, 6, 8)
    mode = {"optimize": False, "verbose": False} if dynamo else {"do_constant_folding": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that exporters are deprecated, and the module in training mode
        torch.onnx.export(Attentions(dynamo), (x,), str(path), dynamo=dynamo, **mode)
    model = inspect_onnx(path)
    imported = model.bind(RULES, {model.inputs[0].name: (2, 6, 8)}, precision="float64")
    graph = replace(imported.graph, outputs=tuple(value for _, value in imported.outputs))
    found = rewritten(graph, count=4 + dynamo)
    assert "Expand" not in ops(found)
    random = torch.Generator().manual_seed(0)
    wanted = {name: one.shape for name, one in graph.values.items() if one.role.value in ("weight", "input")}
    given = {name: torch.randn(s, generator=random, dtype=torch.float64) for name, s in wanted.items()}
    before, after = (evaluate(some, given)[graph.outputs[0]] for some in (graph, found))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    bands = {item.attrs["band"] for item in found.nodes if item.op == "Attend"}
    assert bands == {(None, None), (None, 0), (None, 1)}


# Which tokens belong to one text: as transformers has it, from positions that are known.
PACKED = [
    node("n = CumSum starts one"), node("column = Unsqueeze n last"), node("row = Unsqueeze n middle"),
    node("e = Equal column row"), node("seen = And e causal"), node("seen4 = Unsqueeze seen one"),
    node("m = Where seen4 zero none"),
]  # fmt: skip


@pytest.mark.parametrize(("causal", "band"), [(True, (None, 0)), (False, (None, None))])
def test_a_known_mask_of_every_sample_is_a_band_or_nothing(
    causal: bool, band: tuple[Any, Any], tmp_path: Path
) -> None:
    nodes = [*PACKED, *ADDED, *END]
    constants = {
        "starts": np.zeros((2, 6), np.int64), "one": np.array(1),
        "last": np.array([2]), "middle": np.array([1]),
        "causal": np.tril(np.ones((6, 6), bool)) | (not causal),
        "zero": np.array(0.0), "none": np.array(-inf),
    }  # fmt: skip
    graph = read(model_of(nodes, constants, {"q": K, "k": K, "v": V}, ["y"]), tmp_path)
    [attend] = [item for item in needed(rewritten(graph), []).nodes if item.op == "Attend"]
    assert len(attend.inputs) == 3 and attend.attrs["band"] == band


@pytest.mark.parametrize("end", [END[:1], CLEAN[:3]], ids=["plain", "cleaned"])
def test_dropped_weights_are_those_that_were_dropped_before(end: list[Any], tmp_path: Path) -> None:
    ends = [node(f"d = Dropout {end[-1].output[0]} ratio training"), node("y = MatMul d v")]
    nodes = [*PLAIN[:2], *end, *ends]
    constants = {"ratio": np.array(0.4), "zero": np.array(0.0), "training": np.array(True)}
    graph = read(model_of(nodes, constants, {"q": Q, "k": K, "v": V}, ["y"]), tmp_path, training=True)
    found = rewritten(graph)
    assert "Dropout" not in ops(found)
    given = {name: torch.as_tensor(array) for name, array in (("q", Q), ("k", K), ("v", V))}
    [random] = graph.of_role(Role.RANDOM)
    given[random.name] = torch.rand(random.shape, generator=torch.Generator().manual_seed(0)).double()
    before, after = (evaluate(some, given)[graph.outputs[0]] for some in (graph, found))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_dropped_weights_do_not_depend_on_cuts_or_engines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Attentions(False)
    net.heads.dropout = 0.4
    path = export_as(net, [torch.randn(2, 6, 8)], tmp_path / "net.onnx", "torchscript")
    arrays = {"x0": RANDOM.normal(size=(4, 6, 8)), "target": RANDOM.normal(size=(4, 2, 6, 4))}
    data = write_data(tmp_path / "data.zarr", arrays)

    def losses(name: str, **options: Any) -> list[float]:
        options = {**EXACT, "loss": "mse", "batch_size": 2, "steps": 2, "workdir": tmp_path / name, **options}
        return losses_of(oocdl.fit(path, data, **options))

    whole = losses("whole")
    for name, more in (("cut", {"parallel": {"batch": 2}}), ("oracle", {"engine": "numpy"})):
        np.testing.assert_allclose(losses(name, **more), whole, rtol=1e-11)
    assert losses("seed", seed=1) != whole
