"""Members never wait for each other in a circle, in whatever order they run calls and messages come."""

from __future__ import annotations

import random
from collections import deque

import pytest

from oocdl.planning.calls import PickCall
from oocdl.planning.hosts import exchange
from oocdl.planning.hosts.exchange import Bundle, homes_of
from oocdl.planning.hosts.local_order import LocalOrder, Work, local_orders
from oocdl.planning.hosts.placement import Strip, place
from oocdl.planning.task_key import TaskKey
from oocdl.planning.window_order import WindowOrder
from tests.kit.plans import cut_for, mlp_draft, unet_draft


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
    orders = [*local_orders(made, range(workers)).values()]
    for seed, window in enumerate(windows):
        assert not stands_still(orders, most_asked, window, seed)
