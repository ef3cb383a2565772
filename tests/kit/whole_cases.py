"""Nodes of whole numbers, truth values and casts, of every element type, for comparison with ONNX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from oocdl.graph.ir.graph import Array
from tests.kit import lowered

WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
KINDS = (*WHOLE, "bool", "float32")
SHAPE = (2, 3, 4)


@dataclass(frozen=True, eq=False)
class WholeCase:
    """A node, its operands (constants where they are ``known``) and attributes."""

    name: str
    op: str
    operands: tuple[Array, ...]
    known: tuple[int, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)


def numbers(kind: str, seed: int = 0) -> Array:
    """Numbers of a type, among them its ends and what lies around 0 and 2^53."""
    random = np.random.default_rng([seed, len(kind)])
    if kind == "bool":
        return random.random(SHAPE) < 0.5
    if kind.startswith("float"):
        return np.round(random.normal(size=SHAPE) * 60, 2).astype(kind)
    info = np.iinfo(kind)
    edges = [info.min, info.max, 0, 1, info.max - 1, info.max // 3, 7, 2]
    edges += [-1, -7, info.min + 1] if info.min else []
    edges += [2**53 + 1, 2**53 + 3] if info.max > 2**60 else []
    drawn = random.integers(max(info.min, -9), 10, size=24, dtype=kind)
    drawn[: len(edges)] = edges
    return np.asarray(random.permutation(drawn).reshape(SHAPE))


def _divisors(kind: str) -> Array:
    found = numbers(kind, 2)
    return np.where(found == 0, np.asarray(3, kind), found)


def _arithmetic(kind: str, a: Array, b: Array) -> Iterator[WholeCase]:
    ordered = "Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual"
    for op in ("Add", "Sub", "Mul", "Max", "Min", *ordered):
        yield WholeCase(op, op, (a, b))
        yield WholeCase(f"{op}-known", op, (a, b[0, 0]), (1,))
    for op in ("Div", "Mod"):
        yield WholeCase(op, op, (a, _divisors(kind)))
        yield WholeCase(f"{op}-known", op, (a, _divisors(kind)), (1,))
    yield WholeCase("Mod-fmod", "Mod", (a, _divisors(kind)), attrs={"fmod": 1})
    powers = np.arange(24).reshape(SHAPE) % 9
    yield WholeCase("Pow", "Pow", (a, powers.astype(kind)), (1,))
    small = np.asarray(a % 2, kind)
    yield WholeCase("Pow-float32", "Pow", (small, powers.astype("float32")), (1,))
    yield WholeCase("Pow-free", "Pow", (a, powers.astype(kind)))
    for op in ("Abs", "Sign", *(("Neg",) if np.iinfo(kind).min else ())):
        yield WholeCase(op, op, (a,))
    yield WholeCase("Clip", "Clip", (a, np.asarray(1, kind), np.asarray(100, kind)), (1, 2))


def _along_axes(kind: str, a: Array, b: Array) -> Iterator[WholeCase]:
    for op in ("Sum", "Prod", "Max", "Min", "L1", "SumSquare", "Mean"):
        x = np.asarray(a % 50, kind) if op == "Mean" else a  # ONNX's reference takes it in floats
        yield WholeCase(f"Reduce{op}", f"Reduce{op}", (x, np.array([1])), (1,))
    for way in ({}, {"exclusive": 1, "reverse": 1}) if np.iinfo(kind).bits > 16 else ():
        yield WholeCase(f"CumSum{len(way)}", "CumSum", (a, np.array(1)), (1,), way)
    yield WholeCase("MatMul", "MatMul", (a, np.ascontiguousarray(b.swapaxes(1, 2))))
    yield WholeCase("Einsum", "Einsum", (a, b), attrs={"equation": "abc,adc->abd"})
    places, some = np.array([[[0, -1, 0, 1]], [[-1, 2, 0, 0]]]), np.ascontiguousarray(b[:, :1])
    for reduction in ("none", "add", "mul", "max", "min"):
        attrs: dict[str, Any] = {"axis": 1, "reduction": reduction}
        yield WholeCase(f"Scatter-{reduction}", "ScatterElements", (a, places, some), (1,), attrs)


def _moved(kind: str, a: Array, b: Array) -> Iterator[WholeCase]:
    flags = numbers("bool", 5)
    yield WholeCase("Where", "Where", (flags, a, b))
    yield WholeCase("Gather", "Gather", (a, np.array([[0, -1], [-3, 2]])), attrs={"axis": 1})
    yield WholeCase("OneHot", "OneHot", (np.array([0, -1, 4, 3, -5]), np.array(4), a[0, 0, :2]), (1, 2))
    yield WholeCase("Concat", "Concat", (a, b), attrs={"axis": 1})
    yield WholeCase("Split", "Split", (a,), attrs={"axis": 1, "num_outputs": 1})
    yield WholeCase("Expand", "Expand", (a[:, :1].copy(), np.array([2, 3, 4])), (1,))
    pads = np.array([0, 1, 0, 0, 0, 2])
    yield WholeCase("Pad", "Pad", (a, pads, np.asarray(1, kind)), (1, 2))
    for kind_to in KINDS:
        attrs = {"to": helper.np_dtype_to_tensor_dtype(np.dtype(kind_to))}
        yield WholeCase(f"Cast-{kind_to}", "Cast", (a,), attrs=attrs)
        yield WholeCase(f"CastLike-{kind_to}", "CastLike", (a, np.ones(1, kind_to)), (1,))


def _ordered(kind: str, a: Array, b: Array) -> Iterator[WholeCase]:
    for op in ("ArgMax", "ArgMin"):
        yield WholeCase(op, op, (a,), attrs={"axis": 1})
    for largest in (0, 1):
        distinct = np.unique(a)[:6][[3, 0, 5, 1, 4, 2]]
        yield WholeCase(f"TopK-{largest}", "TopK", (distinct, np.array([4])), (1,), {"largest": largest})


def cases(kind: str) -> list[WholeCase]:
    """All cases whose first operand is of a type."""
    a, b = numbers(kind, 0), numbers(kind, 1)
    found = [*_moved(kind, a, b)]
    if kind == "bool":
        found += [WholeCase(op, op, (a, b)) for op in ("And", "Or", "Xor", "Equal")]
        found += [WholeCase(op, op, (a, np.array([1])), (1,)) for op in ("ReduceMax", "ReduceMin")]
        found += [WholeCase("Not", "Not", (a,))]
    elif kind in WHOLE:
        found += [*_arithmetic(kind, a, b), *_along_axes(kind, a, b), *_ordered(kind, a, b)]
    else:
        found += _of_floats(a, b)
    return found


def _of_floats(a: Array, b: Array) -> Iterator[WholeCase]:
    a, b = a.copy(), b.copy()
    a.flat[:6] = np.nan, np.inf, -np.inf, -0.0, 0.0, 2.5
    b.flat[4:8] = np.nan, np.inf, -np.inf, 0.0
    for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Greater", "Equal", "LessOrEqual", "Pow"):
        yield WholeCase(op, op, (a, b))
    yield WholeCase("Mod", "Mod", (a, b), attrs={"fmod": 1})
    rounded = "Floor", "Ceil", "Round"
    for op in ("Abs", "Neg", "Sign", *rounded, "IsNaN", "IsInf", "Sqrt", "Reciprocal", "Relu"):
        yield WholeCase(op, op, (a,))
    yield WholeCase("Clip", "Clip", (a, np.array(-1, "f4"), np.array(2, "f4")), (1, 2))
    for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean", "CumSum"):
        yield WholeCase(op, op, (a, np.array([1] if op != "CumSum" else 1)), (1,))
    yield WholeCase("Bool", "Cast", (a,), attrs={"to": TensorProto.BOOL})
    for op in ("ArgMax", "ArgMin"):
        yield WholeCase(op, op, (a,), attrs={"axis": 1})


def model_of(some: Sequence[WholeCase]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """One model of all cases, and what its inputs are given."""
    nodes, free, known = [], dict[str, Array](), dict[str, Array]()
    for case in some:
        names = [f"{case.name}/{place}" for place in range(len(case.operands))]
        for place, (name, array) in enumerate(zip(names, case.operands, strict=True)):
            (known if place in case.known else free)[name] = array
        made = [f"{case.name}/y", *[f"{case.name}/places"] * (case.op == "TopK")]
        nodes.append(helper.make_node(case.op, names, made, name=case.name, **case.attrs))
    return lowered.model_of(nodes, free, [node.output[0] for node in nodes], known), free
