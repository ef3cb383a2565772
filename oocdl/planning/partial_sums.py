"""The shards of a layer add their partial results to a fixed number of partial sums, in order.

A plan for several workers gives each a contiguous run of the shards, with partial sums of its own: what is
added up in one worker stays there, and no worker waits for another's sum. Which these are is fixed by the
plan: on another number of workers the same additions are made, and more of them cross.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import isqrt

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.pass_plan import PARTIAL_SUM_BYTES, LayerPlan, PassPlan
from oocdl.planning.slot_search import COMBINED_AT_ONCE
from oocdl.planning.task_key import TaskKey

Sum = tuple[TaskKey, int]
"""A key that has a partial sum, and the elements that went into it."""


class PartialSums:
    """The partial sums of one layer: each unit learns which earlier result it adds its own to."""

    def __init__(self, plan: PassPlan, planned: LayerPlan) -> None:
        self.groups: dict[tuple[str, Region], list[list[Sum]]] = {}
        self._entered: dict[tuple[str, Region], int] = {}
        self._workers, self._has_many_slots = plan.workers, plan.slots > 1
        partials = set(planned.layer.partials)
        shards = Counter(made for unit in planned.units for made in unit.makes if made[0] in partials)
        regions = Counter(name for name, _ in shards)
        for (name, region), count in shards.items():
            size = region_size(region) * itemsize(plan.factored.graph.values[name].dtype)
            at_once = -(-plan.slots // regions[name])
            sums = max(2, PARTIAL_SUM_BYTES // max(size, 1), at_once)
            sums = min(count, -(-sums // plan.workers) * plan.workers)
            self.groups[name, region] = [[] for _ in range(sums)]
        self.shards = shards

    def alone(self, name: str, region: Region) -> bool:
        """Whether one unit makes all of it, so that nothing is left to combine."""
        return self.shards[name, region] == 1

    def join(self, name: str, region: Region, count: int, key: TaskKey) -> Sum | None:
        """Add a unit's result to a partial sum; returns its last key and its elements before, if any."""
        sums, shards = self.groups[name, region], self.shards[name, region]
        entered = self._entered.get((name, region), 0)
        self._entered[name, region] = entered + 1
        worker = entered * self._workers // shards
        begun = _first(worker, shards, self._workers)
        low, high = (_first(each, len(sums), self._workers) for each in (worker, worker + 1))
        members = sums[low + (entered - begun) % (high - low)]
        previous = members[-1] if members else None
        members.append((key, count + (previous[1] if previous else 0)))
        return previous

    def ends(self, name: str, region: Region) -> list[list[Sum]]:
        """The partial sums when all shards have been added, in groups: each is combined, then all of them.

        One group where there are few, or few slots; else those of each worker, or of a process about as many
        groups as each has sums.
        """
        found = [members[-1] for members in self.groups[name, region]]
        count = self._workers if self._workers > 1 else isqrt(len(found))
        if not self._has_many_slots or len(found) <= COMBINED_AT_ONCE or count >= len(found):
            return [found]
        marks = [_first(group, len(found), count) for group in range(count + 1)]
        return [found[low:high] for low, high in pairwise(marks) if low < high]


def _first(group: int, members: int, groups: int) -> int:
    """The first of ``members`` shards, or sums, that belong to a group."""
    return -(-group * members // groups)
