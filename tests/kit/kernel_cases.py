"""One case an operator and variant, each with a float64 PyTorch formula of the whole operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from oocdl.engines.torch.torch_pointwise import BLOCKWISE
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


def pointwise() -> list[Case]:
    """Arithmetic and activations, some with broadcasting."""
    x, y = noise(2, 3, 5, 4), noise(2, 3, 5, 4, seed=1)
    row, positive = noise(3, 1, 1, seed=2), noise(2, 3, 5, 4, seed=3, low=0.1)
    flags, other = x > 0, y > 0.5
    ids = np.arange(24, dtype=np.int64).reshape(2, 3, 4) % 5
    cases = [
        Case("Add", "Add", [x, row], torch.add),
        Case("Sub", "Sub", [x, row], torch.sub),
        Case("Mul", "Mul", [x, np.asarray(1.5)], torch.mul),
        Case("Div", "Div", [x, positive], torch.div),
        Case("Pow", "Pow", [positive, np.asarray(2.5)], torch.pow),
        Case("Max", "Max", [x, y], torch.maximum),
        Case("Min", "Min", [x, row], torch.minimum),
        Case("Add-int", "Add", [ids, ids], torch.add),
        Case("Div-int", "Div", [-ids, ids + 2], lambda a, b: torch.div(a, b, rounding_mode="trunc")),
        Case("Greater", "Greater", [x, y], torch.gt),
        Case("Less", "Less", [x, row], torch.lt),
        Case("Equal", "Equal", [ids, np.asarray(3, np.int64)], torch.eq),
        Case("Not", "Not", [flags], torch.logical_not),
        Case("And", "And", [flags, other], torch.logical_and),
        Case("Or", "Or", [flags, other], torch.logical_or),
        Case("Where", "Where", [flags, x, np.asarray(-1.0)], torch.where),
        Case("Where-int", "Where", [ids > 2, ids, ids + 1], torch.where),
        Case("Where-bool", "Where", [flags, other, ~other], torch.where),
        Case("Cast-int", "Cast", [3 * x], lambda a: a.to(torch.int64), {"to": "int64"}),
        Case("Cast-bool", "Cast", [flags], lambda a: a.double(), {"to": "float32"}),
    ]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "Neg": torch.neg,
        "Exp": torch.exp,
        "Abs": torch.abs,
        "Erf": torch.special.erf,
        "Sigmoid": torch.sigmoid,
        "Tanh": torch.tanh,
        "Identity": torch.clone,
        "Relu": torch.relu,
    }
    cases += [Case(op, op, [x], function) for op, function in functions.items()]
    cases += [
        Case("Sqrt", "Sqrt", [positive], torch.sqrt),
        Case("Log", "Log", [positive], torch.log),
        Case("Reciprocal", "Reciprocal", [positive], torch.reciprocal),
        Case("Softplus", "Softplus", [20 * x], lambda a: torch.logaddexp(a, torch.zeros_like(a))),
        Case("Scalar", "Mul", [np.asarray(3.0), np.asarray(0.5)], torch.mul),
    ]
    return cases + activations(x, y)


def others(known: Collection[str]) -> list[Case]:
    """Elementwise and sequential operators that are not ``known``, as the tests of their rules have them."""
    return [
        Case(
            f"{case} {[a.shape for a in case.arrays()]}",
            case.op,
            case.arrays(),
            lambda *args, case=case: OPS[case.op](args, case.attrs),
            case.attrs,
        )
        for case in CASES
        if case.op in {*BLOCKWISE, *(one.op for one in (*SEQUENCES, *CTC, *CTC_GRADS))}
        and case.op not in known
    ]


def gradient_of(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """(dy, x) -> the gradient, by autograd."""

    def reference(dy: Tensor, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x), x, dy)[0]

    return reference


def activations(x: Array, dy: Array) -> list[Case]:
    """Operators with attributes, and fused gradients."""
    u = noise(2, 3, 5, 4, seed=9, low=0.0) / 2
    cases = [
        Case("LeakyRelu", "LeakyRelu", [x], lambda a: F.leaky_relu(a, 0.1), {"alpha": 0.1}),
        Case("ReluGrad", "ReluGrad", [dy, x], gradient_of(torch.relu)),
        Case("SigmoidGrad", "SigmoidGrad", [dy, x], lambda g, y: g * y * (1 - y)),
        Case("TanhGrad", "TanhGrad", [dy, x], lambda g, y: g * (1 - y * y)),
    ]
    for alpha in (0.1, -0.5):

        def leaky(a: Tensor, alpha: float = alpha) -> Tensor:
            return torch.where(a > 0, a, alpha * a)

        attrs: dict[str, Any] = {"alpha": alpha}
        name = f"LeakyReluGrad{alpha}"
        cases.append(Case(name, "LeakyReluGrad", [dy, x], gradient_of(leaky), attrs))
    for kind in ("none", "tanh"):

        def gelu(a: Tensor, kind: str = kind) -> Tensor:
            return F.gelu(a, approximate=kind)

        attrs = {"approximate": kind}
        cases.append(Case(f"Gelu-{kind}", "Gelu", [3 * x], gelu, attrs))
        cases.append(Case(f"GeluGrad-{kind}", "GeluGrad", [dy, 3 * x], gradient_of(gelu), attrs))
    cases += [
        Case(
            "Dropout",
            "Dropout",
            [x, u],
            lambda a, b: torch.where(b >= np.float32(0.3).item(), a / 0.7, 0.0),
            {"ratio": 0.3},
        ),
        Case("Dropout-all", "Dropout", [x, u], lambda a, b: 0 * a, {"ratio": 1.0}),
        Case(
            "Normalize",
            "Normalize",
            [x, *moments(x, (0, 2, 3))],
            lambda a, m, v: (a - m) / torch.sqrt(v + 1e-3),
            {"axes": (0, 2, 3), "eps": 1e-3},
        ),
    ]
    return cases


def moments(x: Array, axes: tuple[int, ...]) -> list[Array]:
    """Mean and variance with axes kept."""
    return [x.mean(axes, keepdims=True), x.var(axes, keepdims=True)]


def structure() -> list[Case]:
    """Moving elements around."""
    x = noise(2, 3, 5, 4)
    flags = x > 0
    three = [x[:, :1], x[:, 1:], noise(2, 4, 5, 4, seed=4)]
    shifted = [[(0, 0), (0, 5), (0, 0), (0, 0)], None, [(0, 0), (1, 0), (0, 0), (0, 0)]]
    nothing = noise(2, 0, 5, 4)
    return [
        Case("Transpose", "Transpose", [x], lambda a: a.permute(3, 1, 0, 2), {"perm": (3, 1, 0, 2)}),
        Case("Reshape", "Reshape", [x], lambda a: a.reshape(6, 20), {"shape": (99, 99)}),
        Case("Expand", "Expand", [x[:, :1]], lambda a: a.expand(2, 6, 5, 4), {"shape": (9, 9, 9, 9)}),
        Case("Expand-rank", "Expand", [noise(4)], lambda a: a.expand(3, 4), {"shape": (3, 4)}),
        Case("Concat", "Concat", three, lambda *a: torch.cat(a, 1), {"axis": 1}),
        Case("Concat-bool", "Concat", [flags, ~flags], lambda *a: torch.cat(a, 2), {"axis": 2}),
        Case(
            "Concat-cut",
            "Concat",
            [three[0], nothing, three[2]],
            lambda a, b, c: torch.cat([a, c[:, :4]], 1),
            {"axis": 1},
            [[(0, 0), (0, 4), (0, 0), (0, 0)], [(0, 0), (1, 4), (0, 0), (0, 0)], shifted[2]],
        ),
        Case("Slice", "Slice", [x], lambda a: a[:, :, ::2], {"axis": 2, "start": 7, "stop": 99, "step": 2}),
        Case("Slice-1", "Slice", [x], lambda a: a.clone(), {"axis": 2, "start": 7, "stop": 9, "step": 1}),
        Case("Reverse", "Reverse", [x], lambda a: a.flip(2), {"axis": 2}),
        Case("Reverse-bool", "Reverse", [flags], lambda a: a.flip(3), {"axis": 3}),
        Case(
            "Pad",
            "Pad",
            [x],
            lambda a: F.pad(a, (0, 0, 1, 2)),
            {"axis": 2, "before": 1, "after": 2},
            [around([(1, 2), (0, 0)])],
        ),
        Case(
            "Pad-bool",
            "Pad",
            [flags],
            lambda a: F.pad(a, (2, 0)),
            {"axis": 3, "before": 2, "after": 0},
            [around([(0, 0), (2, 0)])],
        ),
        Case(
            "Pad-empty",
            "Pad",
            [nothing],
            lambda a: torch.zeros(2, 3, 5, 4, dtype=a.dtype),
            {"axis": 1, "before": 3, "after": 0},
            [[(0, 0), (3, 0), (0, 0), (0, 0)]],
        ),
        Case(
            "Pad-outside",
            "Pad",
            [nothing],
            lambda a: torch.zeros(2, 3, 5, 4, dtype=a.dtype),
            {"axis": 1, "before": 7, "after": 0},
            [[(0, 0), (5, -2), (0, 0), (0, 0)]],
        ),
    ]


def batched_lookups(ids: Array) -> list[Case]:
    """A table for each sample, with and without an axis of rows."""
    tables, rows = noise(2, 7, 4), noise(2, 3, 4)
    flat, few = noise(2, 7), noise(2, 3)

    def scatter(i: Tensor, g: Tensor) -> Tensor:
        zeros = torch.zeros(2, 7, *g.shape[2:], dtype=g.dtype)
        i = i.reshape(*i.shape, *(1,) * (g.dim() - 2)).expand(g.shape)
        return zeros.scatter_add(1, torch.where(i < 0, i + 7, i), g)

    def last(i: Tensor) -> Tensor:
        places = torch.arange(3).expand(2, 3)
        return torch.full((2, 7), -1).scatter_reduce(1, i, places, "amax")

    return [
        Case(
            "Gather-rows",
            "Gather",
            [tables, ids],
            lambda t, i: torch.stack([t[0][i[0]], t[1][i[1]]]),
            {"batch": 1},
        ),
        Case("Gather-elements", "Gather", [flat, -ids - 1], lambda t, i: t.gather(1, i + 7), {"batch": 1}),
        Case("GatherGrad-rows", "GatherGrad", [-ids - 1, rows], scatter, {"rows": 7, "batch": 1}),
        Case("GatherGrad-elements", "GatherGrad", [ids, few], scatter, {"rows": 7, "batch": 1}),
        Case("LastAt", "LastAt", [ids], last, {"rows": 7, "batch": 1}),
        Case("Gather-no-tables", "Gather", [flat[:0], ids[:0]], lambda t, i: t.gather(1, i), {"batch": 1}),
        Case(
            "GatherGrad-no-tables",
            "GatherGrad",
            [ids[:0], few[:0]],
            lambda i, g: torch.zeros(0, 7, dtype=g.dtype),
            {"rows": 7, "batch": 1},
        ),
        Case(
            "LastAt-no-tables",
            "LastAt",
            [ids[:0]],
            lambda i: torch.zeros(0, 7, dtype=i.dtype),
            {"rows": 7, "batch": 1},
        ),
    ]


def lookups() -> list[Case]:
    """Rows of a table, and their gradient."""
    ids = np.array([[0, 2, 2], [6, 0, 3]], dtype=np.int64)
    table, rows = noise(7, 4), noise(2, 3, 4)

    def scatter(i: Tensor, g: Tensor) -> Tensor:
        return torch.zeros(7, 4, dtype=g.dtype).index_add(0, i.reshape(-1), g.reshape(-1, 4))

    return [
        Case("Gather", "Gather", [table, ids], lambda t, i: t[i], {}),
        Case("Gather-bool", "Gather", [table > 0, ids], lambda t, i: t[i], {}),
        Case("Gather-whole-numbers", "Gather", [ids, ids % 2], lambda t, i: t[i], {}),
        Case("Gather-negative", "Gather", [table, -ids - 1], lambda t, i: t[i], {}),
        Case("GatherGrad", "GatherGrad", [ids, rows], scatter, {"rows": 7}),
        *batched_lookups(ids),
        Case(
            "Top",
            "Top",
            [rows],
            lambda a: a.sort(2, True).indices[..., :3],
            {"axis": 2, "k": 3, "largest": True},
        ),
        Case(
            "Top-ties",
            "Top",
            [ids],
            lambda a: a.sort(dim=1, stable=True).indices[:, :2],
            {"axis": 1, "k": 2, "largest": False},
        ),
        Case(
            "GatherGrad-1",
            "GatherGrad",
            [ids, rows[..., 0]],
            lambda i, g: torch.zeros(7, dtype=g.dtype).index_add(0, i.reshape(-1), g.reshape(-1)),
            {"rows": 7},
        ),
    ]
