"""How fast a machine is, and the seconds that a program takes on it.

Rates are those of one thread while every compute thread of the machine does the same:
that is how units run. They are measured once (``oocdl.calibrate``) and kept as plain data.

An instruction takes the time of its arithmetic or of its bytes, whichever is longer, and
a little overhead. Heavy operators have a table of rates by their kind and one size that
matters most; the rest is bound by memory, and has one rate of bytes an operator.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log, prod

from oocdl.graph.cost import array_bytes, itemsize
from oocdl.graph.ir import Shape
from oocdl.graph.program import Instruction, Program, padded_shape
from oocdl.graph.rule import Rules

Points = tuple[tuple[int, float], ...]
"""(size, operations a second), sizes ascending."""

CONVOLUTIONS = ("Conv", "ConvTranspose", "ConvWeightGrad")
THIN = 20480
"""Channels x depth x height of one sample up to which PyTorch computes a 3D convolution by im2col, unless
it is gone around: slabs of an engine's own kind, slower for the gradient of the weights."""
LOW = " in bfloat16"
"""Ends the kind of a product whose operands have 16 bits."""
FREE_BYTES_PER_SECOND = 1e12
"""The rate of an operator that moves nothing, such as a Reshape."""


@dataclass(frozen=True)
class Rates:
    """What one thread does in a second, all threads busy; and the disk, for all of them together.

    >>> rates = Rates.from_json(NOMINAL.to_json())
    >>> rates == NOMINAL, rates.flops_per_second("Conv 3d window", 16 * 27) > 1e9
    (True, True)
    """

    arithmetic: Mapping[str, Points]
    """Kind of heavy operator (``heavy_kind``) -> floating-point operations a second by size."""
    memory: Mapping[str, float]
    """Operator -> bytes of operands and results a second."""
    copy_bytes_per_second: float
    """Plain copies in memory, read and written bytes counted; and operators not in ``memory``."""
    instruction_seconds: float
    """Overhead of one instruction."""
    program_seconds: float
    """Overhead of one call of a program."""
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float

    def to_json(self) -> str:
        """All of it as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Rates:
        """What ``to_json`` wrote. ValueError if it is anything else."""
        try:
            body = json.loads(text)
            tables = {
                str(kind): tuple((int(size), float(rate)) for size, rate in points)
                for kind, points in body.pop("arithmetic").items()
            }
            memory = {str(op): float(rate) for op, rate in body.pop("memory").items()}
            rates = Rates(tables, memory, **{str(name): float(number) for name, number in body.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are no rates: {error}") from None
        rates._check()
        return rates

    def _check(self) -> None:
        """ValueError unless every rate is a positive number and every table ascends."""
        numbers = [self.copy_bytes_per_second, self.disk_read_bytes_per_second, *self.memory.values()]
        numbers.append(self.disk_write_bytes_per_second)
        for kind, points in self.arithmetic.items():
            sizes = [size for size, _ in points]
            if not sizes or sizes[0] < 1 or sizes != sorted(set(sizes)):
                raise ValueError(f"the table of '{kind}' is not one of rates by size")
            numbers.extend(rate for _, rate in points)
        overheads = (self.instruction_seconds, self.program_seconds)
        if not all(0 < number < float("inf") for number in numbers):
            raise ValueError("a rate is not positive")
        if not all(0 <= number < float("inf") for number in overheads):
            raise ValueError("an overhead is negative")

    def flops_per_second(self, kind: str, size: int) -> float:
        """The rate of a heavy operator of a kind and size, interpolated."""
        return interpolate(self.arithmetic[kind], size)

    def bytes_per_second(self, op: str) -> float:
        """The rate of an operator that is bound by memory."""
        return self.memory.get(op, self.copy_bytes_per_second)


def interpolate(points: Points, size: int) -> float:
    """The rate at ``size``, on a line between the logarithms of its neighbours; flat beyond the ends.

    >>> interpolate(((1, 10.0), (4, 40.0)), 2), interpolate(((1, 10.0), (4, 40.0)), 99)
    (20.0, 40.0)
    """
    after = bisect_right([known for known, _ in points], size)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (low, slow), (high, fast) = points[after - 1], points[after]
    share = log(size / low) / log(high / low)
    return round(exp((1 - share) * log(slow) + share * log(fast)), 3)


def heavy_kind(step: Instruction, shapes: Sequence[Shape], dtype: str = "float32") -> tuple[str, int] | None:
    """The kind of a heavy operator and its size; None for an operator that is bound by memory.

    ``shapes``: of the operands, padding included; products of 16 bits (``dtype``) are kinds of their
    own. Convolutions: one of two or three spatial axes;
    "point" (kernel 1) or "window", and whether strided; elements of the window times the smaller
    count of channels; of thin slabs, gradients of a window's weights are a kind of their own. Einsum:
    as the matrix product it is, the smallest of its extents. Pooling: elements of the window.
    """
    if step.op in CONVOLUTIONS:
        weight = step.kernel_shapes[0] if step.op == "ConvWeightGrad" else shapes[1]
        taps = prod(weight[2:])
        what = "window" if taps > 1 else "point"
        strided = any(stride != 1 for stride in step.attrs.get("strides") or ())
        axes = 3 if len(weight) > 4 else 2
        seen = step.operands[0].shape
        if taps > 1 and not strided and step.op == "ConvWeightGrad" and is_thin(seen):
            what = "thin window"
        kind, size = f"{step.op} {axes}d {'strided ' * strided}{what}", max(taps * min(weight[:2]), 1)
        return kind + LOW * (dtype == "bfloat16"), size
    if step.op == "Einsum":
        kind, size = _product_kind(step, shapes)
        return kind + LOW * (dtype == "bfloat16"), size
    if step.op in ("MaxPool", "MaxPoolGrad"):
        return step.op, max(prod(step.attrs["kernel_shape"]), 1)
    return None


def is_thin(shape: Shape) -> bool:
    """Whether ``shape`` is one thin slab of a volume."""
    return len(shape) == 5 and shape[0] == 1 and prod(shape[:4]) <= THIN < prod(shape)


def product_terms(step: Instruction) -> tuple[str, str, str]:
    """The letters of an Einsum's operands and of its result."""
    terms, out = str(step.attrs["equation"]).replace(" ", "").split("->")
    left, right = terms.split(",")
    return left, right, out


