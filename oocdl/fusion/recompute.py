"""Lets a later chain compute a value again, where keeping the value would cost more.

A value that only chains read is written as a whole by one and read by another. Where a few elementwise
instructions make it from values that exist anyway, the later chain's loop computes it again, in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from oocdl.fusion.chain import Chain, Crop, Group, reads_of
from oocdl.fusion.loop_axes import nest_of
from oocdl.fusion.loop_ops import EXPONENTIALS, FLOATS
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.index import region_shape
from oocdl.graph.ir.operands import slot_dtypes, slot_shapes
from oocdl.graph.ir.program import Instruction, Operand, Program

RECOMPUTED_OPS = (FLOATS.keys() - EXPONENTIALS.keys()) | {"Cast"}
Part = tuple[int, Crop | None]
"""A slot, and the box of it that is read; None: all of it."""


def _inner(outer: Crop | None, box: Crop | None) -> Crop | None:
    """Return ``box``, which is relative to the box ``outer``, relative to the whole array."""
    if outer is None or box is None:
        return outer or box
    return tuple((a + start, a + stop) for (a, _), (start, stop) in zip(outer, box, strict=True))


@dataclass
class _Copy:
    """Copies members of one chain into another, for the part of the domain that the other reads."""

    source: Chain
    target: Chain
    shapes: Mapping[int, Shape]
    fresh: Callable[[], int]
    makers: Mapping[int, Instruction]
    """Slot -> the member of ``source`` that makes it."""
    members: list[Instruction] = field(default_factory=list)
    slots: dict[Part, int] = field(default_factory=dict)
    """Part of a slot of ``source`` -> slot of its copy. Several boxes of one slot may be read."""
    large: set[Part] = field(default_factory=set)
    """Parts of the size of the domain that the copies read."""

    def make(self, slot: int, box: Crop | None) -> int | None:
        """Copy the members that make ``box`` of a slot; returns the slot of its copy, if there can be one."""
        known, item = self.slots.get((slot, box)), self.makers.get(slot)
        if known is not None or item is None:
            return known
        seen = tuple(filter(None, [self._operand(operand, item, box) for operand in item.operands]))
        if len(seen) < len(item.operands):
            return None
        made = self.slots[slot, box] = self.fresh()
        shapes = item.shapes[0] if box is None else region_shape(box), self.target.domain
        copy = replace(item, operands=seen, outputs=(made,), shapes=shapes[:1], kernel_shapes=shapes[1:])
        self.members.append(copy)
        return made

    def _operand(self, operand: Operand, item: Instruction, box: Crop | None) -> Operand | None:
        """Return the operand of a copy; None where the other chain cannot read it."""
        domain = self.target.domain
        if operand.slot in self.makers:
            made = self.make(operand.slot, box)
            return None if made is None else operand._replace(slot=made, shape=domain)
        if operand.shape == self.source.domain:
            part = operand.crop or tuple((0, extent) for extent in self.shapes[operand.slot])
            if region_shape(part) != item.shapes[0]:
                return None
            crop = _inner(operand.crop, box)
            self.large.add((operand.slot, crop))
            return operand._replace(crop=crop, shape=domain)
        lead = len(domain) - len(operand.shape)
        varies = (axis + lead for axis, extent in enumerate(operand.shape) if extent > 1)
        return operand if all(self.source.domain[axis] == domain[axis] for axis in varies) else None


def _replaced(copy: _Copy, wanted: Collection[Part]) -> Chain | None:
    """Return the target with copies that make ``wanted``; None where no loop can, or reads more."""
    if any(copy.make(slot, box) is None for slot, box in wanted):
        return None
    read = {(o.slot, o.crop) for item in copy.target.members for o in item.operands}
    if len(copy.large - read) > len(wanted):
        return None
    domain = copy.target.domain

    def seen(operand: Operand) -> Operand:
        slot = copy.slots[part] if (part := (operand.slot, operand.crop)) in wanted else None
        return operand if slot is None else operand._replace(slot=slot, crop=None, shape=domain)

    theirs = [replace(i, operands=tuple(map(seen, i.operands))) for i in copy.target.members]
    nest = nest_of(domain, members := (*copy.members, *theirs))
    return None if nest is None else replace(copy.target, members=members, nest=nest)


def _wanted(target: Chain, slots: frozenset[int]) -> list[Part]:
    """Return the parts of ``slots`` that a chain reads; none unless it reads all in its domain's shape."""
    read = [operand for item in target.members for operand in item.operands if operand.slot in slots]
    if any(operand.shape != target.domain or operand.pads is not None for operand in read):
        return []
    return list(dict.fromkeys((operand.slot, operand.crop) for operand in read))


def recomputed(groups: Sequence[Group], program: Program) -> tuple[list[Group], dict[int, str]]:
    """Return groups in which later chains recompute cheap values, and slot -> dtype, new slots included."""
    found, dtypes, shapes = list(groups), slot_dtypes(program), slot_shapes(program)
    reads = [reads_of(group) for group in found]
    final = {item.slot for item in program.outputs}
    numbers = count(max(dtypes, default=0) + 1)
    for index, source in enumerate(found):
        if not isinstance(source, Chain):
            continue
        cheap = [i for i in source.members if i.op in RECOMPUTED_OPS and i.kernel_shapes[0] == source.domain]
        makers = {item.outputs[0]: item for item in cheap}
        readers = [at for at in range(index + 1, len(found)) if not reads[at].isdisjoint(makers)]
        elsewhere = {slot for at in readers if not isinstance(found[at], Chain) for slot in reads[at]}
        slots = frozenset(slot for slot in makers if slot not in final | elsewhere)
        for at in readers:
            target = found[at]
            if not isinstance(target, Chain) or target.channels_last != source.channels_last:
                continue
            wanted = _wanted(target, slots)
            if not wanted or len(target.domain) != len(source.domain):
                continue
            copy = _Copy(source, target, shapes, lambda: next(numbers), makers)
            made = _replaced(copy, wanted)
            if made is not None:
                found[at], reads[at] = made, reads_of(made)
                dtypes |= {fresh: dtypes[slot] for (slot, _), fresh in copy.slots.items()}
                shapes |= {item.outputs[0]: item.shapes[0] for item in copy.members}
    return found, dtypes
