"""Makes the Dask tasks of a pass: the segments of all members, with the edges between them.

A task runs what its member does of some layers. Arrays go from member to member (``transfers``); a task hands
on nothing but that it is done, and the last one of a member hands the driver its report.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from oocdl.planning.hosts.segments import Outline, Segment, segments_of
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_key import DaskKey, TaskKey, TaskKind, dask_key
from oocdl.runtime.cluster import worker_tasks
from oocdl.runtime.cluster.carried import carried
from oocdl.runtime.cluster.scheduler_side import await_packed
from oocdl.runtime.dask_private import Task, TaskRef

MEASURED_PASS = 2
"""The pass of a kind by whose seconds it is cut: the first one compiles programs, too."""


@dataclass(eq=False)
class PassTasks:
    """The tasks of all passes of one kind. They are cut anew once it is known how long a pass takes."""

    outline: Outline
    is_carried: bool = False
    """Whether the scheduler lacks oocdl: it then gets tasks that it need not understand."""
    segments: list[Segment] = field(init=False)
    keys: dict[tuple[int, int], TaskKey] = field(init=False)
    """Member and number of each segment -> the key of its task, in order."""
    passes: int = 0
    """Number of passes so far."""

    def __post_init__(self) -> None:
        self._cut(None)

    @property
    def layers(self) -> list[str]:
        """Names of the layers of segments, each once."""
        return list(dict.fromkeys(key.layer for key in self.keys.values()))

    @property
    def ends(self) -> list[TaskKey]:
        """The keys of the last task of each member."""
        return list({key.number: key for key in self.keys.values()}.values())

    def note(self, seconds: float) -> bool:
        """Note how long a pass took; return whether the next ones are cut anew."""
        self.passes += 1
        if self.passes == MEASURED_PASS:
            self._cut(seconds)
        return self.passes == MEASURED_PASS

    def of_pass(self, pass_name: str, run_id: str, facts: tuple[str, PassInfo, bool]) -> dict[DaskKey, Task]:
        """Return the tasks of one pass; ``facts``: plan id, pass, and whether it starts a step."""
        names = {place: dask_key(key, pass_name) for place, key in self.keys.items()}
        begin, ends, tasks = worker_tasks.Begin(pass_name, *facts), {*self.ends}, {}
        for one in self.segments:
            name, is_last = names[one.member, one.number], self.keys[one.member, one.number] in ends
            arguments = run_id, one.last_group, None if one.number else begin, is_last
            call: tuple[Any, ...] = (worker_tasks.run_segment, *arguments)
            if self.is_carried:
                call = carried(await_packed), pickle.dumps((worker_tasks.run_segment, arguments))
            tasks[name] = Task(name, *call, *(TaskRef(names[before]) for before in one.after))
        return tasks

    def _cut(self, seconds: float | None) -> None:
        self.segments, self.keys = segments_of(self.outline, seconds), {}
        for one in self.segments:
            first, last = (self.outline.groups[group] for group in (one.first_group, one.last_group))
            layers = first if first == last else f"{first} to {last}"
            self.keys[one.member, one.number] = TaskKey(TaskKind.SEGMENT, layers, str(one.number), one.member)
