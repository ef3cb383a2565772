"""Requests workers from an adaptive cluster with placeholder tasks, and tracks arrivals."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from time import monotonic
from typing import Any

from distributed import Client, Future

from oocdl.runtime.cluster.scheduler_side import WANTED, threads_of_a_worker
from oocdl.runtime.cluster.watch import LOOK_SECONDS, TELL_SECONDS, on_scheduler, open_client, roll

GROW_SECONDS = 5.0
"""Seconds without a further worker after which those that have come while a run goes on join it."""
MOST_TASKS = 10_000


class Wanted:
    """Workers that a client would use if they came."""

    def __init__(self, client: Client) -> None:
        self._client, self._tasks, self._numbers = client, list[Future[Any]](), count()

    def ask(self, workers: int, busy: int = 0) -> None:
        """Request so many workers in all, of which ``busy`` have a task of Dask's. Raises WorkersLost."""
        client = self._client
        if getattr(client.cluster, "_adaptive", client) is None:
            return  # its number of workers is fixed; of a scheduler elsewhere nobody knows
        threads = on_scheduler(client, threads_of_a_worker)
        wanted = min(max(workers * threads - busy, 0), MOST_TASKS)
        with open_client():
            while len(self._tasks) < wanted:
                key = WANTED, client.id, id(self), next(self._numbers)
                self._tasks.append(client.submit(int, key=key, resources={WANTED: 1}))
        self.forget(but=wanted)

    def forget(self, but: int = 0) -> None:
        """Withdraw all requests for threads but so many."""
        while len(self._tasks) > but:
            self._tasks.pop().release()  # type: ignore[no-untyped-call]


class Arrivals:
    """Workers that come after those that were ``known`` when a crew was gathered."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known, self._came, self._looked = set(known), dict[str, float](), monotonic()

    def settled(self, client: Client) -> list[str]:
        """Return the workers that have come, once no more come for a while; look once in ``LOOK_SECONDS``.

        Raises WorkersLost if the scheduler is lost.
        """
        now = monotonic()
        if now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        there = roll(client)
        self._known &= there.keys()  # another may come to the address of one that is gone
        new = {address for address, seen in there.items() if seen.silent < TELL_SECONDS} - self._known
        self._came = {address: self._came.get(address, now) for address in new}
        return sorted(new) if all(now - came > GROW_SECONDS for came in self._came.values()) else []

    def ignore(self, addresses: Iterable[str]) -> None:
        """Count these workers as known: they have not come to join."""
        self._known.update(addresses)
