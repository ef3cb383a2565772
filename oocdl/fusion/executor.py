"""Runs a chain as one compiled loop (``Fused``); each engine says how its arrays are viewed and made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from oocdl.fusion.chain import Chain, Crop, Kind, crop, from_channels_last
from oocdl.fusion.loop_axes import REDUCTIONS
from oocdl.fusion.loop_nest import Fused, Placed, View
from oocdl.fusion.team import ALONE, Team
from oocdl.graph.ir.graph import Array, Shape

A = TypeVar("A")
"""The type that the runtime computes with: a NumPy array or a torch tensor."""


class AnyChainStep(ABC, Generic[A]):
    """A chain with all that can be decided before it runs."""

    def __init__(
        self,
        chain: Chain,
        needed: frozenset[int],
        dtype_of: Mapping[int, str],
        library: Any,
        team: Team = ALONE,
    ) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: slot -> dtype.

        ``library``: the module of the arrays, NumPy or torch. ``team``: the threads that run the loop.
        """
        self.chain, self.rank, self._library = chain, len(chain.domain), library
        made = {slot for item in chain.members for slot in item.outputs if slot in needed}
        reduced = {slot for item in chain.members if item.op in REDUCTIONS for slot in item.outputs}
        self.loop = Fused(chain, made - reduced, dtype_of, team)
        self.columns = self.loop.columns
        completed = {slot for slot in reduced if self.columns[slot] in self.loop.completed}
        self.full = (made - reduced) | completed
        """Slots that the loop writes."""
        self.summed = made - self.full
        """Slots whose values are computed from the loop's sums in memory."""
        self._outside = [(key, column) for key, column in self.columns.items() if isinstance(key, tuple)]
        self._written: list[tuple[int, Kind, int]] = []
        """Slot, kernel's shape and dtype, and column of what the loop writes."""
        self._shapes: list[tuple[int, Shape]] = []
        """Slot of each result that is read later, and its shape there."""
        for item in chain.members:
            kinds = zip(item.outputs, item.kernel_shapes, item.shapes, item.dtypes, strict=True)
            for slot, kernel_shape, shape, dtype in kinds:
                if slot in self.full:
                    self._written.append((slot, (kernel_shape, dtype), self.columns[slot]))
                if slot in made:
                    self._shapes.append((slot, shape))
        self._known: dict[tuple[int, object], tuple[int, tuple[int, ...]]] = {}
        """Column, and how a slot's array lies -> where the operand begins in it, and its strides."""

    def run(self, slots: dict[int, A], places: Mapping[int, A]) -> None:
        """Read operands from ``slots`` and put results there, in the arrays of ``places`` where given."""
        copies: list[A] = []
        placed = {
            column: self._place(column, slots[slot], box, shape, copies)
            for (slot, box, shape), column in self._outside
        }
        results: dict[int, Any] = {}
        for slot, kind, column in self._written:
            results[slot] = whole = self._whole(slot, kind, slots, places)
            placed[column] = self._result_place(column, whole)
        for item, sums in self.loop.run(placed):
            for slot, total, dtype in zip(item.outputs, sums, item.dtypes, strict=True):
                results[slot] = self._of_numpy(total, dtype)
        last = self.chain.channels_last
        for slot, shape in self._shapes:
            made = results[slot]
            slots[slot] = (self._library.moveaxis(made, -1, 1) if last else made).reshape(shape)

    def able(self, lying: Callable[[int, Shape, str], A]) -> set[int]:
        """Return the slots that the loop can write where they belong.

        ``lying`` returns an array that lies as the output of this slot, shape and dtype does. A norm of
        groups sees channels in two axes, and a loop over them may be unable to write them last.
        """
        found = set[int]()
        for item in self.chain.members:
            kinds = zip(item.outputs, item.shapes, item.dtypes, item.kernel_shapes, strict=True)
            for slot, shape, dtype, seen in kinds:
                if slot in self.full:
                    place = self.loop.place(self._view(self._seen(lying(slot, shape, dtype), seen)))
                    found |= set() if place is None else {slot}
        return found

    def _place(self, column: int, array: A, box: Crop | None, shape: Shape, copies: list[A]) -> Placed:
        """Tell how a column's operand lies; ``array`` is its slot's, ``copies`` keeps what had to be copied.

        An operand is a view nearly always, and lies as it did the last time.
        """
        key = (column, self._lying(array))
        if key in self._known:
            offset, steps = self._known[key]
            return Placed(self._address(array) + offset, steps)
        view = self._view(array)
        operand = self._seen(crop(array, box), shape)
        place = self.loop.place(self._view(operand))
        if place is None:
            operand = self._copy(operand)
            place = self.loop.place(self._view(operand))
        assert place is not None, "a loop cannot run over a dense array"
        offset = place.address - view.address
        if view.holds(offset):
            self._known[key] = offset, place.steps
        else:
            copies.append(operand)
        return place

    def _result_place(self, column: int, array: A) -> Placed:
        """Tell how a column's result lies."""
        key = (column, self._lying(array))
        if key not in self._known:
            place = self.loop.place(self._view(array))
            assert place is not None, "a loop cannot write a result as it lies"
            self._known[key] = 0, place.steps
        return Placed(self._address(array), self._known[key][1])

    def _seen(self, array: Any, shape: Shape) -> A:
        """View the array of a slot in a shape of the chain."""
        last = self.chain.channels_last and len(shape) == self.rank
        seen = array.reshape(from_channels_last(shape) if last else shape)
        moved: A = self._library.moveaxis(seen, 1, -1) if last else seen
        return moved

    def _view(self, array: A) -> View:
        """Tell the address and strides of an array, in the axes of the chain."""
        shape, strides = self._lying(array)
        return View(self._address(array), tuple(shape), tuple(step * self._unit(array) for step in strides))

    @abstractmethod
    def _address(self, array: A) -> int:
        """Return the address of an array's first element."""

    @abstractmethod
    def _lying(self, array: A) -> tuple[Shape, tuple[int, ...]]:
        """Return the shape and the strides of an array, as its library has them."""

    @abstractmethod
    def _unit(self, array: A) -> int:
        """Return the bytes that strides of an array are counted in."""

    @abstractmethod
    def _copy(self, array: A) -> A:
        """Copy an array into memory without gaps."""

    @abstractmethod
    def _of_numpy(self, array: Array, dtype: str) -> A:
        """Convert a small NumPy array to the runtime's type and to ``dtype``."""

    @abstractmethod
    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, A], places: Mapping[int, A]) -> A:
        """Return an array for a result: that of ``places``, or of an operand that ends here, or a new one."""
