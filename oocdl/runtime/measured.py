"""Counts what the tasks of a session take while they run, and the bytes that it moves.

Tasks say how long they took (``Measured.add``), a session when a pass is over (``Measured.end``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MEMORY = ("peak_bytes", "process_bytes")
"""Fields that are the most so far; all others add up."""


@dataclass(frozen=True)
class Moved:
    """The bytes that a step moved, and the memory that it took."""

    unit_read_bytes: int
    """Read by units, as the plan counts."""
    unit_written_bytes: int
    """Made by units, as the plan counts."""
    read_bytes: int
    """Read from the spill."""
    written_bytes: int
    """Written to the spill."""
    peak_bytes: int
    """Counted peak of the process so far: base, running programs and tier. Of several, of the largest."""
    process_bytes: int
    """The most memory of its own that the process was seen to have so far. Of several, of the largest."""


@dataclass
class Spent:
    """The cost of one layer's tasks: seconds one after another, and bytes."""

    units: int = 0
    wait_seconds: float = 0.0
    """Waiting for memory, and for a compute slot."""
    gather_seconds: float = 0.0
    """Reading and putting together inputs."""
    compute_seconds: float = 0.0
    read_bytes: int = 0
    made_bytes: int = 0

    def add(self, other: Spent) -> None:
        """Add another's numbers to these."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class KindTotals:
    """All passes of one kind."""

    passes: int = 0
    seconds: float = 0.0
    spill_read_bytes: int = 0
    spill_written_bytes: int = 0
    layers: dict[str, Spent] = field(default_factory=dict)


class Measured:
    """The cost of a session's tasks. One lock, taken once a task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Spent] = {}
        self._ended: Counter[str] = Counter()
        self.read_bytes = 0
        """Read by units, as the plan counts."""
        self.made_bytes = 0
        """Made by units, as the plan counts."""
        self.kinds: dict[str, KindTotals] = {}
        """Plan id -> totals."""

    def add(self, layer: str, spent: Spent) -> None:
        """Count what one task of a layer took."""
        with self._lock:
            self.read_bytes += spent.read_bytes
            self.made_bytes += spent.made_bytes
            self._now.setdefault(layer, Spent()).add(spent)

    def end(self, plan_id: str, seconds: float, spill_read_bytes: int, spill_written_bytes: int) -> None:
        """A pass is over: its tasks are those since the last one's end."""
        with self._lock:
            now, self._now = self._now, {}
        self._ended[plan_id] += 1
        if self._ended[plan_id] <= 2:
            self.kinds[plan_id] = KindTotals()
        sums = self.kinds[plan_id]
        sums.passes += 1
        sums.seconds += seconds
        sums.spill_read_bytes += spill_read_bytes
        sums.spill_written_bytes += spill_written_bytes
        for layer, spent in now.items():
            sums.layers.setdefault(layer, Spent()).add(spent)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


def merged(several: Iterable[Measured]) -> Measured:
    """Add up what several processes measured of the same passes: a pass takes as long as the slowest."""
    found = Measured()
    for one in several:
        found.read_bytes += one.read_bytes
        found.made_bytes += one.made_bytes
        for kind, totals in one.kinds.items():
            sums = found.kinds.setdefault(kind, KindTotals())
            sums.passes = max(sums.passes, totals.passes)
            sums.seconds = max(sums.seconds, totals.seconds)
            sums.spill_read_bytes += totals.spill_read_bytes
            sums.spill_written_bytes += totals.spill_written_bytes
            for layer, spent in totals.layers.items():
                sums.layers.setdefault(layer, Spent()).add(spent)
    return found
