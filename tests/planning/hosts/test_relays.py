"""What goes by way of other workers comes once to whom it is for, in few messages, and never in a circle."""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.planning.hosts import relays
from oocdl.planning.hosts.relays import COLLECTED_BYTES, FAN, Legs, Pairs, routes
from tests.kit.placed import worker_of
from tests.kit.plans import cut_for, exchanged, unet_draft


def pairs_of(rows: list[tuple[int, int, int, int, int]]) -> Pairs:
    """(item, bytes, sender, receiver, reader) in columns; all that worker makes is of one group of layers."""
    item, nbytes, sender, receiver, reader = np.array(rows, np.int64).reshape(-1, 5).T
    return Pairs(item, nbytes, np.zeros_like(item), sender, receiver, reader, 10 * reader)


def directly(legs: Legs) -> int:
    """To how many others, or from how many, the busiest worker sends or receives."""
    ways = set(zip(legs.sender.tolist(), legs.receiver.tolist(), strict=True))
    ends = np.array(sorted(ways)).T
    return max(int(np.bincount(end).max()) for end in ends)


@st.composite
def some_pairs(draw: st.DrawFn) -> tuple[int, Pairs]:
    workers = draw(st.integers(2, 40))
    rows = []
    for item in range(draw(st.integers(1, 12))):
        sender = draw(st.integers(0, workers - 1))
        nbytes = draw(st.sampled_from([8, COLLECTED_BYTES, COLLECTED_BYTES + 1]))
        others = [one for one in range(workers) if one != sender]
        readers = others if draw(st.booleans()) else draw(st.lists(st.sampled_from(others), unique=True))
        rows += [(item, nbytes, sender, one, draw(st.integers(1, 3))) for one in readers]
    common = draw(st.integers(0, workers - 1))
    senders = [one for one in range(workers) if one != common]
    rows += [(100 + one, 8, one, common, 2) for one in senders]
    return workers, pairs_of(rows)


@settings(max_examples=200, deadline=None)
@given(some_pairs())
def test_everything_comes_once_and_in_order(case: tuple[int, Pairs]) -> None:
    workers, pairs = case
    legs, crossed = routes(pairs, workers)
    made = {(item, sender) for item, sender in zip(pairs.item.tolist(), pairs.sender.tolist(), strict=True)}
    there: dict[tuple[int, int], tuple[int, int, int]] = {}
    """(item, worker) -> how often it has crossed then, its first reader there, and that one's position."""
    for place_ in np.argsort(legs.before, kind="stable").tolist():
        item = int(pairs.item[legs.pair[place_]])
        sender, receiver = int(legs.sender[place_]), int(legs.receiver[place_])
        before, reader, position = (
            int(column[place_]) for column in (legs.before, legs.reader, legs.position)
        )
        assert sender != receiver and (item, receiver) not in there
        if (item, sender) not in made:  # passed on: it came sooner, and was asked for no later
            came = there[item, sender]
            assert came[0] <= before and came[1] <= reader and came[2] <= position
        there[item, receiver] = before + 1, reader, position
    for number, (item, receiver) in enumerate(zip(pairs.item.tolist(), pairs.receiver.tolist(), strict=True)):
        came = there[item, receiver]
        assert came[0] == crossed[number]
        assert came[1] <= pairs.reader[number] and came[2] <= pairs.position[number]
    if workers <= FAN + 1:
        assert len(legs.pair) == len(pairs.item)


@pytest.mark.parametrize("workers", [FAN + 1, FAN + 2, 64, 1024])
def test_nobody_hears_of_many_or_tells_many(workers: int) -> None:
    total = pairs_of([(0, 8, 3, one, 1) for one in range(workers) if one != 3])
    sums = pairs_of([(one, 8, one, 3, 1) for one in range(workers) if one != 3])
    large = sums._replace(nbytes=sums.nbytes + COLLECTED_BYTES)
    most = int(np.ceil(np.log(workers) / np.log(FAN)))
    for pairs, legs_each in ((total, 1), (sums, most)):
        legs, crossed = routes(pairs, workers)
        assert directly(legs) <= FAN and crossed.max() <= most
        assert len(legs.pair) <= legs_each * (workers - 1)
    assert directly(routes(large, workers)[0]) == workers - 1


def test_not_always_the_same_pass_things_on() -> None:
    relaying = set()
    for group in range(16):
        pairs = pairs_of([(0, 8, 3, one, 1) for one in range(64) if one != 3])
        legs, _ = routes(pairs._replace(group=np.full_like(pairs.item, group)), 64)
        relaying |= set(legs.sender.tolist()) - {3}
    assert len(relaying) > 50


def test_a_bundle_waits_for_nothing_that_comes_after_it() -> None:
    """Of a network over many workers: bundles can be handed out one after another until all are."""
    compiled = cut_for(unet_draft(16, 16), 2, 16)
    made = exchanged(compiled, 16)
    where = {**made.homes, **worker_of(made.placed)}
    passed_on = [(one, item) for one in made.bundles for item in one.items if where[item] != one.sender]
    assert passed_on
    needs = defaultdict(set)
    for one in made.bundles:
        for item in one.items:
            needs[item, one.receiver].add(one.key.number)
    assert all(len(numbers) == 1 for numbers in needs.values())
    for one, item in passed_on:
        (source,) = needs[item, one.sender]
        assert made.bundles[source].reader <= one.reader
    waits = defaultdict(set)
    for one, item in passed_on:
        waits[one.key.number] |= needs[item, one.sender]
    TopologicalSorter(waits).prepare()  # a CycleError: bundles wait for each other


def test_many_hear_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The busiest worker of sixteen has fewer bundles than where each tells all others."""
    compiled = cut_for(unet_draft(16, 16), 2, 16)
    busiest = []
    for fan in (FAN, 16):
        monkeypatch.setattr(relays, "FAN", fan)
        columns = exchanged(compiled, 16).columns
        busiest.append(int(np.bincount(columns[:2].ravel()).max()))
    assert busiest[0] < 0.9 * busiest[1]
