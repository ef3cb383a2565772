"""The record by which a runtime tells how it computes an operator block by block, as a member of a chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

A = TypeVar("A")
"""The type that the runtime computes with: a NumPy array or a torch tensor."""
Into = Callable[[list[A], list[A]], None]
"""A function of operands, unpadded and broadcastable, that writes results into memory it is given."""
Bind = Callable[[Mapping[str, Any]], Into[A]]
"""The function for an instruction's attributes."""
Finish = Callable[[list[A], A, tuple[int, ...]], list[A]]
"""(partial results, elements of each part, axes) -> results. The parts lie along ``axes``; the array of
element counts broadcasts with the partial results."""


@dataclass(frozen=True)
class Blockwise(Generic[A]):
    """A runtime's kernel of an elementwise operator or a reduction, for a block of its operands."""

    bind: Bind[A]
    in_place: int
    """The number of leading operands in whose memory a result may lie, if shape and dtype are the same."""
    finish: Finish[A] | None
    """The function that combines the partial results of a reduction; None: the operator is elementwise."""
