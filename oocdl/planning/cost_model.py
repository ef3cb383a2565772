"""The cost model: how fast a machine is, and the seconds that a program or a call takes on it.

Rates are those of one thread while every compute thread of the machine does the same:
that is how units run. They are measured once (``planning/calibrate``) and stored as plain data.

An instruction takes the time of its arithmetic or of its bytes, whichever is longer, and
a little overhead. Heavy operators have a table of rates by their kind and one size that
matters most; the rest is bound by memory, and has one rate of bytes an operator. The rule of
an operator says which it is (``graph/ir/speed``); no operator has a name here.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from math import exp, log, log2, prod
from pathlib import Path
from typing import TypeVar

from oocdl.graph.ir.array_layout import array_bytes, itemsize
from oocdl.graph.ir.op_rule import OpRule, Rules
from oocdl.graph.ir.program import Instruction, Program, padded_shape
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.ir.speed import Computing, RateTable, Streaming
from oocdl.ops.registry import RULES
from oocdl.planning.calls import Call, CombineCall, UnitCall, made_of

BFLOAT16_SUFFIX = " in bfloat16"
"""Suffix of the kind of a product of bfloat16 operands."""
TASK_SECONDS = 3e-4
"""Seconds that Python and Dask take for each task."""
HEAVY_SECONDS, ARRANGED_ELEMENTS_PER_SECOND = 1.5e-4, 5.5e8
"""Time of a heavy operator's call before it computes, and rate of putting elements into another order, in
a step, with empty caches. Measured in steps of a U-Net and of ResNets, cut in space and in batch: 0.1 to
0.5 ms, and 0.47 to 0.74 s for 1e9 bytes. Its rate, of a probe of many places, has nearly nothing of it."""
SLOWDOWN_FACTOR = 1.2
"""Programs take so much longer in a run than alone, where nobody else copies and moves bytes: measured
for networks that fit (1.08 to 1.26) and for such that do not (1.2 to 1.4). It stands for all that is charged
by itself where cores are shared, and does not count there."""
GATHER_SECONDS, PART_SECONDS = 1.3e-4, 2.9e-5
"""Time of Python to put together what a unit reads: once, and for each part that is copied. Measured."""
STRIDED_FACTOR = 1.3
"""Parts that lie apart take so much longer to copy than as many bytes side by side."""
UNIT_SECONDS, COMBINE_SECONDS = 6e-4, 1.5e-4
"""Core time of a unit or a combination beside program and reading, where cores are shared: to reserve and
measure memory (0.25 to 0.55 ms), and to put results away. Measured in steps of five networks."""
SCHEDULING_SECONDS, BEGIN_SECONDS = 2.2e-5, 1.4e-5
"""Time of a shared core for each task: while a pass runs, and before the first one starts. Measured too."""
TOGETHER_SHARE = 0.9
"""Share of their speed that two threads have which run a program together; of four it is the square."""
FREE_BYTES_PER_SECOND = 1e12
"""The rate of an operator that moves nothing, such as a Reshape."""

T = TypeVar("T")


def by_key(function: Callable[[Program], T]) -> Callable[[Program], T]:
    """Return a function that remembers its results by the keys of programs; programs are not kept alive."""
    known: dict[str, T] = {}

    def remembered(program: Program) -> T:
        if program.key not in known:
            known[program.key] = function(program)
        return known[program.key]

    return remembered


@dataclass(frozen=True)
class Rates:
    """Rates of one thread while all are busy, and of the disk for all threads together.

    >>> rates = Rates({"Conv": ((1, 1e9), (4, 4e9))}, {"Exp": 1e10}, 2e10, 0.0, 0.0, 1e9, 1e9, 0)
    >>> Rates.from_json(rates.to_json()) == rates
    True
    """

    arithmetic: Mapping[str, RateTable]
    """Kind of heavy operator (``heavy_kind``) -> floating-point operations a second by size."""
    memory: Mapping[str, float]
    """Operator that is bound by memory -> bytes of operands and results a second."""
    copy_bytes_per_second: float
    """Rate of plain copies in memory, read and written bytes counted."""
    instruction_seconds: float
    """Overhead of one instruction."""
    program_seconds: float
    """Overhead of one call of a program."""
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float
    thin_slab_elements: int
    """The engine's ``Engine.thin_slab_elements`` when it was measured: channels x depth x height of the
    thickest slab with rates of its own; 0: there are none."""
    scratch_ratios: Mapping[str, RateTable] = field(default_factory=dict)
    """Kind of heavy operator -> by size, how many times the scratch that the engine tells of it was taken on
    this machine; 1 or more, and only kinds that took more than is told."""

    def to_json(self) -> str:
        """All rates as JSON text."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Rates:
        """Read what ``to_json`` wrote."""
        body = json.loads(text)
        for tables in (body["arithmetic"], body["scratch_ratios"]):
            for kind, points in tables.items():
                tables[kind] = tuple(map(tuple, points))
        return Rates(**body)

    def bytes_per_second(self, op: str, rules: Rules) -> float:
        """The rate at which an operator's bytes are read and written.

        For one that was not measured, the rate of the operator that it is like counts, else that of copies.
        """
        speed = rules[op].speed
        like = self.memory.get(speed.like if speed else op, self.copy_bytes_per_second)
        return self.memory.get(op, like)


