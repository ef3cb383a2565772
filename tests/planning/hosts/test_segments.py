"""Segments of a pass: as fine as handovers may cost, and never in a circle."""

from __future__ import annotations

from itertools import pairwise

import pytest

from oocdl.planning.hosts import segments as module
from oocdl.planning.hosts.exchange import Exchange, exchanges_of
from oocdl.planning.hosts.segments import Segment, outline_of, segments_of
from tests.kit.plans import cut_for, unet_draft

LONG_SECONDS = 60.0


@pytest.fixture(scope="module")
def unet() -> dict[int, Exchange]:
    """By number of members; the plan is for four."""
    compiled = cut_for(unet_draft(16, 8), 2, 4, space=(4,))
    return {members: exchanges_of({"": compiled.graph}, members, 2)[""] for members in (2, 4, 6)}


def by_member(found: list[Segment], members: int) -> list[list[Segment]]:
    return [[one for one in found if one.member == member] for member in range(members)]


def test_a_short_pass_is_one_task_of_each_member(unet: dict[int, Exchange]) -> None:
    for members, going in unet.items():
        found = segments_of(outline_of(going, members, 1))
        last = len(going.groups) - 1
        assert found == [Segment(member, 0, 0, last, ()) for member in range(members)], "idle ones, too"


@pytest.mark.parametrize("members", [2, 4, 6])
def test_a_long_pass_has_a_task_for_each_layer_of_each_member(
    unet: dict[int, Exchange], members: int
) -> None:
    going = unet[members]
    outline = outline_of(going, members, 1)
    found = segments_of(outline, LONG_SECONDS)
    firsts = {one.first_group for one in found}
    assert len(firsts) > 0.7 * len(going.groups)
    for mine in by_member(found, members):
        assert mine[0].first_group == 0 and mine[-1].last_group == len(going.groups) - 1
        assert all(before.last_group < one.first_group for before, one in pairwise(mine))
        own = {group for one in mine for group in range(one.first_group, one.last_group + 1)}
        assert set(outline.seconds[mine[0].member].nonzero()[0].tolist()) <= own


@pytest.mark.parametrize("seconds", [1.0, 5.0, LONG_SECONDS])
def test_what_is_read_of_an_earlier_segment_is_done_before(unet: dict[int, Exchange], seconds: float) -> None:
    """By an edge, or by edges of earlier segments of the member; and every edge leads back."""
    going = unet[4]
    found = segments_of(outline_of(going, 4, 1), seconds)
    at = {(one.member, group): one for one in found for group in range(one.first_group, one.last_group + 1)}
    done: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for one in sorted(found, key=lambda one: one.number):
        assert all(number < one.number for _, number in one.after)
        done[one.member, one.number] = {*one.after}.union(*(done[before] for before in one.after))
    for bundle in going.bundles:
        made, read = at.get((bundle.sender, bundle.group)), at.get((bundle.receiver, bundle.reader))
        if made is not None and read is not None and made.number < read.number:
            assert (made.member, made.number) in done[read.member, read.number], bundle


@pytest.mark.parametrize("most", [1, 7])
def test_there_are_no_more_tasks_than_may_be(
    unet: dict[int, Exchange], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SEGMENTS", 2 * most)
    mine = by_member(segments_of(outline_of(unet[2], 2, 1), LONG_SECONDS), 2)
    assert max(map(len, mine)) <= most
    assert most == 1 or min(map(len, mine)) > 1
