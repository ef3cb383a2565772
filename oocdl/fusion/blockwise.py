"""What a runtime says of an operator that it can compute block by block, as a member of a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

A = TypeVar("A")
"""What the runtime computes with: an array, or a tensor."""
Into = Callable[[list[A], list[A]], None]
"""A function of operands, unpadded and broadcastable, that writes results into memory it is given."""
Bind = Callable[[Mapping[str, Any]], Into[A]]
"""The function for an instruction's attributes."""
Finish = Callable[[list[A], A, tuple[int, ...]], list[A]]
"""(results of the parts, elements of each part, axes) -> results: parts lie along the axes, and what
there is of the elements broadcasts with them."""


@dataclass(frozen=True)
class Blockwise(Generic[A]):
    """How a runtime computes an elementwise operator or a reduction on a block of its operands."""

    bind: Bind[A]
    in_place: int
    """A result may lie in the memory of one of so many first operands, if that has its shape and dtype."""
    finish: Finish[A] | None
    """How a reduction's results come from those of its parts; None: the operator is elementwise."""