def interpolate(points: RateTable, size: int) -> float:
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


def heavy_kind(
    instruction: Instruction, rule: OpRule, speed: Computing, dtype: str, thin_slab_elements: int
) -> tuple[str, int]:
    """The kind of an instruction of a heavy operator, and its size.

    Products of bfloat16 (``dtype`` is that of the first operand) are kinds of their own.
    """
    shapes = [padded_shape(operand) for operand in instruction.operands]
    kind, size = speed.kind(instruction, shapes, thin_slab_elements)
    return kind + BFLOAT16_SUFFIX * (dtype == "bfloat16" and rule.product is not None), size


def _result_bytes(instruction: Instruction) -> int:
    return sum(map(array_bytes, instruction.kernel_shapes, instruction.dtypes))


def moved_bytes(instruction: Instruction, dtypes: Mapping[int, str]) -> int:
    """Bytes of the operands, padding included, and of the results; ``dtypes`` maps slots to dtypes."""
    operands = sum(array_bytes(padded_shape(op), dtypes[op.slot]) for op in instruction.operands)
    return operands + _result_bytes(instruction)


def instruction_seconds(
    instruction: Instruction, dtypes: Mapping[int, str], rules: Rules, rates: Rates
) -> float:
    """Predicted seconds of one instruction; ``dtypes`` maps its operands' slots to dtypes."""
    shapes = [padded_shape(operand) for operand in instruction.operands]
    rule, moved = rules[instruction.op], moved_bytes(instruction, dtypes)
    seconds = moved / rates.bytes_per_second(instruction.op, rules)
    if isinstance(rule.speed, Computing):
        dtype = dtypes[instruction.operands[0].slot]
        kind, size = heavy_kind(instruction, rule, rule.speed, dtype, rates.thin_slab_elements)
        flops = rule.flops(instruction.node, shapes, list(instruction.kernel_shapes))
        table = rates.arithmetic.get(kind) or NOMINAL.arithmetic[kind]
        seconds = max(flops / interpolate(table, size), seconds)
        for op in rule.speed.then(instruction):
            seconds += 2 * _result_bytes(instruction) / rates.bytes_per_second(op, rules)
    for operand, shape in zip(instruction.operands, shapes, strict=True):
        if shape != operand.shape:
            copied = (prod(shape) + prod(operand.shape)) * itemsize(dtypes[operand.slot])
            seconds += copied / rates.copy_bytes_per_second
    return seconds + rates.instruction_seconds


def program_seconds(program: Program, rules: Rules, rates: Rates) -> float:
    """Predicted seconds of one run of a program on its threads, all other threads as busy."""
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    seconds = rates.program_seconds
    for instruction in program.instructions:
        dtypes.update(zip(instruction.outputs, instruction.dtypes, strict=True))
        seconds += instruction_seconds(instruction, dtypes, rules, rates)
    parts = [out for out in program.outputs if out.crop is not None]
    copied = 2 * sum(array_bytes(out.shape, dtypes[out.slot]) for out in parts)
    seconds += copied / rates.copy_bytes_per_second
    return seconds / (together_share(program.threads) * program.threads)


def together_share(threads: int) -> float:
    """Return the share of their speed that threads have which run a program together.

    >>> together_share(1), round(together_share(4), 2)
    (1.0, 0.81)
    """
    return float(TOGETHER_SHARE ** log2(threads))


def cold_seconds(program: Program, rules: Rules) -> float:
    """Return the seconds of a program's heavy operators in a step beyond ``program_seconds``."""
    seconds = 0.0
    for instruction in program.instructions:
        speed = rules[instruction.op].speed
        if isinstance(speed, Computing):
            shapes = [padded_shape(operand) for operand in instruction.operands]
            arranged = speed.arranged_elements(instruction, shapes)
            seconds += HEAVY_SECONDS + arranged / ARRANGED_ELEMENTS_PER_SECOND
            seconds += speed.small_tiles(instruction, shapes) * speed.tile_seconds
    return seconds


