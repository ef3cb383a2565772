"""One case an operator and variant, each with a float64 PyTorch formula of the whole operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.engines.torch import torch_pointwise
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Program
from tests.kit.interpret import OPS
from tests.kit.op_cases import CASES, CTC, CTC_GRADS, SEQUENCES
from tests.kit.programs import single

Range = tuple[int, int]
INF = float("inf")


@dataclass
class Case:
    """Operands (in float64 where floating), attributes, and what the result must be."""

    name: str
    op: str
    arrays: list[Array]
    reference: Callable[..., Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    pads: Sequence[Sequence[Range] | None] | None = None
    fill: float = 0.0
    tolerance: float = 1e-5

    def inputs(self, dtype: str) -> list[Array]:
        """The operands with floats as ``dtype``."""
        return [a.astype(dtype) if a.dtype.kind == "f" else a for a in self.arrays]

    def expected(self, dtype: str) -> list[Array]:
        """Results in float64 of the operands as ``dtype`` has them."""
        tensors = [torch.tensor(a, dtype=_reference_dtype(a)) for a in self.inputs(dtype)]
        results = self.reference(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        return [result.detach().numpy() for result in results]

    def program(self, dtype: str) -> Program:
        """One instruction."""
        results = []
        for array in self.expected(dtype):
            name = dtype if array.dtype.kind == "f" else array.dtype.name
            results.append((array.shape, self.attrs.get("to", name)))
        key = f"{self.name}:{dtype}"
        arrays = self.inputs(dtype)
        return single(self.op, arrays, results, self.attrs, self.pads, self.fill, key)


def _reference_dtype(array: Array) -> torch.dtype:
    if array.dtype.kind == "f":
        return torch.float64
    found: torch.dtype = getattr(torch, array.dtype.name)
    return found


def noise(*shape: int, seed: int = 0, low: float | None = None) -> Array:
    """Normal numbers, or uniform ones in [low, low + 2)."""
    random = np.random.default_rng([seed, *shape])
    if low is not None:
        return low + 2 * random.random(shape)
    return random.standard_normal(shape)


def around(pads: Sequence[Range]) -> list[Range]:
    """Pads of spatial axes, none for batch and channels."""
    return [(0, 0), (0, 0), *pads]


def padded(x: Tensor, pads: Sequence[Range] | None, fill: float = 0.0) -> Tensor:
    """The reference's own padding."""
    if pads is None:
        return x
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=fill)


def box(x: Tensor, crop: Sequence[int], shape: Sequence[int]) -> Tensor:
    """``x[crop : crop + shape]`` of an x with zeros all around."""
    pads = [
        (max(-start, 0), max(start + extent - have, 0))
        for start, extent, have in zip(crop, shape, x.shape, strict=True)
    ]
    x = padded(x, pads)
    starts = [start + before for start, (before, _) in zip(crop, pads, strict=True)]
    return x[tuple(slice(s, s + extent) for s, extent in zip(starts, shape, strict=True))]


def oracle(op: str, *arrays: Array, label: str = "", tolerance: float = 1e-5, **attrs: Any) -> Case:
    """A case of which ``interpret`` knows the result."""
    reference = partial(_interpreted, op, attrs)
    return Case(f"{op}{label}", op, list(arrays), reference, attrs, tolerance=tolerance)


def _interpreted(op: str, attrs: Mapping[str, Any], *operands: Tensor) -> Any:
    return OPS[op](operands, attrs)


def pointwise() -> list[Case]:
    """Arithmetic and activations, some with broadcasting, fused gradients."""
    x, y, row = noise(2, 3, 5, 4), noise(2, 3, 5, 4, seed=1), noise(3, 1, 1, seed=2)
    positive, u = noise(2, 3, 5, 4, seed=3, low=0.1), noise(2, 3, 5, 4, seed=9, low=0.0) / 2
    flags, other = x > 0, y > 0.5
    ids = np.arange(24, dtype=np.int64).reshape(2, 3, 4) % 5
    moments = [function((0, 2, 3), keepdims=True) for function in (x.mean, x.var)]
    return [
        *(oracle(op, x, row) for op in ("Add", "Sub", "Min", "Less")),
        *(oracle(op, x, y) for op in ("Max", "Greater", "ReluGrad", "SigmoidGrad", "TanhGrad")),
        *(oracle(op, positive) for op in ("Sqrt", "Log", "Reciprocal")),
        *(oracle(op, x) for op in ("Neg", "Exp", "Abs", "Erf", "Sigmoid", "Tanh", "Identity", "Relu")),
        oracle("Mul", x, np.asarray(1.5)),
        oracle("Mul", np.asarray(3.0), np.asarray(0.5), label="-scalar"),
        oracle("Div", x, positive),
        oracle("Pow", positive, np.asarray(2.5)),
        oracle("Add", ids, ids, label="-int"),
        oracle("Div", -ids, ids + 2, label="-int"),
        oracle("Equal", ids, np.asarray(3, np.int64)),
        oracle("Not", flags),
        oracle("And", flags, other),
        oracle("Or", flags, other),
        oracle("Where", flags, x, np.asarray(-1.0)),
        oracle("Where", ids > 2, ids, ids + 1, label="-int"),
        oracle("Where", flags, other, ~other, label="-bool"),
        oracle("Cast", 3 * x, to="int64", label="-int"),
        oracle("Cast", flags, to="float32", label="-bool"),
        oracle("Softplus", 20 * x),
        oracle("LeakyRelu", x, alpha=0.1),
        *(oracle("LeakyReluGrad", x, y, alpha=alpha, label=f"{alpha}") for alpha in (0.1, -0.5)),
        *(oracle("Gelu", 3 * x, approximate=how, label=how) for how in ("none", "tanh")),
        *(oracle("GeluGrad", y, 3 * x, approximate=how, label=how) for how in ("none", "tanh")),
        *(oracle("Dropout", x, u, ratio=ratio, label=f"{ratio}") for ratio in (0.3, 1.0)),
        oracle("Normalize", x, *moments, axes=(0, 2, 3), eps=1e-3),
    ]


