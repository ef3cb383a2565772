"""What travels between hosts: by way of others once and in few messages, in segments, never in a circle."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.planning.calls import PickCall
from oocdl.planning.hosts import exchange, relays
from oocdl.planning.hosts import segments as module
from oocdl.planning.hosts.exchange import Bundle, Exchange, exchanges_of, homes_of
from oocdl.planning.hosts.local_order import LocalOrder, Work, local_order
from oocdl.planning.hosts.placement import Strip, place
from oocdl.planning.hosts.relays import COLLECTED_BYTES, FAN, Legs, Pairs, routes
from oocdl.planning.hosts.segments import Segment, outline_of, segments_of
from oocdl.planning.hosts.share import shares_of
from oocdl.planning.task_key import TaskKey
from oocdl.planning.window_order import WindowOrder
from tests.kit.placed import worker_of
from tests.kit.plans import cut_for, exchanged, mlp_draft, unet_draft


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


@settings(max_examples=200)
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


def needs_of(work: Work) -> tuple[TaskKey, ...]:
    """What a step waits for on its member."""
    if isinstance(work, Strip | PickCall):
        return (work.source,)
    if isinstance(work, Bundle):
        return work.items
    return () if work is None else work.arguments


class Going:
    """A member in a pass: what it runs, asks for, and has handed out."""

    def __init__(self, order: LocalOrder, window: int) -> None:
        steps = [(key, ()) for key in order.stored] + [(s.key, needs_of(s.work)) for s in order.steps]
        self.keys = [key for key, _ in steps]
        self.number = {key: number for number, key in enumerate(self.keys)}
        needed = [[*{self.number[one]: None for one in needs}] for _, needs in steps]
        arriving = [self.number[step.key] for step in order.steps if step.work is None]
        bundles = [self.number[step.key] for step in order.steps if isinstance(step.work, Bundle)]
        self.order = WindowOrder(needed, [], window, arriving, bundles)
        self.group_of, self.left = order.group_of, list(order.calls_of_group)
        self.to_ask, self.asked = deque(order.arriving), list[Bundle]()
        self.running, self.made = list[int](), set[int]()

    def finish(self, number: int) -> None:
        """A task is done, or a chunk has come."""
        self.order.finish(number)
        if self.keys[number] in self.group_of:
            self.left[self.group_of[self.keys[number]]] -= 1
        while (due := self.order.due()) is not None:
            self.made.add(self.keys[due].number)
            self.finish(due)

    def ask(self, most: int) -> None:
        """Ask for what comes next, as ``runtime/cluster/transfers`` does."""
        while self.to_ask and len(self.asked) < most:
            before = self.to_ask[0].reader - exchange.GROUPS_AHEAD
            if before >= 0 and self.left[before]:
                return
            self.asked.append(self.to_ask.popleft())


def stands_still(orders: list[LocalOrder], most_asked: int, window: int, seed: int) -> bool:
    """Whether members with one thread each come to where nobody can go on before all is done."""
    order, members = random.Random(seed), [Going(one, window) for one in orders]
    while True:
        moved = False
        for member in order.sample(members, len(members)):
            member.ask(most_asked)
            came = [one for one in member.asked if one.key.number in members[one.sender].made]
            if came and order.random() < 0.5:
                bundle = order.choice(came)
                member.asked.remove(bundle)
                for key in bundle.items:
                    member.finish(member.number[key])
            elif member.running:
                member.finish(member.running.pop())
            elif (number := member.order.next()) is not None:
                member.running.append(number)
            else:
                moved = moved or bool(came)
                continue
            moved = True
        if not moved:
            return not all(member.order.over for member in members)


@pytest.mark.parametrize(
    ("network", "most_asked", "groups", "windows"),
    [("mlp", 1, 1024, (64, 1)), ("mlp", 1, 1, (8, 1)), ("unet", exchange.MOST_ASKED, 1, (64,))],
)
def test_nobody_waits_in_a_circle(
    monkeypatch: pytest.MonkeyPatch, network: str, most_asked: int, groups: int, windows: tuple[int, ...]
) -> None:
    """Not where many layers are one group, as of deep networks on many workers; nor by asking for less."""
    monkeypatch.setattr(exchange, "MOST_GROUPS", groups)
    if network == "mlp":
        workers, draft = 8, mlp_draft((64, 128, 64, 64), 64)
        compiled = cut_for(draft, 1, workers, batch=2, channels=4)
    else:
        workers = 16
        compiled = cut_for(unet_draft(16, 4), 1, workers, space=(4, 4))
    placed = place(compiled.graph, workers)
    made = exchange.exchange(placed, homes_of([placed]), workers)
    orders = [local_order(share) for share in shares_of(made, range(workers))]
    for seed, window in enumerate(windows):
        assert not stands_still(orders, most_asked, window, seed)
