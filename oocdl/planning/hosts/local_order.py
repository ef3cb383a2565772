"""Lists what each member of a crew does in a pass, in the order in which it does it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from oocdl.planning.calls import Call, PickCall
from oocdl.planning.hosts.exchange import Bundle, Exchange
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.hosts.share import Share, shares_of
from oocdl.planning.task_key import TaskKey

END = (1 << 62,)
"""The place of a chunk that only the end of the pass awaits."""
Place = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LocalOrder:
    """The steps of one member in every pass of a kind, in order."""

    stored: tuple[TaskKey, ...]
    """Pieces that it holds, and that it or others read."""
    steps: tuple[tuple[int, Call] | Strip | Bundle | TaskKey, ...]
    """Steps: (number, call), a strip to cut, a bundle to hand out, or a chunk that arrives."""
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


@dataclass(eq=False)
class _Draft:
    """The growing order of one member."""

    counts: list[int]
    places: list[tuple[Place, Any]] = field(default_factory=list)
    group_of: dict[TaskKey, int] = field(default_factory=dict)
    uses: dict[TaskKey, list[int]] = field(default_factory=dict)
    sent: set[TaskKey] = field(default_factory=set)
    arriving: dict[TaskKey, Place] = field(default_factory=dict)
    bundles: list[Bundle] = field(default_factory=list)


def local_orders(exchange: Exchange, members: Collection[int]) -> dict[int, LocalOrder]:
    """Return the order of each of ``members`` in a pass."""
    return dict(zip(members, map(local_order, shares_of(exchange, members)), strict=True))


def local_order(share: Share) -> LocalOrder:
    """Return the order of the member that has this share of a pass."""
    mine = _Draft([0] * share.groups)
    after: dict[TaskKey, Place] = {}
    """Chunk -> the place in the order at which it is there."""
    for number, call, group in share.own_calls():
        if isinstance(call, PickCall):
            place: Place = (*after[call.source], 1)
        else:
            place = (call.position,)
            for argument in dict.fromkeys(call.arguments):
                mine.uses.setdefault(argument, []).append(call.position)
        after[call.key] = place
        mine.places.append((place, (number, call)))
        mine.counts[group] += 1
        mine.group_of[call.key] = group
    for strip in share.strips():
        after[strip.key] = (*after[strip.source], 2)
        mine.places.append((after[strip.key], strip))
    uses = mine.uses
    for bundle in share.bundles():
        if bundle.sender == share.member:
            mine.sent.update(bundle.items)
            place = max((after.get(item, (-1,)) for item in bundle.items), default=(-1,))
            mine.places.append(((*place, 3), bundle))
        else:
            mine.bundles.append(bundle)
            mine.arriving |= {item: (uses[item][0] - 1, 9) if item in uses else END for item in bundle.items}
    return _finished(mine, [key for key in share.stored if key in uses or key in mine.sent])


def _finished(draft: _Draft, stored: list[TaskKey]) -> LocalOrder:
    places = [*draft.places, *((place, key) for key, place in draft.arriving.items())]
    places.sort(key=lambda one: one[0])
    return LocalOrder(
        stored=tuple(stored),
        steps=tuple(step for _, step in places),
        arriving=tuple(sorted(draft.bundles, key=lambda one: (one.reader, one.level, one.position))),
        uses={key: tuple(draft.uses.get(key, ())) for key in [*stored, *draft.arriving]},
        calls_of_group=tuple(draft.counts),
        group_of=draft.group_of,
    )