def _product_kind(step: Instruction, shapes: Sequence[Shape]) -> tuple[str, int]:
    left, right, out = product_terms(step)
    extents = dict(zip(left + right, (*shapes[0], *shapes[1]), strict=True))
    inner = prod(extents[x] for x in set(left) & set(right) - set(out))
    rows = prod(extents[x] for x in set(left) - set(right) if x in out)
    columns = prod(extents[x] for x in set(right) - set(left) if x in out)
    smallest = max(min(inner, rows, columns), 1)
    if any(extents[x] > 1 for x in set(left) & set(right) & set(out)):
        return "Einsum batched", smallest
    return f"Einsum {'inner' if inner == smallest else 'outer'}", smallest


def _result_bytes(step: Instruction) -> int:
    return sum(map(array_bytes, step.kernel_shapes, step.dtypes))


def moved_bytes(step: Instruction, dtypes: Mapping[int, str]) -> int:
    """Bytes of the operands, padding included, and of the results; ``dtypes`` are those of the slots."""
    operands = sum(array_bytes(padded_shape(op), dtypes[op.slot]) for op in step.operands)
    return operands + _result_bytes(step)


def instruction_seconds(step: Instruction, dtypes: Mapping[int, str], rules: Rules, rates: Rates) -> float:
    """Seconds of one instruction; ``dtypes`` are those of its operands' slots."""
    shapes = [padded_shape(operand) for operand in step.operands]
    moved = moved_bytes(step, dtypes)
    heavy = heavy_kind(step, shapes, dtypes[step.operands[0].slot])
    if heavy is None:
        seconds = moved / rates.bytes_per_second(step.op)
    else:
        flops = rules[step.op].flops(step.node, shapes, list(step.kernel_shapes))
        # No product is faster than reading its operands; ReduceSum does little else.
        seconds = max(flops / rates.flops_per_second(*heavy), moved / rates.bytes_per_second("ReduceSum"))
    if step.op == "Einsum" and _turned(step):
        seconds += 2 * _result_bytes(step) / rates.bytes_per_second("Transpose")
    for operand, shape in zip(step.operands, shapes, strict=True):
        if shape != operand.shape:
            copied = (prod(shape) + prod(operand.shape)) * itemsize(dtypes[operand.slot])
            seconds += copied / rates.copy_bytes_per_second
    return seconds + rates.instruction_seconds


def _turned(step: Instruction) -> bool:
    """Whether the result of a product has to be transposed: it has rows of the left operand first."""
    left, right, out = product_terms(step)
    both = [x for x in left if x in right and x in out]
    rows = [x for x in left if x in out and x not in both]
    columns = [x for x in right if x in out and x not in both]
    return "".join((*both, *rows, *columns)) != out


