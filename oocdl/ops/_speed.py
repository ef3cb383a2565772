"""Speeds of operators that are bound by memory, and the probes that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.speed import Probe, Streaming

ARITHMETIC, EXPONENTIAL, READING, MOVING = "Add", "Exp", "ReduceSum", "Transpose"
"""The operators whose rates stand for all operators that do little arithmetic on each element, that
compute an exponential or the like of it, that only read it, and that only move it."""


def streaming(like: str, gigabytes: float | None, probes: Callable[[Shape], Iterable[Probe]]) -> Streaming:
    """Make the speed of an operator that is bound by memory, its nominal rate given in GB/s."""
    rate = None if gigabytes is None else 1e9 * gigabytes
    return Streaming(like=like, probes=probes, bytes_per_second=rate)


def probe(op: str, *shapes: Shape, **attrs: Any) -> Probe:
    """Make a probe of an operator on operands of float32."""
    return Probe(op, tuple((shape, "float32") for shape in shapes), attrs)


def rows_of(shape: Shape) -> Shape:
    """Return the shape of a volume as a matrix, with a row for each plane of each channel."""
    return shape[1] * shape[2], shape[3] * shape[4]


def reductions(op: str, axes: Sequence[Sequence[int]]) -> Callable[[Shape], Iterable[Probe]]:
    """Return probes of a reduction over some ``axes`` of a volume, and over the rows of a matrix."""

    def probes(shape: Shape) -> Iterable[Probe]:
        yield from (probe(op, shape, axes=tuple(over)) for over in axes)
        yield probe(op, rows_of(shape), axes=(1,))

    return probes
