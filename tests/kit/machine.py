"""``fit`` and ``plan`` on a machine of chosen size, whatever this one is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import oocdl
from oocdl.config import make_settings
from oocdl.report.plan_view import Plan
from oocdl.training.call import read_call
from oocdl.training.job import Job, job_of
from oocdl.training.trainer import train

RUN = ("workdir", "resume", "replan", "scheduler", "callbacks", "progress", "trace")
"""Arguments of ``fit`` that say nothing of the job."""


@dataclass(frozen=True)
class Small:
    """What is pretended; None: as it is."""

    capacity_bytes: int | None = None
    """For arrays and programs, whatever ``memory=`` says."""
    process_bytes: int | None = None
    """The process is counted as if it always were so large, as it is not from one test to the next."""

    over_bytes: int | None = None
    """While units run the process is counted as so much larger than the guard lets it be."""

    slots: tuple[int, int] | None = None
    """Planned for so many threads of a process, and so many processes."""

    def job(self, model: str | Path, dataset: Any, **options: Any) -> Job:
        """The job of a call of ``fit``, on this machine."""
        how = {name: value for name, value in options.items() if name not in RUN}
        job = job_of(model, dataset, make_settings(**how))
        machine = job.machine
        if self.process_bytes is not None:
            nbytes = self.process_bytes
            base = nbytes + machine.reserved_bytes
            left = max(job.settings.memory_bytes - base, 1)
            sizes: Any = {"process_bytes": lambda: nbytes, "running_bytes": lambda: nbytes}
            machine = replace(machine, base_bytes=base, capacity_bytes=left, **sizes)
        if self.capacity_bytes is not None:
            machine = replace(machine, capacity_bytes=self.capacity_bytes)
        if self.slots is not None:
            machine = replace(machine, threads=self.slots[0], workers=self.slots[1])
        if self.over_bytes is not None:
            later = machine.guard().most_bytes + self.over_bytes
            machine = replace(machine, running_bytes=lambda: later)
        return replace(job, machine=machine)


THIS = Small()
"""This machine as it is."""


def fit(model: str | Path, dataset: Any, *, machine: Small, **options: Any) -> oocdl.Run:
    """``oocdl.fit`` on ``machine``."""
    how = {name: options[name] for name in RUN if name in options}
    return train(machine.job(model, dataset, **options), read_call(**how)[0])


def plan(model: str | Path, dataset: Any, *, machine: Small, **options: Any) -> Plan:
    """``oocdl.plan`` on ``machine``."""
    return machine.job(model, dataset, **options).plan()
