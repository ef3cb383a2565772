"""Contents of a simulated process: tasks by number, chunks without bytes, calls and arrivals with claims."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from oocdl.graph.ir.index import Region
from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.local_order import Work
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.task_key import TaskKey
from oocdl.storage.cache.ledger import Claim, Entry


class Chunk(Entry):
    """A chunk without its bytes, that calls have as an argument."""

    __slots__ = ("region", "spilled")
    spilled: bool

    def __init__(self, region: Region, nbytes: int, uses: tuple[int, ...], spilled: bool = False) -> None:
        super().__init__(nbytes, uses)
        self.region, self.spilled = region, spilled


@dataclass(eq=False, kw_only=True)
class Unit(Claim[Chunk]):
    """A call under way, and what it holds."""

    call: UnitCall | CombineCall
    number: int
    """Number of the task."""
    arguments: Sequence[Chunk]
    worker: int
    begun: float
    computing: float = 0.0


@dataclass(eq=False, kw_only=True)
class Arrival(Claim[Chunk]):
    """A chunk that waits for room: it has come from another process, or is a strip that is cut."""

    number: int
    """Number of the task that it ends."""
    chunk: Chunk


class Tasks:
    """The tasks of a process by number, as its scheduler has them; chunks that it is given are some, too."""

    def __init__(self, entries: Iterable[tuple[TaskKey, Work]], arriving: Collection[TaskKey] = ()) -> None:
        """``entries``: the key of each task and what it does, in order; ``arriving``: what is awaited."""
        listed = list(entries)
        self.calls: Sequence[Work] = [call for _, call in listed]
        keys = [key for key, _ in listed]
        self.number = number = {key: place for place, key in enumerate(keys)}
        self.arguments = [tuple([number[key] for key in _read_by(call)]) for call in self.calls]
        """Tasks whose results a task takes; what is given takes none."""
        self.results: list[list[int]] = [[] for _ in keys]
        """The tasks whose chunks are what a call makes: itself, or those that pick one of several."""
        for place, call in enumerate(self.calls):
            source = number[call.source] if isinstance(call, PickCall) else place
            self.results[source].append(place)
        for places in self.results:
            if len(places) > 1:
                del places[0]
        self.sources = [tuple(dict.fromkeys(arguments)) for arguments in self.arguments]
        self.arriving = [number[key] for key in arriving]
        self.bundles = [place for place, call in enumerate(self.calls) if isinstance(call, Bundle)]


def _read_by(work: Work) -> tuple[TaskKey, ...]:
    """The keys of what a task reads."""
    if isinstance(work, Strip | PickCall):
        return (work.source,)
    if isinstance(work, Bundle):
        return work.items
    return () if work is None else work.arguments
