"""The speed of an operator, as its rule says: what bounds it, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction

Given = tuple[Shape, str]
"""Shape and dtype of an operand of a probe."""
RateTable = tuple[tuple[int, float], ...]
"""(size, floating-point operations for a second), sizes ascending."""


@dataclass(frozen=True)
class Probe:
    """A measurement of one operator on arrays of given shapes (see ``oocdl.planning.probes``)."""

    op: str
    inputs: tuple[Given, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    chained: bool = False
    """Whether the operator is measured together with a Neg that follows it, whose own time is subtracted."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """The speed of an operator that is bound by memory: its time is that of its bytes."""

    like: str
    """The operator whose rate counts where this one's is not known, as in a cache of rates that was
    measured before this one existed. An operator that others are like names itself."""
    probes: Callable[[Shape], Iterable[Probe]]
    """Shape of a volume [batch, channels, depth, height, width] -> measurements, whose mean time for a byte
    counts. Probes with arrays of bfloat16 are left out where an engine has no bfloat16."""
    bytes_per_second: float | None = None
    """The nominal rate of one thread, with bytes of operands and results counted; None: that of ``like``."""


Heavy = tuple[str, int, Probe]
"""A kind of heavy operator, one size, and a probe of that kind and size."""


@dataclass(frozen=True)
class Scale:
    """The size of probes of heavy operators, and their number."""

    share: float = 1.0
    """The factor of their elements: 1 is for measuring, less is for tests."""
    few: bool = False
    """Whether only a few sizes are measured, as in bfloat16, in which few sizes are computed at all."""
    thin_slab_elements: int = 0
    """See ``Rates.thin_slab_elements``."""


@dataclass(frozen=True, kw_only=True)
class Computing:
    """The speed of a heavy operator: its time is that of its arithmetic, by kind and size.

    It takes at least as long as reading its operands does.
    """

    like: str
    """The operator whose rate is that of reading operands."""
    kind: Callable[[Instruction, Sequence[Shape], int], tuple[str, int]]
    """(instruction, shapes of its operands with padding, ``Rates.thin_slab_elements``) -> the kind, whose
    table of rates counts, and the one size that matters most."""
    probes: Callable[[Scale], Iterable[Heavy]]
    then: Callable[[Instruction], Sequence[str]] = lambda step: ()
    """Operators that the kernel applies to the result; their time is added."""
    arranged_elements: Callable[[Instruction, Sequence[Shape]], int] = lambda step, shapes: 0
    """(instruction, shapes of its operands) -> elements that its kernel puts into another order in each
    call, such as weights of a convolution."""
    small_tiles: Callable[[Instruction, Sequence[Shape]], float] = lambda step, shapes: 0
    """(instruction, operand shapes) -> tiles computed one by one, beyond those that its rate stands for."""
    tile_seconds: float = 0.0
    """Seconds for each of these tiles beside its arithmetic: calls of kernels."""


Speed = Streaming | Computing
