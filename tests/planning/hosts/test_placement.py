"""Placed passes as they have always been: digests of who does what, and of all that travels.

Small sums several workers combine for themselves: all that they need comes, and no total travels.
"""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest

from oocdl.planning.calls import CombineCall, PickCall, UnitCall, parts_of
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts import exchange as module
from oocdl.planning.hosts import placement
from oocdl.planning.hosts.exchange import alike
from oocdl.planning.hosts.flat_pass import flatten
from oocdl.planning.hosts.local_order import local_order
from oocdl.planning.hosts.placement import copies, place
from oocdl.planning.hosts.share import Share, packed_shares, shares_of
from tests.kit.placed import placement_digest, strips_of
from tests.kit.plans import cut_for, exchanged, mlp_draft, unet_draft

CASES = {
    ("mlp", 3, "batch"): "b966cfefee8c92b5",
    ("mlp", 4, "channels"): "432bc4ff870eaaac",
    ("unet", 2, "space"): "d3a065be221cc79a",
    ("unet", 3, "both"): "35b68c377627ad44",
    ("unet", 8, "auto"): "7c0a1b4c10fc8fda",
}
CUTS = {"batch": {"batch": 8}, "channels": {"channels": 8}, "space": {"space": (4,)}, "auto": {}}
CUTS["both"] = {"batch": 2, "space": (2, 2)}


def made_of(network: str, workers: int, cut: str) -> CompiledPass:
    """A network, cut for so many workers in one of these ways."""
    draft = mlp_draft((256, 512, 256, 256), 64) if network == "mlp" else unet_draft(16, 8)
    return cut_for(draft, 2, workers, **CUTS[cut])


@pytest.mark.parametrize(("network", "workers", "cut"), CASES)
def test_placement_is_what_it_was(network: str, workers: int, cut: str) -> None:
    """To be changed only where another placement is meant."""
    compiled = made_of(network, workers, cut)
    assert placement_digest(exchanged(compiled, workers)) == CASES[network, workers, cut]


@pytest.mark.parametrize(("network", "cut"), [("mlp", "channels"), ("mlp", "batch"), ("unet", "both")])
def test_numbers_of_arguments_are_those_of_each_call(network: str, cut: str) -> None:
    """Units share reads: what is looked at once holds for each of them."""
    graph = made_of(network, 3, cut).graph
    flat = flatten(graph)
    units = [call for call in graph.calls if isinstance(call, UnitCall)]
    objects = {id(read) for call in units for read in call.reads}
    assert len(objects) < sum(len(call.reads) for call in units)
    regions: dict[int, object] = {}
    for number, call in enumerate(graph.calls):
        mine = slice(flat.first[number], flat.first[number + 1])
        arguments = () if isinstance(call, PickCall) else call.arguments
        assert [flat.keys[source] for source in flat.source[mine]] == list(arguments)
        if isinstance(call, PickCall):
            continue
        nbytes = dict(parts_of(call))
        assert flat.nbytes[mine].tolist() == [nbytes[one] for one in range(len(arguments))]
        read = dict(part for each in getattr(call, "reads", ()) for part in each.chunks)
        for one, part in enumerate(flat.part[mine].tolist()):
            assert (part < 0) == (one not in read)
            assert part < 0 or regions.setdefault(part, read[one]) == read[one]
    assert len(set(regions.values())) == len(regions) > 1


@pytest.mark.parametrize(("network", "cut"), [("mlp", "channels"), ("unet", "both")])
def test_equal_reads_of_a_worker_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, network: str, cut: str
) -> None:
    compiled = made_of(network, 8, cut)
    placed = place(compiled.graph, 3)
    made, every = [], np.arange(len(placed.flat.source))
    fresh, first = alike(placed)
    assert len(fresh) < 0.9 * len(every) and set(first.tolist()) == set(fresh.tolist())
    for known in (fresh, first), (every, every):
        monkeypatch.setattr(module, "alike", lambda _, known=known: known)
        made.append(exchanged(compiled, 3))
    assert placement_digest(made[0]) == placement_digest(made[1])


