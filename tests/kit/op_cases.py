"""Instances of every operator, shared by the tests of gradients and of axis rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.op_rule import Builder, Product, Rules
from oocdl.ops import RULES
from tests.kit import attention_cases, recurrent_cases
from tests.kit.interpret import ACTIVATION_GRADS, ACTIVATIONS

AS_CONVOLUTIONS: Rules = {
    op: rule if rule.product and rule.product.data else replace(rule, product=Product(data=(0,)))
    for op, rule in RULES.items()
}
"""With these rules ``channels_last`` orders what is around every operator, and not convolutions alone."""


@dataclass(frozen=True)
class Case:
    """One node: operator, attributes and operands.

    An operand is a shape (normal numbers), ``("pos"|"unit"|"bool", shape)``,
    ``("ids", shape, rows)``, or an array.
    """

    op: str
    operands: tuple[Any, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    """Operands that are constants of the graph."""
    read: tuple[int, ...] = ()
    """The results that have a gradient, where some are kept for that of the others; else all."""

    def arrays(self, seed: int = 0) -> list[Array]:
        """The operands' contents."""
        random = np.random.default_rng(seed)
        return [_array(operand, random) for operand in self.operands]

    def node(self, arrays: list[Array]) -> tuple[Builder, list[str], tuple[str, ...]]:
        """A graph of this one node: builder, inputs, outputs."""
        build = Builder(RULES)
        inputs = [
            build.constant(array)
            if place in self.constant
            else build.value(f"x{place}", array.shape, array.dtype.name, Role.INPUT)
            for place, array in enumerate(arrays)
        ]
        return build, inputs, build.node(self.op, inputs, self.attrs)

    def __str__(self) -> str:
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.op}({attrs})".replace(" ", "")


def _array(operand: Any, random: np.random.Generator) -> Array:
    if isinstance(operand, np.ndarray):
        return operand
    if not operand or isinstance(operand[0], int):
        return random.normal(size=operand)
    match operand:
        case ("pos", shape):
            return random.uniform(0.2, 2.0, size=shape)
        case ("unit", shape):
            return random.uniform(size=shape)
        case ("bool", shape):
            return random.uniform(size=shape) < 0.5
        case ("ids", shape, rows):
            return random.integers(rows, size=shape)
    raise AssertionError(operand)


def _slid(op: str, operands: Any, strides: Any, pads: Any, dilations: Any = None, **more: Any) -> Case:
    """An operator with a sliding window."""
    dilations = dilations or (1,) * len(strides)
    return Case(op, operands, {"strides": strides, "pads": pads, "dilations": dilations, **more})


_grouped = partial(_slid, grouped=True)


def _resample(axis: int, size: int, mode: str, coordinates: str, **more: Any) -> dict[str, Any]:
    attrs = {"axis": axis, "size": size, "mode": mode, "coordinates": coordinates, "scale": None}
    return {**attrs, "nearest_mode": "round_prefer_floor", "transposed": False, **more}


