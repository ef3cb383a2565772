"""Writes shapes, sizes and speeds for people."""

from __future__ import annotations

from collections.abc import Sequence


def shape_text(shape: Sequence[int | str]) -> str:
    """Write a shape for people.

    >>> shape_text((2, 64, "depth"))
    '2 × 64 × depth'
    """
    return " × ".join(str(extent) for extent in shape) or "scalar"


def speed_text(bytes_per_second: float) -> str:
    """Write bytes per second for people.

    >>> speed_text(3 << 30)
    '3.0 GiB/s'
    """
    return f"{size_text(bytes_per_second)}/s"


def size_text(nbytes: float) -> str:
    """Write a size for people.

    >>> size_text(512), size_text(3 << 20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