@pytest.mark.parametrize(("network", "cut"), [("mlp", "channels"), ("unet", "auto"), ("unet", "both")])
def test_what_travels_to_members_is_their_own_part(network: str, cut: str) -> None:
    """However many they are: of each share a member makes what it does in a pass, and learns nothing else.

    Of the cut in space and batch some sums are combined by several.
    """
    compiled = made_of(network, 8, cut)
    made = exchanged(compiled, 8)
    packed = packed_shares({"main": made}, 8)
    shares: list[Share] = [pickle.loads(one)["main"] for one in packed]
    assert sum(map(len, packed)) < 4 * len(pickle.dumps(compiled.graph))
    numbers = [number for share in shares for number, call in enumerate(share.calls) if call is not None]
    assert sorted({*numbers}) == list(range(len(compiled.graph.calls)))
    assert (len(numbers) > len({*numbers})) == (len(made.placed.copies.calls) > 0) == (cut == "both")
    assert {len(share.calls) for share in shares} == {len(compiled.graph.calls)}
    strips = sorted((strip for share in shares for strip in share.strips()), key=lambda one: one.key.number)
    assert tuple(strips) == strips_of(made.placed)
    bundles = {bundle.key.number: bundle for share in shares for bundle in share.bundles()}
    assert bundles == dict(enumerate(made.bundles))
    for mine, order in zip(
        map(local_order, shares), map(local_order, shares_of(made, range(8))), strict=True
    ):
        assert list(map(repr, mine.steps)) == list(map(repr, order.steps))
        assert (mine.stored, mine.arriving, mine.uses) == (order.stored, order.arriving, order.uses)


def test_reads_of_a_unit_are_objects_that_others_have() -> None:
    """A member has as few as the pass: they are most of what it keeps."""
    compiled = made_of("unet", 2, "auto")
    made = exchanged(compiled, 2)
    for packed, share in zip(packed_shares({"main": made}, 2), shares_of(made, range(2)), strict=True):
        known: Share = pickle.loads(packed)["main"]
        of_each = []
        for calls in (known.calls, share.calls):
            units = [call for call in calls if isinstance(call, UnitCall)]
            regions = [region for call in units for _, region in (*call.unit.reads, *call.unit.makes)]
            reads = [read for call in units for read in call.reads]
            counted = [
                {id(one) for one in some} for some in (reads, regions, [c.unit.program for c in units])
            ]
            of_each.append([len(ids) for ids in counted])
        assert all(mine <= before for mine, before in zip(*of_each, strict=True)), of_each


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_whoever_reads_a_small_sum_combines_it(workers: int) -> None:
    """What a worker reads is made by it, lives with it, or comes; statistics never come."""
    made = exchanged(made_of("unet", 4, "space"), workers)
    assert len(made.placed.copies.calls) > 10
    come = {(item, one.receiver) for one in made.bundles for item in one.items}
    assert max(Counter(come).values()) == 1
    for share in shares_of(made, range(workers)):
        mine = {call.key for _, call, _ in share.own_calls()}
        mine |= {strip.key for strip in share.strips()} | set(share.stored)
        for _, call, _ in share.own_calls():
            needed = (call.source,) if isinstance(call, PickCall) else call.arguments
            for key in needed:
                assert key in mine or (key, share.member) in come, (call.key, key)
    assert not any("moments" in item.value for item, _ in come if item.kind.value == "combine")


def test_what_a_pass_hands_out_is_combined_once() -> None:
    compiled = made_of("unet", 4, "space")
    made = exchanged(compiled, 4)
    flat, copied = made.placed.flat, set(made.placed.copies.calls.tolist())
    assert all(isinstance(compiled.graph.calls[place_], CombineCall) for place_ in copied)
    assert not copied & set(flat.maker[[flat.number[key] for key in compiled.graph.outputs]].tolist())


def test_large_sums_and_those_of_many_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = made_of("unet", 8, "auto")
    placed = place(compiled.graph, 8)
    most = []
    for workers, nbytes in ((placement.MOST_COPYING_WORKERS, 64 << 10), (8, 64 << 10), (8, 64)):
        monkeypatch.setattr(placement, "MOST_COPYING_WORKERS", workers)
        monkeypatch.setattr(placement, "MOST_COPIED_BYTES", nbytes)
        most.append(len(copies(placed.flat, placed.workers).calls))
    assert max(most[0], most[2]) < most[1]
