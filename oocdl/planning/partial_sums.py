"""The shards of a layer add their partial results to a fixed number of partial sums, in order."""

from __future__ import annotations

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import Region, region_size
from oocdl.planning.pass_plan import PARTIAL_SUM_BYTES, LayerPlan, PassPlan
from oocdl.planning.task_key import TaskKey


class PartialSums:
    """The partial sums of one layer: each unit learns which earlier result it adds its own to."""

    def __init__(self, plan: PassPlan, planned: LayerPlan) -> None:
        self.groups: dict[tuple[str, Region], list[list[tuple[TaskKey, int]]]] = {}
        self._entered: dict[tuple[str, Region], int] = {}
        shards: dict[tuple[str, Region], int] = {}
        for unit in planned.units:
            for name, region in unit.makes:
                if name in planned.layer.partials:
                    shards[name, region] = shards.get((name, region), 0) + 1
        for (name, region), count in shards.items():
            size = region_size(region) * itemsize(plan.factored.graph.values[name].dtype)
            sums = min(count, max(2, PARTIAL_SUM_BYTES // max(size, 1)))
            self.groups[name, region] = [[] for _ in range(sums)]
        self.shards = shards

    def alone(self, name: str, region: Region) -> bool:
        """Whether one unit makes all of it, so that nothing is left to combine."""
        return self.shards[name, region] == 1

    def join(self, name: str, region: Region, count: int, key: TaskKey) -> tuple[TaskKey, int] | None:
        """Add a unit's result to a partial sum; returns its last key and its elements before, if any."""
        sums = self.groups[name, region]
        entered = self._entered.get((name, region), 0)
        self._entered[name, region] = entered + 1
        members = sums[entered % len(sums)]
        previous = members[-1] if members else None
        members.append((key, count + (previous[1] if previous else 0)))
        return previous