def others(known: Collection[str]) -> list[Case]:
    """Elementwise and sequential operators that are not ``known``, as the tests of their rules have them."""
    wanted = {*torch_pointwise.KERNELS, *(one.op for one in (*SEQUENCES, *CTC, *CTC_GRADS))} - {*known}
    return [
        oracle(case.op, *arrays, label=f"{number} {[a.shape for a in arrays]}", **case.attrs)
        for number, case in enumerate(CASES)
        for arrays in [case.arrays()]
        if case.op in wanted
    ]


def structure() -> list[Case]:
    """Moving elements around; attributes that shapes and pads say anew are wrong."""
    x, nothing, wide = noise(2, 3, 5, 4), noise(2, 0, 5, 4), noise(2, 4, 5, 4, seed=4)
    flags, three = x > 0, [x[:, :1], x[:, 1:], wide]
    shifted = [[(0, 0), pads, (0, 0), (0, 0)] for pads in ((0, 4), (1, 4), (1, 0), (3, 0), (5, -2))]

    def zeros(a: Tensor) -> Tensor:
        return torch.zeros(2, 3, 5, 4, dtype=a.dtype)

    return [
        oracle("Transpose", x, perm=(3, 1, 0, 2)),
        oracle("Concat", *three, axis=1),
        oracle("Concat", flags, ~flags, axis=2, label="-bool"),
        oracle("Reverse", x, axis=2),
        oracle("Reverse", flags, axis=3, label="-bool"),
        oracle("Expand", noise(4), shape=(3, 4), label="-rank"),
        Case("Reshape", "Reshape", [x], lambda a: a.reshape(6, 20), {"shape": (99, 99)}),
        Case("Expand", "Expand", [x[:, :1]], lambda a: a.expand(2, 6, 5, 4), {"shape": (9, 9, 9, 9)}),
        Case(
            "Concat-cut", "Concat", [three[0], nothing, wide],
            lambda a, b, c: torch.cat([a, c[:, :4]], 1), {"axis": 1}, shifted[:3],
        ),
        Case("Slice", "Slice", [x], lambda a: a[:, :, ::2], {"axis": 2, "start": 7, "stop": 99, "step": 2}),
        Case("Slice-1", "Slice", [x], lambda a: a.clone(), {"axis": 2, "start": 7, "stop": 9, "step": 1}),
        Case(
            "Pad", "Pad", [x], lambda a: F.pad(a, (0, 0, 1, 2)), {"axis": 2, "before": 1, "after": 2},
            [around([(1, 2), (0, 0)])],
        ),
        Case(
            "Pad-bool", "Pad", [flags], lambda a: F.pad(a, (2, 0)), {"axis": 3, "before": 2, "after": 0},
            [around([(0, 0), (2, 0)])],
        ),
        Case("Pad-empty", "Pad", [nothing], zeros, {"axis": 1, "before": 3, "after": 0}, shifted[3:4]),
        Case("Pad-outside", "Pad", [nothing], zeros, {"axis": 1, "before": 7, "after": 0}, shifted[4:]),
    ]  # fmt: skip


