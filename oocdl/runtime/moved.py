"""Counts what a session has moved."""

from __future__ import annotations

from dataclasses import dataclass

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
