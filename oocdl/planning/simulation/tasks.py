"""The tasks of one process of a simulated step, as its scheduler has them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from oocdl.planning.calls import Call, CombineCall, PickCall, UnitCall
from oocdl.planning.hosts.exchange import Bundle
from oocdl.planning.hosts.placement import Strip
from oocdl.planning.task_key import TaskKey

Entry = Call | Strip | Bundle | None
"""What a task does; None: it is a chunk that is there at the start, or that arrives."""


class Tasks:
    """The tasks of a process by number, as its scheduler has them; chunks that it is given are some, too."""

    def __init__(self, entries: Iterable[tuple[TaskKey, Entry]], arriving: Collection[TaskKey] = ()) -> None:
        """``entries``: the key of each task and what it does, in order; ``arriving``: what is awaited."""
        listed = list(entries)
        self.calls: Sequence[Entry] = [call for _, call in listed]
        keys = [key for key, _ in listed]
        self.number = number = {key: place for place, key in enumerate(keys)}
        self.results: list[Sequence[int]] = [(place,) for place in range(len(keys))]
        """The tasks whose chunks are what a call makes: itself, or those that pick one of several."""
        picks: dict[int, list[int]] = {}
        self.arguments: list[tuple[int, ...]] = []
        """Tasks whose results a task takes; what is given takes none."""
        for place, call in enumerate(self.calls):
            if isinstance(call, PickCall):
                picks.setdefault(number[call.source], []).append(place)
                self.arguments.append((number[call.source],))
            else:
                self.arguments.append(tuple([number[key] for key in _read_by(call)]))
        for source, places in picks.items():
            self.results[source] = sorted(places, key=self._picked)
        self.sources = [tuple(dict.fromkeys(arguments)) for arguments in self.arguments]
        self.arriving = [number[key] for key in arriving]
        self.bundles = [place for place, call in enumerate(self.calls) if isinstance(call, Bundle)]

    def _picked(self, place: int) -> int:
        call = self.calls[place]
        assert isinstance(call, PickCall)
        return call.number


def _read_by(entry: UnitCall | CombineCall | Strip | Bundle | None) -> tuple[TaskKey, ...]:
    """The keys of what a task reads."""
    if isinstance(entry, Strip):
        return (entry.source,)
    if isinstance(entry, Bundle):
        return entry.items
    return () if entry is None else entry.arguments