def lookups() -> list[Case]:
    """Rows of a table or of a table for each sample, and their gradient; indices may count from the end."""
    ids = np.array([[0, 2, 2], [6, 0, 3]], dtype=np.int64)
    table, tables, rows = noise(7, 4), noise(2, 7, 4), noise(2, 3, 4)
    flat, few = noise(2, 7), noise(2, 3)
    each = {"rows": 7, "batch": 1}
    made: list[tuple[str, list[Array], Any, dict[str, Any]]] = [
        ("Gather", [flat[:0], ids[:0]], lambda t, i: t.gather(1, i), {"batch": 1}),
        ("GatherGrad", [ids[:0], few[:0]], lambda i, g: torch.zeros(0, 7, dtype=g.dtype), each),
        ("LastAt", [ids[:0]], lambda i: torch.zeros(0, 7, dtype=i.dtype), each),
    ]
    return [
        oracle("Gather", table, ids),
        oracle("Gather", table > 0, ids, label="-bool"),
        oracle("Gather", ids, ids % 2, label="-whole-numbers"),
        oracle("Gather", table, -ids - 1, label="-negative"),
        oracle("Gather", tables, ids, batch=1, label="-rows"),
        oracle("Gather", flat, -ids - 1, batch=1, label="-elements"),
        oracle("GatherGrad", ids, rows, rows=7),
        oracle("GatherGrad", ids, rows[..., 0], rows=7, label="-1"),
        oracle("GatherGrad", -ids - 1, rows, label="-rows", **each),
        oracle("GatherGrad", ids, few, label="-elements", **each),
        oracle("LastAt", ids, **each),
        oracle("Top", rows, axis=2, k=3, largest=True),
        oracle("Top", ids, axis=1, k=2, largest=False, label="-ties"),
        *(Case(f"{op}-no-tables", op, given, truth, attrs) for op, given, truth, attrs in made),
    ]


def reductions() -> list[Case]:
    """Sums and their relatives; far-off means, infinities, and lines so long that digits would be lost."""
    x, long = noise(2, 3, 5, 4), noise(1, 2, 40, 32, 32) + 1
    lines = noise(3, 5)
    lines[0] = lines[1, 2] = -INF
    lines[2, 1] = 300.0
    cases = [
        oracle("ReduceMax", x, axes=(1, 3)),
        oracle("ReduceSum", np.arange(12, dtype=np.int64).reshape(3, 4), axes=(0,), label="-int"),
        oracle("LogSumExp", lines, axes=(1,), label="-inf"),
        oracle("Moments", x + 100, axes=(2, 3), label="-far", tolerance=2e-5),
    ]
    for axes in ((0,), (1, 3), (0, 2, 3), (0, 1, 2, 3)):
        for op, operand in (("ReduceSum", x + 1), ("LogSumExp", x), ("Moments", x)):
            cases.append(oracle(op, operand, axes=axes, label=f"{axes}"))
    for axes in ((2, 3, 4), (0, 2, 3, 4)):
        for op in ("Moments", "ReduceSum"):
            cases.append(oracle(op, long, axes=axes, label=f"-long{axes}", tolerance=1e-6))
    return cases


def contractions() -> list[Case]:
    """Einsums of every class of letters."""
    small, large = dict(a=2, b=3, c=4, d=5, e=6, f=3), dict(a=64, b=50, c=40)
    equations = (
        "ab,bc->ac", "ab,cb->ac", "ba,bc->ca", "abcd,abed->abce", "bacd,adbe->abce", "abc,cd->abd",
        "abc,abd->cd", "abc,abc->a", "ab,ab->", "a,b->ab", "ab,bc->c", "ab,a->ab", "ab,c->ac",
        "abcd,bdef->aecf",
    )  # fmt: skip
    cases = []
    for sizes, written in ((small, equations), (large, ("ab,bc->ac", "ba,bc->ac", "ab,cb->ca"))):
        for equation in written:
            terms = equation.split("->")[0].split(",")
            arrays = [noise(*(sizes[x] for x in term), seed=n) for n, term in enumerate(terms)]
            label = f"{'-large' * (sizes is large)} {equation}"
            cases.append(oracle("Einsum", *arrays, equation=equation, label=label))
    return cases


def taps_of(matrix: Array) -> dict[str, Array]:
    """Columns and weights [taps, rows] of what is not zero in a matrix."""
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, : max((matrix != 0).sum(1).max(), 1)]
    return {
        "columns": order.T.astype(np.int32),
        "weights": np.ascontiguousarray(np.take_along_axis(matrix, order, axis=1).T),
    }


def resamples() -> list[Case]:
    """Matrices on each axis: dense, of few numbers a row, nearest."""
    random = np.random.default_rng(5)
    wide = np.zeros((50, 60))
    for row in range(50):
        wide[row, row : row + 2] = random.random(2)
    wide[7] = 0
    matrices = {
        "dense": random.random((7, 5)),
        "nearest": np.eye(5)[[0, 0, 1, 3, 4, 4]],
        "weighted": 0.5 * np.eye(5)[[4, 2]],
        "taps": wide,
        "none": np.zeros((3, 5)),
    }
    cases = []
    for label, matrix in matrices.items():
        extent = matrix.shape[1]
        for axis, shape in ((2, (2, 3, extent, 4)), (3, (2, 3, 4, extent)), (0, (extent, 3))):

            def reference(a: Tensor, axis: int = axis, matrix: Array = matrix) -> Tensor:
                return torch.movedim(torch.movedim(a, axis, -1) @ torch.tensor(matrix).T, -1, axis)

            attrs = {"axis": axis, **taps_of(matrix)}
            cases.append(Case(f"Resample-{label}{axis}", "Resample", [noise(*shape)], reference, attrs))
    return cases
