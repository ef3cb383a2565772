"""Lists what each member of a crew does in a pass, in the order in which it does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.hosts.share import Share
from oocdl.planning.task_key import TaskKey

END = (1 << 62,)
"""The place of a chunk that only the end of the pass awaits."""
Place = tuple[int, ...]
Work = Call | Strip | Bundle | None
"""A call, a strip to cut, or a bundle to hand out; None: a chunk is there at the start, or arrives."""


class LocalTask(NamedTuple):
    """A step of a member in a pass."""

    key: TaskKey
    work: Work
    number: int = -1
    """Number of a call in the pass."""


@dataclass(frozen=True, eq=False)
class LocalOrder:
    """The steps of one member in every pass of a kind, in order."""

    stored: tuple[TaskKey, ...]
    """Pieces that it holds, and that it or others read."""
    steps: tuple[LocalTask, ...]
    arriving: tuple[Bundle, ...]
    """Bundles of other members, in the order in which this one requests them. The sender of a bundle has
    requested those that it is made of earlier in its own order: groups of layers, and levels in each, only
    grow on the way. So members never wait in a circle, however few bundles each requests at once."""
    uses: Mapping[TaskKey, tuple[int, ...]]
    """Stored piece or arriving chunk -> the plan positions at which calls of this member read it."""
    calls_of_group: tuple[int, ...]
    """Number of calls of each group of layers that it runs."""
    group_of: Mapping[TaskKey, int]
    """The group of each of these calls."""


def local_order(share: Share) -> LocalOrder:
    """Return the order of the member that has this share of a pass."""
    steps: list[tuple[Place, LocalTask]] = []
    calls_of_group, group_of = [0] * share.groups, dict[TaskKey, int]()
    uses: dict[TaskKey, list[int]] = {}
    after: dict[TaskKey, Place] = {}
    """Chunk -> the place in the order at which it is there."""
    for number, call, group in share.own_calls():
        if isinstance(call, PickCall):
            place: Place = (*after[call.source], 1)
        else:
            place = (call.position,)
            for argument in dict.fromkeys(call.arguments):
                uses.setdefault(argument, []).append(call.position)
        after[call.key] = place
        steps.append((place, LocalTask(call.key, call, number)))
        calls_of_group[group] += 1
        group_of[call.key] = group
    for strip in share.strips():
        after[strip.key] = (*after[strip.source], 2)
        steps.append((after[strip.key], LocalTask(strip.key, strip)))
    sent, come = set[TaskKey](), list[TaskKey]()
    arriving: list[Bundle] = []
    for bundle in share.bundles():
        if bundle.sender == share.member:
            sent.update(bundle.items)
            place = max((after.get(item, (-1,)) for item in bundle.items), default=(-1,))
            steps.append(((*place, 3), LocalTask(bundle.key, bundle)))
        else:
            arriving.append(bundle)
            come += bundle.items
    steps += [((uses[item][0] - 1, 9) if item in uses else END, LocalTask(item, None)) for item in come]
    stored = tuple(key for key in share.stored if key in uses or key in sent)
    return LocalOrder(
        stored=stored,
        steps=tuple(step for _, step in sorted(steps, key=lambda one: one[0])),
        arriving=tuple(sorted(arriving, key=lambda one: (one.reader, one.level, one.position))),
        uses={key: tuple(uses.get(key, ())) for key in (*stored, *come)},
        calls_of_group=tuple(calls_of_group),
        group_of=group_of,
    )
