"""Cuts a pass into segments, the tasks that a Dask cluster schedules.

A segment is what one member does of consecutive layers. It begins when the member has done its segment
before, and when the members whose strips, sums or weights it reads have done those of their segments that
make them. All members are cut at the same layers, so no segment waits for itself. What layers of one segment
read of each other travels while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from oocdl.planning.cost_model import call_seconds
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.hosts.ragged import Ints

HANDOVER_SECONDS = 0.016
"""Seconds, about, in which a member computes nothing between two segments: its last unit ends alone, and
worker and scheduler tell each other."""
HANDOVER_SHARE = 0.02
"""Maximum share of a pass that handovers take."""
MOST_SEGMENTS = 4000
"""Maximum segments of a pass on all members together: each takes 2 ms of the scheduler."""

Place = tuple[int, int]
"""Member and number of a segment."""


@dataclass(frozen=True)
class Segment:
    """A task of the cluster: the calls of one member in consecutive layers."""

    member: int
    number: int
    """Place of its layers in the pass; equal numbers of several members are the same layers."""
    first_group: int
    last_group: int
    """The groups of layers, as ``Exchange`` has them, with which its work begins and ends."""
    after: tuple[Place, ...]
    """The segments that are done before it begins."""


@dataclass(frozen=True, eq=False)
class Outline:
    """Tells who works at which groups of layers, and reads whom: by this a pass is cut."""

    groups: tuple[str, ...]
    """Names of the groups, as in ``Exchange``."""
    seconds: npt.NDArray[np.float64]
    """Nominal seconds of each member (rows) for each group of layers; 0: it has no calls of it."""
    reads: Ints
    """Receiver, group that reads, sender and group that makes what members send each other, each once."""


def outline_of(going: Exchange, members: int, threads: int) -> Outline:
    """Return the outline of a pass on members of so many threads."""
    sender, receiver, _, group, reader, *_ = going.columns
    reads = np.stack((receiver, reader, sender, group))[:, group >= 0]
    return Outline(going.groups, _work(going, members, threads), np.unique(reads, axis=1))


def segment_counts(going: Exchange, members: int, threads: int) -> list[int]:
    """Return the number of segments of each member, by nominal rates."""
    seconds = _work(going, members, threads)
    counts: list[int] = _has(seconds, _cut(seconds, None)).sum(axis=1).tolist()
    return counts


def segments_of(outline: Outline, measured_seconds: float | None = None) -> list[Segment]:
    """Return the segments of all members, each one's in order, as fine as handovers may cost.

    ``measured_seconds``: seconds of a pass; None: those by nominal rates.
    """
    number_of = _cut(outline.seconds, measured_seconds)
    first = np.flatnonzero(np.diff(number_of, prepend=-1))
    last = np.append(first[1:], len(number_of)) - 1
    has = _has(outline.seconds, number_of)
    after = _after(outline.reads, number_of, has)
    for member, numbers in enumerate(map(np.flatnonzero, has)):
        for before, number in pairwise(numbers.tolist()):
            after.setdefault((member, number), []).append((member, before))
    return [
        Segment(member, number, int(first[number]), int(last[number]), tuple(after.get((member, number), ())))
        for member, number in np.argwhere(has).tolist()
    ]


def _work(going: Exchange, members: int, threads: int) -> npt.NDArray[np.float64]:
    """Return the seconds of each member for each group of layers."""
    shape = members, len(going.groups)
    code = going.placed.workers * shape[1] + going.group_of
    seconds = np.array(call_seconds(going.graph.calls)) / threads
    return np.bincount(code, seconds, members * shape[1]).astype(np.float64).reshape(shape)


def _cut(seconds: npt.NDArray[np.float64], measured_seconds: float | None) -> Ints:
    """Return the number of the segment of each group of layers; its busiest member decides how long it is."""
    longest = seconds.max(axis=0) + 1e-12
    total = float(longest.sum())
    count = int((total if measured_seconds is None else measured_seconds) * HANDOVER_SHARE / HANDOVER_SECONDS)
    count = min(max(count, 1), max(MOST_SEGMENTS // len(seconds), 1))
    middles = np.cumsum(longest) - longest / 2
    wanted = np.minimum((middles / total * count).astype(np.int64), count - 1)
    return np.cumsum(np.diff(wanted, prepend=wanted[:1]) > 0)


def _has(seconds: npt.NDArray[np.float64], number_of: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each member has each segment: the first, with which others may ask it for weights, those
    in which it works, and the last, with which it ends."""
    has = np.logical_or.reduceat(seconds > 0, np.flatnonzero(np.diff(number_of, prepend=-1)), axis=1)
    has[:, [0, -1]] = True
    return has


def _after(reads: Ints, number_of: Ints, has: npt.NDArray[np.bool_]) -> dict[Place, list[Place]]:
    """Return, for segments that read of other members, the last segment of each that makes some of it."""
    receiver, reader, sender, maker = reads
    columns = np.stack((receiver, number_of[reader], sender, number_of[maker]))
    latest: dict[tuple[int, int, int], int] = {}
    for to, number, other, made in np.unique(columns, axis=1).T.tolist():
        if made < number and has[other, made]:  # else both are one, or the member only passes it on
            place = to, number + int(has[to, number:].argmax()), other
            latest[place] = max(made, latest.get(place, -1))
    after: dict[Place, list[Place]] = {}
    known: dict[Place, int] = {}
    for (to, number, other), made in sorted(latest.items()):
        if made > known.get((to, other), -1):
            known[to, other] = made
            after.setdefault((to, number), []).append((other, made))
    return after