def program_seconds(program: Program, rules: Rules, rates: Rates) -> float:
    """Predicted seconds of one run of a program on one thread, all other threads as busy."""
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    seconds = rates.program_seconds
    for step in program.instructions:
        dtypes.update(zip(step.outputs, step.dtypes, strict=True))
        seconds += instruction_seconds(step, dtypes, rules, rates)
    parts = [out for out in program.outputs if out.crop is not None]
    copied = 2 * sum(array_bytes(out.shape, dtypes[out.slot]) for out in parts)
    return seconds + copied / rates.copy_bytes_per_second


_CHANNELS, _EXTENTS = (1, 4, 16, 64, 256), (1, 4, 16, 64, 256, 1024)
_TAPS_2D, _TAPS_3D = (9, 36, 144, 576, 2304), (27, 108, 432, 1728, 6912)


def _giga(sizes: Sequence[int], *rates: float) -> Points:
    """A table from rates in GFLOP/s."""
    return tuple((size, 1e9 * rate) for size, rate in zip(sizes, rates, strict=True))


_LOW_CHANNELS, _LOW_EXTENTS = (1, 16, 64, 256), (16, 256, 1024)
_LOW_TAPS_2D, _LOW_TAPS_3D = (9, 144, 576, 2304), (27, 432, 1728, 6912)
_PRODUCTS_OF_16_BITS = {
    "Conv 2d point": _giga(_LOW_CHANNELS, 4, 50, 140, 310),
    "Conv 2d strided point": _giga(_LOW_CHANNELS, 3.9, 20, 80, 170),
    "Conv 2d strided window": _giga(_LOW_TAPS_2D, 25, 130, 310, 350),
    "Conv 2d window": _giga(_LOW_TAPS_2D, 47, 240, 430, 490),
    "Conv 3d point": _giga(_LOW_CHANNELS, 16, 220, 360, 500),
    "Conv 3d strided point": _giga(_LOW_CHANNELS, 5.7, 100, 220, 200),
    "Conv 3d strided window": _giga(_LOW_TAPS_3D, 58, 300, 460, 280),
    "Conv 3d window": _giga(_LOW_TAPS_3D, 120, 460, 560, 560),
    "ConvTranspose 2d point": _giga(_LOW_CHANNELS, 4.2, 49, 130, 240),
    "ConvTranspose 2d strided point": _giga(_LOW_CHANNELS, 2.7, 14, 33, 87),
    "ConvTranspose 2d strided window": _giga(_LOW_TAPS_2D, 13, 89, 210, 340),
    "ConvTranspose 2d window": _giga(_LOW_TAPS_2D, 18, 250, 430, 490),
    "ConvTranspose 3d point": _giga(_LOW_CHANNELS, 4.1, 210, 370, 500),
    "ConvTranspose 3d strided point": _giga(_LOW_CHANNELS, 1.2, 16, 79, 120),
    "ConvTranspose 3d strided window": _giga(_LOW_TAPS_3D, 11, 170, 500, 470),
    "ConvTranspose 3d window": _giga(_LOW_TAPS_3D, 33, 510, 670, 770),
    "ConvWeightGrad 2d point": _giga(_LOW_CHANNELS, 3.9, 49, 150, 260),
    "ConvWeightGrad 2d strided point": _giga(_LOW_CHANNELS, 2.7, 18, 65, 120),
    "ConvWeightGrad 2d strided window": _giga(_LOW_TAPS_2D, 19, 99, 240, 250),
    "ConvWeightGrad 2d window": _giga(_LOW_TAPS_2D, 22, 200, 350, 430),
    "ConvWeightGrad 3d point": _giga(_LOW_CHANNELS, 12, 120, 350, 490),
    "ConvWeightGrad 3d strided point": _giga(_LOW_CHANNELS, 3.7, 32, 73, 95),
    "ConvWeightGrad 3d strided window": _giga(_LOW_TAPS_3D, 49, 180, 270, 130),
    "ConvWeightGrad 3d thin window": _giga(_LOW_TAPS_3D, 230, 450, 520, 440),
    "ConvWeightGrad 3d window": _giga(_LOW_TAPS_3D, 180, 390, 450, 400),
    "Einsum batched": _giga(_LOW_EXTENTS, 150, 320, 420),
    "Einsum inner": _giga(_LOW_EXTENTS, 45, 330, 420),
    "Einsum outer": _giga(_LOW_EXTENTS, 190, 470, 460),
}
# fmt: off
_GIGABYTES = {
    "Abs": 29, "Add": 28, "And": 27, "Cast": 42, "Concat": 22, "Div": 28, "Dropout": 23, "Equal": 25,
    "Erf": 6.9, "Exp": 10, "Expand": 1000, "Gather": 290, "GatherGrad": 19, "Gelu": 13, "GeluGrad": 16,
    "Greater": 18, "Identity": 650, "LeakyRelu": 25, "LeakyReluGrad": 28, "Less": 18, "Log": 8.5,
    "LogSumExp": 3.3, "Max": 29, "Min": 36, "Moments": 8.1, "Mul": 28, "Neg": 29, "Normalize": 23,
    "Not": 22, "Or": 28, "Pad": 18, "Pow": 4.6, "Reciprocal": 28, "ReduceMax": 73, "ReduceSum": 70,
    "Relu": 26, "ReluGrad": 27, "Resample": 8.3, "Reshape": 140, "Sigmoid": 19, "SigmoidGrad": 26,
    "Slice": 180, "Softplus": 6.3, "Sqrt": 14, "Sub": 28, "Tanh": 3.7, "TanhGrad": 27, "Transpose": 13,
    "Where": 3.1,
}
# fmt: on
NOMINAL = Rates(
    arithmetic={
        "Conv 2d point": _giga(_CHANNELS, 8.6, 24, 64, 96, 110),
        "Conv 2d strided point": _giga(_CHANNELS, 6.6, 11, 49, 83, 110),
        "Conv 2d strided window": _giga(_TAPS_2D, 42, 78, 170, 250, 210),
        "Conv 2d window": _giga(_TAPS_2D, 73, 130, 210, 260, 260),
        "Conv 3d point": _giga(_CHANNELS, 5.6, 14, 41, 67, 99),
        "Conv 3d strided point": _giga(_CHANNELS, 2.8, 2.1, 41, 120, 140),
        "Conv 3d strided window": _giga(_TAPS_3D, 37, 55, 71, 160, 140),
        "Conv 3d window": _giga(_TAPS_3D, 34, 120, 200, 270, 270),
        "ConvTranspose 2d point": _giga(_CHANNELS, 16, 43, 60, 93, 110),
        "ConvTranspose 2d strided point": _giga(_CHANNELS, 7.9, 18, 24, 74, 82),
        "ConvTranspose 2d strided window": _giga(_TAPS_2D, 12, 39, 140, 240, 230),
        "ConvTranspose 2d window": _giga(_TAPS_2D, 15, 56, 210, 270, 270),
        "ConvTranspose 3d point": _giga(_CHANNELS, 13, 24, 46, 78, 100),
        "ConvTranspose 3d strided point": _giga(_CHANNELS, 2.8, 3.4, 3.7, 14, 30),
        "ConvTranspose 3d strided window": _giga(_TAPS_3D, 7.6, 20, 37, 130, 210),
        "ConvTranspose 3d window": _giga(_TAPS_3D, 16, 58, 230, 320, 400),
        "ConvWeightGrad 2d point": _giga(_CHANNELS, 55, 8.9, 81, 99, 110),
        "ConvWeightGrad 2d strided point": _giga(_CHANNELS, 19, 7, 56, 92, 100),
        "ConvWeightGrad 2d strided window": _giga(_TAPS_2D, 29, 86, 170, 170, 130),
        "ConvWeightGrad 2d window": _giga(_TAPS_2D, 60, 160, 240, 260, 230),
        "ConvWeightGrad 3d point": _giga(_CHANNELS, 19, 7.1, 55, 87, 100),
        "ConvWeightGrad 3d strided point": _giga(_CHANNELS, 2.7, 2.5, 39, 61, 110),
        "ConvWeightGrad 3d strided window": _giga(_TAPS_3D, 30, 16, 130, 160, 93),
        "ConvWeightGrad 3d thin window": _giga(_TAPS_3D, 37, 28, 140, 220, 240),
        "ConvWeightGrad 3d window": _giga(_TAPS_3D, 23, 170, 240, 250, 260),
        "Einsum batched": _giga(_EXTENTS, 3, 11, 66, 92, 100, 110),
        "Einsum inner": _giga(_EXTENTS, 4.4, 18, 67, 150, 200, 210),
        "Einsum outer": _giga(_EXTENTS, 14, 34, 89, 200, 230, 220),
        "MaxPool": _giga((8, 27), 3.4, 3.5),
        "MaxPoolGrad": _giga((8, 27), 0.84, 0.49),
        **{kind + LOW: points for kind, points in _PRODUCTS_OF_16_BITS.items()},
    },
    memory={op: 1e9 * rate for op, rate in _GIGABYTES.items()},
    copy_bytes_per_second=2.4e10,
    instruction_seconds=2.7e-6,
    program_seconds=2.3e-5,
    disk_read_bytes_per_second=1.9e9,
    disk_write_bytes_per_second=3.6e9,
)
"""Where nothing was measured: what ``oocdl.calibrate`` measured with the torch engine on two cores of an AMD
EPYC (Zen 5), a quiet virtual machine and its virtual disk, rounded to two digits."""
