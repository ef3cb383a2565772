"""Counts what a session has moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moved:
    """What a step moved, in bytes."""

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
