"""Small sums that several workers combine for themselves: all that they need comes, and no total travels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from oocdl.planning.calls import CombineCall, PickCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts import placement
from oocdl.planning.hosts.placement import copies, place
from oocdl.planning.hosts.share import shares_of
from tests.kit.plans import cut_for, exchanged, unet_draft


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> CompiledPass:
    return cut_for(unet_draft(tmp_path_factory.mktemp("unet"), 16, 8), 2, 4, space=(4,))


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_whoever_reads_a_small_sum_combines_it(unet: CompiledPass, workers: int) -> None:
    """What a worker reads is made by it, lives with it, or comes; statistics never come."""
    made = exchanged(unet, workers)
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


def test_what_a_pass_hands_out_is_combined_once(unet: CompiledPass) -> None:
    made = exchanged(unet, 4)
    flat, copied = made.placed.flat, set(made.placed.copies.calls.tolist())
    assert all(isinstance(unet.graph.calls[place_], CombineCall) for place_ in copied)
    assert not copied & set(flat.maker[[flat.number[key] for key in unet.graph.outputs]].tolist())


def test_large_sums_and_those_of_many_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = cut_for(unet_draft(tmp_path, 16, 8), 2, 8)
    placed = place(compiled.graph, 8)
    most = []
    for workers, nbytes in ((placement.MOST_COPYING_WORKERS, 64 << 10), (8, 64 << 10), (8, 64)):
        monkeypatch.setattr(placement, "MOST_COPYING_WORKERS", workers)
        monkeypatch.setattr(placement, "MOST_COPIED_BYTES", nbytes)
        most.append(len(copies(placed.flat, placed.workers).calls))
    assert max(most[0], most[2]) < most[1]
