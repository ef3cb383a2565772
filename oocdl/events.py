"""Events of a run and of a search, as frozen data.

``fit`` and ``search`` call every listener with each of their events, and print nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

VALIDATION_PREFIX = "val_"
"""The names of a validation's results in a row begin with this, as in Keras."""


class Stop(Exception):
    """A listener raises this to end a run: what is done is committed, and the run is finished with that.

    All listeners get the event first. ``fit`` returns the run; a later call with the same options trains on,
    unless a listener stops it again. ``restored`` is the kept step whose weights the run then predicts with;
    None: those of its last step.
    """

    def __init__(self, text: str, restored: int | None = None) -> None:
        super().__init__(text)
        self.restored = restored


class Acting:
    """A listener that a run asks how to go on, after each step that it was told of.

    Answers depend on its settings and on the history alone, so a resumed run makes the same bits.
    """

    kept: tuple[int, ...] | None = None
    """Steps whose versions the run keeps, the best first; None: it leaves that to others."""
    restored: int | None = None
    """Kept step whose weights the run predicts with once its last step is done; None: those of that step."""

    def check(self, results: Collection[str]) -> None:
        """Raise InputError before a run begins whose validations have no such ``results`` as it looks at.

        Results of a single class, which stand behind those as "/1", are not among them.
        """

    def versions(self, validations: int) -> int:
        """Return how many versions it keeps at most in a run of so many validations."""
        return 0

    def __call__(self, event: Event) -> None:
        """Take one event."""

    def rate(self, lr: float) -> float:
        """Return the learning rate of the next step, where its schedule says ``lr``."""
        return lr


@dataclass(frozen=True)
class RunStarted:
    """The run is planned, and its first step comes next."""

    plan: Any
    """The ``Plan``."""
    workdir: str
    steps: int
    """Steps of the whole run."""
    done: int
    """Steps that an earlier process has committed."""
    notes: tuple[str, ...] = ()
    """Notes for the user before the first step, such as on chunks of the dataset that are not stored."""


@dataclass(frozen=True)
class StepDone:
    """A step (one optimizer update) is done."""

    row: Mapping[str, Any]
    """The row of ``Run.history``."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Times of the tasks of a whole pass in one process."""

    plan_id: str
    """The kind of the pass: a key of ``Plan.kinds``."""
    numbers: npt.NDArray[np.int32]
    """Indexes of the tasks that ran there in ``Plan.kinds[plan_id].graph.calls``. Shape (tasks,)."""
    times: npt.NDArray[np.float64]
    """Times at which each task began, had its memory, had its inputs, began to compute, had computed, and was
    done, in seconds since 1970. Shape (tasks, 6)."""
    threads: npt.NDArray[np.uint8]
    """Number of the thread that each ran on. Shape (tasks,)."""


@dataclass(frozen=True, kw_only=True)
class ProcessLook:
    """The state of a training process at one moment, in bytes and seconds; totals count from its start."""

    name: str
    threads: int
    """Programs that it runs at once."""
    processor_seconds: float
    """Total of all its threads."""
    process_bytes: int
    """Memory that it has by the kernel's count, pages of files left out."""
    base_bytes: int
    """Part of the budget that the process takes before any array."""
    reserved_bytes: int
    """Bytes promised to tasks that read or run."""
    tier_bytes: int
    """Bytes of chunks in the RAM tier."""
    spilled_bytes: int
    """Bytes of chunks in the spill on disk."""
    read_bytes: int
    """Total read from the spill."""
    written_bytes: int
    """Total written to the spill."""
    received_bytes: int = 0
    """Total received from other processes."""
    busy_seconds: float = 0.0
    """Total busy time of all processors of its machine; 0 where the machine does not tell."""
    idle_seconds: float = 0.0
    """Total idle time of the same processors."""
    phases: bytes
    """For each task of the pass that runs (``Plan.kinds[plan_id].graph.calls``): 0 it has not begun, 1 it
    waits for memory or reads, 2 it computes or waits to, 3 it writes, 4 it is done. Of another process's
    tasks 0."""
    last_pass: PassTimes | None = None
    """The times of the last whole pass; None before there is one."""


@dataclass(frozen=True, kw_only=True)
class StepRunning:
    """The state of the running step: about once a second; of shorter steps, after some of them.

    Comes from the thread that called ``fit``, as all events do, so a listener that takes long delays the run.
    """

    at_seconds: float
    """Time of the event, in seconds since 1970."""
    step: int
    """Number of the step, from 1."""
    pass_number: int
    """Number of the pass in its step, from 1."""
    passes: int
    plan_id: str
    """The kind of the pass: a key of ``Plan.kinds``."""
    processes: tuple[ProcessLook, ...]


@dataclass(frozen=True)
class Committed:
    """Everything up to ``step`` is durable."""

    step: int
    samples: tuple[int, ...] = ()
    """Dataset rows of the last pass of that step, of which outputs are kept; empty if it was done before."""


@dataclass(frozen=True)
class RunFinished:
    """No step is left; ``seconds`` are those of this call of ``fit``."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class RunStopped:
    """Something has stopped the run from outside; what was done is committed."""

    reason: str
    """The signal, such as "SIGTERM", or the exception."""
    workdir: str
    done: int
    """Steps that are committed."""


@dataclass(frozen=True)
class TrialDone:
    """A trial of a search has trained to the total of a rung, or has failed."""

    row: Mapping[str, Any]
    """The row of ``Search.table``."""
    done: int
    """Trials that train no further, those of earlier calls included."""
    of: int
    """All trials."""


@dataclass(frozen=True)
class Notice:
    """A line for the user: workers are awaited, one is silent, some are lost."""

    text: str


@dataclass(frozen=True)
class WorkersChanged:
    """Workers of a cluster were lost, or have come: the run goes on with others, from its last commit."""

    reason: str
    members: int
    """Workers that take part from now on."""
    done: int
    """Steps that are committed; ``StepDone`` of later ones comes again."""


Event = RunStarted | StepRunning | StepDone | Committed | RunFinished | RunStopped | Notice | WorkersChanged
Listener = Callable[[Event], None]

SearchEvent = TrialDone | Notice
SearchListener = Callable[[SearchEvent], None]
