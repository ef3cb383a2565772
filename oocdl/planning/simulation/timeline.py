"""The results of a simulated step: when units run, what memory holds, what the disk moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from oocdl.planning.task_key import TaskKey


class Ran(NamedTuple):
    """A unit's run, in seconds from the start of the step."""

    position: int
    key: TaskKey
    worker: int
    begun: float
    computing: float
    done: float


class Moment(NamedTuple):
    """Memory at one time, in bytes."""

    seconds: float
    resident_bytes: int
    """Chunks in the tier."""
    reserved_bytes: int
    """Memory of units that read or run, beyond chunks."""
    scratch_bytes: int
    """Scratch of running programs: part of what is reserved."""


class Transfer(NamedTuple):
    """A transfer of the spill's disk, in seconds from the start of the step."""

    begun: float
    done: float
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Simulated:
    """One step as it is expected to go."""

    seconds: float
    read_bytes: int
    """Bytes read from the spill."""
    written_bytes: int
    """Bytes written to the spill."""
    peak_tier_bytes: int
    peak_spill_bytes: int
    """Most that is in the spill at once."""
    compute_seconds: float
    """Seconds of all units, one after another."""
    moments: tuple[Moment, ...]
    """Empty where no timeline was asked for, as ``units``."""
    units: tuple[Ran, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def moved_bytes(self) -> int:
        """Bytes moved from and to the spill."""
        return self.read_bytes + self.written_bytes