def _pooled(axis: int, size: int, window: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Averages of windows: kernel, stride, dilation, padding before and after."""
    attrs = {"axis": axis, "size": size, "window": window, "mode": "average", "count_include_pad": False}
    return {**attrs, "transposed": False, **more}


A, B, C = (2, 3, 4), (3, 1), (2, 1, 4)
S3 = (1, 3, 6, 5, 7)
POINT = [
    *(Case(op, (A, B)) for op in ("Add", "Sub", "Mul", "Max", "Min")),
    *(Case(op, (C, A)) for op in ("Add", "Mul", "Greater", "Less", "Equal")),
    Case("Add", (A, ())),
    Case("Mul", ((4,), A)),
    Case("Add", ((1, 1), (1, 1))),
    Case("Div", (A, ("pos", B))),
    Case("Div", (B, ("pos", A))),
    Case("Pow", (("pos", A), B)),
    Case("Pow", (("pos", B), A)),
    Case("Pow", (A, np.array(2.0)), constant=(1,)),
    Case("Pow", (A, np.array([0.0, 1, 2, 3])), constant=(1,)),
    Case("Pow", (("pos", A), np.array(-0.5)), constant=(1,)),
    Case("Max", (A, np.array(0.3)), constant=(1,)),
    Case("Min", (np.array(0.3), A), constant=(0,)),
    *(Case(op, (A,)) for op in ("Neg", "Exp", "Abs", "Erf", "Sigmoid", "Tanh", "Softplus", "Identity")),
    *(Case(op, (A,)) for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh")),
    *(Case(op, (("unit", A),)) for op in ("Asin", "Acos", "Atanh")),
    Case("Acosh", (np.linspace(1.1, 3, 24).reshape(A),)),
    *(Case(op, (np.linspace(-3, 3, 24).reshape(A),)) for op in ("Floor", "Round")),
    *(Case("Mod", (A, B), {"fmod": fmod}) for fmod in (0, 1)),
    *(Case(op, (("pos", A),)) for op in ("Sqrt", "Log", "Reciprocal")),
    Case("Cast", (A,), {"to": "float32"}),
    Case("Cast", (("ids", A, 5),), {"to": "float64"}),
    *(Case(op, (A,), attrs) for op, (instances, _) in ACTIVATIONS.items() for attrs in instances),
    Case("Not", (("bool", A),)),
    Case("And", (("bool", A), ("bool", B))),
    Case("Or", (("bool", A), ("bool", B))),
    Case("Where", (("bool", A), B, C)),
    Case("Where", (("bool", B), A, ())),
    Case("Dropout", (A, ("unit", A)), {"ratio": 0.4}),
    Case("Normalize", (A, (2, 1, 4), ("pos", (2, 1, 4))), {"axes": (1,), "eps": 1e-5}),
]
GRADS = [
    *(Case(op, (A, A), attrs) for op, (instances, _) in ACTIVATION_GRADS.items() for attrs in instances),
    _slid("ConvWeightGrad", ((2, 3, 9), (2, 4, 5)), (2,), (1, 1), kernel_shape=(3,)),
    _slid("ConvWeightGrad", (S3, (1, 2, 6, 5, 5)), (1, 1, 1), (1, 1, 0, 1, 1, 0), kernel_shape=(3, 3, 3)),
    _grouped("ConvWeightGrad", ((2, 3, 2, 9, 7), (2, 3, 4, 5, 7)), (2, 1), (1, 1, 1, 1), kernel_shape=(3, 3)),
    _grouped(
        "ConvWeightGrad",
        ((1, 8, 1, 6, 5, 7), (1, 8, 1, 6, 5, 5)),
        (1, 1, 1),
        (1, 1, 0, 1, 1, 0),
        kernel_shape=(3, 3, 3),
    ),
    _slid("MaxPoolGrad", ((2, 2, 9), (2, 2, 5)), (2,), (1, 1), kernel_shape=(3,)),
    _slid("MaxPoolGrad", ((1, 2, 9, 8), (1, 2, 4, 4)), (2, 2), (0, 0, 0, 0), kernel_shape=(2, 2)),
]
REDUCE = [
    *(
        Case(op, (A,), {"axes": axes})
        for op in ("ReduceSum", "ReduceMax", "LogSumExp")
        for axes in ((1,), (0, 2), (0, 1, 2))
    ),
    *(Case("Moments", (A,), {"axes": axes}) for axes in ((0,), (1, 2))),
    *(Case(op, (A,), {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (1, 2)),
    *(
        Case("Einsum", operands, {"equation": equation})
        for equation, operands in {
            "ab,bc->ac": ((3, 4), (4, 5)),
            "nqk,nkc->nqc": ((2, 3, 4), (2, 4, 5)),
            "ab,c->ac": ((3, 4), (5,)),
            "ab,b->a": ((3, 1), (1,)),
            "ab,ab->ba": ((3, 4), (3, 4)),
            "abz,bc->c": ((2, 3, 4), (3, 5)),
        }.items()
    ),
]
CONV = [
    _slid("Conv", ((2, 3, 9), (4, 3, 3)), (2,), (1, 1)),
    _slid("Conv", ((1, 1, 8), (2, 1, 1)), (1,), (0, 0)),
    _slid("Conv", ((1, 2, 9, 8), (3, 2, 3, 2)), (2, 3), (2, 0, 1, 1), (2, 1)),
    _slid("Conv", (S3, (2, 3, 3, 3, 3)), (1, 1, 1), (1,) * 6),
    _slid("Conv", (S3, (2, 3, 2, 2, 2)), (2, 2, 2), (0,) * 6),
    _slid("Conv", ((2, 2, 3), (2, 2, 3)), (3,), (0, 0)),
    _slid("ConvTranspose", ((2, 3, 5), (3, 4, 3)), (2,), (1, 1), spatial=(9,)),
    _slid("ConvTranspose", ((2, 3, 5), (3, 4, 3)), (2,), (1, 1), spatial=(10,)),
    _slid("ConvTranspose", ((1, 3, 5), (3, 2, 2)), (2,), (0, 0), (3,), spatial=(14,)),
    _slid("ConvTranspose", ((1, 3, 3, 2), (3, 4, 3, 2)), (2, 3), (0, 1, 1, 0), (1, 2), spatial=(6, 5)),
    _slid("ConvTranspose", ((1, 2, 3, 2, 3), (2, 3, 2, 2, 2)), (2, 2, 2), (0,) * 6, spatial=(6, 4, 6)),
    _slid("ConvTranspose", ((1, 2, 5), (2, 3, 1)), (2,), (0, 0), spatial=(10,)),
    _grouped("Conv", ((2, 3, 2, 9), (3, 4, 2, 3)), (2,), (1, 1)),
    _grouped("Conv", ((2, 8, 1, 9), (8, 2, 1, 3)), (1,), (1, 1)),
    _grouped("Conv", ((1, 8, 1, 9, 8), (8, 1, 1, 3, 2)), (2, 1), (2, 0, 1, 1), (2, 1)),
    _grouped("Conv", ((1, 4, 2, 6, 5, 7), (4, 2, 2, 3, 3, 3)), (1, 1, 1), (1,) * 6),
    _grouped("Conv", ((1, 8, 1, 6, 5, 7), (8, 1, 1, 3, 3, 3)), (1, 1, 1), (1,) * 6),
    _grouped("Conv", ((2, 2, 4, 5, 4), (2, 4, 4, 1, 1)), (1, 1), (0,) * 4),
    _grouped("ConvTranspose", ((1, 4, 2, 5, 4), (4, 2, 3, 3, 3)), (2, 1), (1, 1, 1, 1), spatial=(10, 4)),
    _grouped(
        "ConvTranspose",
        ((1, 8, 1, 3, 5, 4), (8, 1, 1, 2, 3, 3)),
        (1, 1, 1),
        (0, 1, 1, 0, 1, 1),
        spatial=(4, 5, 4),
    ),
    _slid("MaxPool", ((2, 2, 9),), (2,), (1, 1), kernel_shape=(3,)),
    _slid("MaxPool", ((1, 2, 9, 8),), (2, 1), (0, 1, 1, 1), (2, 1), kernel_shape=(3, 2)),
    _slid("MaxPool", (S3,), (2, 2, 2), (0,) * 6, kernel_shape=(2, 2, 2)),
]
RESAMPLE = [
    *(
        Case("Resample", ((2, extent, 3),), _resample(1, size, mode, coordinates))
        for extent, size in ((5, 10), (7, 4), (4, 6), (6, 6), (3, 1), (1, 4))
        for mode in ("nearest", "linear")
        for coordinates in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    ),
    *(
        Case("Resample", ((2, 5),), _resample(1, 8, "nearest", "asymmetric", nearest_mode=mode))
        for mode in ("round_prefer_ceil", "floor", "ceil")
    ),
    Case("Resample", ((2, 5),), _resample(1, 8, "linear", "half_pixel", scale=1.7)),
    Case("Resample", ((2, 5),), _resample(1, 8, "linear", "half_pixel_symmetric", scale=1.7)),
    Case("Resample", ((2, 5, 3),), _resample(1, 9, "cubic", "asymmetric", cubic_coeff_a=-0.5)),
    Case("Resample", ((2, 9),), _resample(1, 4, "cubic", "align_corners", exclude_outside=True)),
    *(
        Case("Resample", ((2, extent),), _resample(1, 4, mode, "half_pixel", antialias=True, **more))
        for extent, mode in ((11, "linear"), (9, "cubic"), (3, "cubic"))
        for more in ({}, {"exclude_outside": True, "cubic_coeff_a": -0.5})
    ),
    Case("Resample", ((2, 10),), _resample(1, 5, "linear", "half_pixel", transposed=True)),
    Case("Resample", ((2, 4),), _resample(1, 9, "nearest", "asymmetric", transposed=True)),
    Case("Resample", ((2, 6, 3),), _pooled(1, 3, (2, 2, 1, 0, 0))),
    *(
        Case("Resample", ((2, 8),), _pooled(1, size, window, count_include_pad=counts))
        for size, window in (
            (8, (3, 1, 1, 1, 1)),
            (5, (3, 2, 1, 1, 1)),
            (3, (2, 3, 3, 1, 0)),
            (2, (1, 5, 1, 0, 0)),
        )
        for counts in (False, True)
    ),
    Case("Resample", ((2, 8),), _pooled(1, 5, (3, 2, 1, 1, 1), mode="sum")),
    Case("Resample", ((2, 5),), _pooled(1, 8, (3, 2, 1, 1, 1), transposed=True)),
]
MOVE = [
    Case("Transpose", (A,), {"perm": (2, 0, 1)}),
    Case("Transpose", ((3, 1, 2),), {"perm": (1, 2, 0)}),
    Case("Reshape", (A,), {"shape": (2, 12)}),
    Case("Reshape", (A,), {"shape": (1, 6, 4, 1)}),
    Case("Reshape", ((2, 6, 5),), {"shape": (2, 3, 2, 5)}),
    Case("Reshape", ((1, 1),), {"shape": ()}),
    Case("Reshape", ((4, 6, 5),), {"shape": (6, 4, 5)}),
    Case("Expand", (B,), {"shape": A}),
    Case("Expand", ((),), {"shape": (2, 2)}),
    Case("Concat", (A, (2, 1, 4), (2, 5, 4)), {"axis": 1}),
    Case("Concat", (A,), {"axis": 0}),
    Case("Split", ((2, 9),), {"axis": 1, "sizes": (2, 3, 4)}),
    Case("Slice", ((2, 9),), {"axis": 1, "start": 2, "stop": 7, "step": 1}),
    Case("Slice", ((2, 9),), {"axis": 1, "start": 1, "stop": 9, "step": 3}),
    Case("Slice", ((9, 2),), {"axis": 0, "start": 0, "stop": 8, "step": 2}),
    Case("Slice", ((9, 2),), {"axis": 0, "start": 8, "stop": 9, "step": 1}),
    Case("Reverse", ((3, 7),), {"axis": 1}),
    Case("Reverse", ((4, 1, 3),), {"axis": 0}),
    Case("Reverse", ((4, 1, 3),), {"axis": 1}),
    Case("Pad", ((2, 5),), {"axis": 1, "before": 2, "after": 1}),
    Case("Pad", ((2, 1),), {"axis": 1, "before": 0, "after": 3}),
    Case("Pad", ((1, 1),), {"axis": 1, "before": 3, "after": 1}),  # of a number, which has no axis to crop
    Case("Gather", ((6, 3), ("ids", (2, 5), 6)), {}),
    Case("Gather", ((6, 3, 2), ("ids", (4,), 6)), {}),
    Case("Gather", ((2, 6, 3), ("ids", (2, 5), 6)), {"batch": 1}),
    Case("Gather", ((2, 3, 6), ("ids", (2, 3, 5), 6)), {"batch": 2}),
    Case("Gather", ((1, 6, 2), ("ids", (1, 4), 6)), {"batch": 1}),
    Case("GatherGrad", (("ids", (2, 5), 6), (2, 5, 3)), {"rows": 6}),
    Case("GatherGrad", (("ids", (2, 5), 6), (2, 5, 3)), {"rows": 6, "batch": 1}),
    Case("GatherGrad", (("ids", (2, 3, 5), 4), (2, 3, 5)), {"rows": 4, "batch": 2}),
    Case("LastAt", (("ids", (2, 5), 6),), {"rows": 6}),
    Case("Top", (A,), {"axis": 1, "k": 2, "largest": True}),
    Case("Top", (("ids", (3, 9), 4),), {"axis": 1, "k": 5, "largest": False}),
    Case("LastAt", (("ids", (2, 5), 6),), {"rows": 6, "batch": 1}),
]
CTC_OPERANDS = (
    (3, 6, 4),
    np.array([[1, 1, 2], [3, 2, -1], [0, 0, 0]]),
    np.array([3, 2, 0]),
    np.array([6, 4, 5]),
)
CTC = [
    Case("Ctc", CTC_OPERANDS, {"blank": 0, "zero_infinity": False}),
    Case(
        "Ctc",
        ((1, 2, 3), np.array([[2, 2]]), np.array([2]), np.array([2])),
        {"blank": 0, "zero_infinity": True},
    ),
]
CTC_GRADS = [
    Case("CtcGrad", (*CTC_OPERANDS, (3,)), {"blank": 0, "zero_infinity": False}),
    Case(
        "CtcGrad",
        ((2, 5, 3), np.array([[0, 1], [1, 1]]), np.array([2, 2]), np.array([5, 2]), (2,)),
        {"blank": 2, "zero_infinity": True},
    ),
]
SEQUENCES = [
    Case(op, tuple(arrays), attrs, read=read)
    for op, arrays, attrs, read in (*recurrent_cases.instances(), *attention_cases.instances())
]
DIFFERENTIABLE = [*POINT, *REDUCE, *CONV, *RESAMPLE, *MOVE, *CTC, *(case for case in SEQUENCES if case.read)]
CASES = [*DIFFERENTIABLE, *GRADS, *CTC_GRADS, *(case for case in SEQUENCES if not case.read)]


def params(cases: list[Case]) -> list[Any]:
    """As pytest parameters."""
    return [pytest.param(case, id=str(case)) for case in cases]
