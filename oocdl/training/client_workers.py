"""The workers of a cluster that a run was given; ``distributed`` is imported with this, for a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oocdl.dashboard import dask_driver
from oocdl.engines.engine import resolve
from oocdl.errors import ResourceError
from oocdl.events import Listener
from oocdl.planning.machine import Crew
from oocdl.runtime.cluster import crew, room
from oocdl.runtime.cluster.cluster_session import ClusterSession
from oocdl.runtime.lost import WorkersLost
from oocdl.runtime.session import Held


@dataclass(frozen=True, eq=False)
class Workers:
    """Workers of a Dask client."""

    client: Any
    wait_seconds: float
    silent_seconds: float
    say: Callable[[str], None]
    mustered: list[Any] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)
    """Sessions that were made; the last may have another client, of a restarted scheduler."""

    def muster(self, memory_bytes: int | None, engine: str) -> tuple[Crew, int]:
        """Wait for workers that load the engine; returns them, and the budget of each, or ResourceError."""
        try:
            recruits, refusals = crew.gather(self.client, self.wait_seconds, self.say, engine=resolve(engine))
        except WorkersLost as lost:
            raise ResourceError(f"no workers can be had: {lost}") from lost
        if not recruits:
            raise next(iter(refusals.values()))
        budget_bytes = room.budget_bytes(recruits) if memory_bytes is None else memory_bytes
        recruits = room.check_limits(recruits, budget_bytes)
        self.mustered[:] = recruits
        count = max(len(recruits), crew.expected(self.client))
        own_bytes, threads = max(one.own_bytes for one in recruits), min(one.threads for one in recruits)
        return Crew(threads, count, len(recruits), own_bytes), budget_bytes

    def machines(self) -> list[Mapping[str, str]]:
        return [one.machine for one in self.mustered]

    def session(self, **given: Any) -> Held:
        waits: dict[str, Any] = {"wait_seconds": self.wait_seconds, "silent_seconds": self.silent_seconds}
        planned = tuple(self.mustered)
        made = ClusterSession(client=self.client, planned=planned, say=self.say, **waits, **given)
        self.sessions.append(made)
        return made

    def page(
        self, run: Path, say: Callable[[str], None], says_address: bool
    ) -> AbstractContextManager[Listener]:
        return dask_driver.Showing(lambda: [self, *self.sessions][-1].client, run, say, says_address)