def scratch_ratio(program: Program, rules: Rules, rates: Rates) -> float:
    """Return the factor by which a program may exceed the scratch told of it on this machine; at least 1."""
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    most = 1.0
    for instruction in program.instructions if rates.scratch_ratios else ():
        dtypes.update(zip(instruction.outputs, instruction.dtypes, strict=True))
        rule = rules[instruction.op]
        if isinstance(rule.speed, Computing):
            dtype = dtypes[instruction.operands[0].slot]
            kind, size = heavy_kind(instruction, rule, rule.speed, dtype, rates.thin_slab_elements)
            most = max(most, interpolate(rates.scratch_ratios.get(kind, ((1, 1.0),)), size))
    return most


_GIGAFLOPS = json.loads(Path(__file__).with_name("nominal_rates.json").read_text())
NOMINAL = Rates(
    arithmetic={
        kind: tuple((size, 1e9 * rate) for size, rate in points) for kind, points in _GIGAFLOPS.items()
    },
    memory={
        op: rule.speed.bytes_per_second
        for op, rule in RULES.items()
        if isinstance(rule.speed, Streaming) and rule.speed.bytes_per_second
    },
    copy_bytes_per_second=2.4e10,
    instruction_seconds=2.7e-6,
    program_seconds=2.3e-5,
    disk_read_bytes_per_second=1.9e9,
    disk_write_bytes_per_second=3.6e9,
    thin_slab_elements=THIN_SLAB_ELEMENTS,
)
"""Rates that ``planning.calibrate`` measured with the torch engine on two cores of an AMD EPYC (Zen 5), a
quiet virtual machine and its virtual disk, rounded to two digits. The rules of operators that are bound by
memory have their rates."""


def call_seconds(calls: Iterable[Call]) -> list[float]:
    """Return nominal seconds of calls on one thread where nothing is moved or spilled; 0 for picks."""
    seconds_of, found = by_key(partial(program_seconds, rules=RULES, rates=NOMINAL)), []
    for call in calls:
        if isinstance(call, UnitCall):
            found.append(seconds_of(call.unit.program))
        elif isinstance(call, CombineCall):
            nbytes = sum(one.nbytes for one in made_of(call)) * len(call.counts)
            found.append(nbytes / NOMINAL.copy_bytes_per_second)
        else:
            found.append(0.0)
    return found


class Costs:
    """Seconds of calls on one thread; those of programs are found once for all processes."""

    def __init__(self, rates: Rates, feeds: Mapping[str, int] | None = None) -> None:
        """``feeds``: value from the dataset -> how many of its first axes, as stored, are samples."""
        self.rates, self.feeds = rates, feeds or {}
        self.program_seconds = by_key(partial(program_seconds, rules=RULES, rates=rates))
        self._cold_seconds = by_key(partial(cold_seconds, rules=RULES))

    def seconds(self, call: UnitCall | CombineCall) -> float:
        """Return the seconds of a call where programs have cores of their own."""
        if isinstance(call, CombineCall):
            return TASK_SECONDS + self._adding(call)
        return TASK_SECONDS + SLOWDOWN_FACTOR * self.program_seconds(call.unit.program)

    def shared_seconds(self, call: UnitCall | CombineCall) -> float:
        """Return the seconds of a core that a call takes where all that the process does shares its cores."""
        if isinstance(call, CombineCall):
            return COMBINE_SECONDS + SCHEDULING_SECONDS + self._adding(call)
        made, program = len(call.unit.makes), call.unit.program
        tasks = 1 if made == 1 else 1 + made  # several results are picked by tasks
        seconds = UNIT_SECONDS + tasks * SCHEDULING_SECONDS
        return seconds + self.program_seconds(program) + self._cold_seconds(program)

    def gathering_seconds(self, parts: int, nbytes: int) -> float:
        """Return the seconds of a shared core for putting together bytes that lie in so many parts."""
        copying = 2 * nbytes / self.rates.copy_bytes_per_second
        return GATHER_SECONDS + parts * PART_SECONDS + STRIDED_FACTOR * copying

    def _adding(self, call: CombineCall) -> float:
        moved = 3 * len(call.counts) * sum(made.nbytes for made in made_of(call))
        return moved / self.rates.copy_bytes_per_second
