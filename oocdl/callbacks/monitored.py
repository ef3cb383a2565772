"""What callbacks have in common that act upon the results of validations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from oocdl.errors import InputError
from oocdl.events import VALIDATION_PREFIX, Acting, Event, RunStarted, StepDone, WorkersChanged
from oocdl.storage.run.run_store import RunStore

LESS_IS_BETTER = frozenset({"loss", "mae", "rmse"})
"""Results that are better where they are smaller."""


@dataclass(eq=False)
class Monitored(Acting):
    """A callback that monitors one result of each validation.

    A result is better only by more than ``min_delta``. ``mode`` is "min", "max", or "auto": losses and errors
    are to be small, all other results large. The names are Keras's.
    """

    monitor: str = "val_loss"
    _: KW_ONLY
    mode: Literal["auto", "min", "max"] = "auto"
    min_delta: float = 0.0
    seen: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    """Step -> the result after it."""
    _done: int = field(default=0, init=False, repr=False)
    _kept_before: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    """Steps before ``_done`` whose versions the run has."""

    def __post_init__(self) -> None:
        if not self.monitor.startswith(VALIDATION_PREFIX):
            raise InputError(
                f"monitor names a result of validations, such as 'val_loss', got {self.monitor!r}"
            )
        if self.mode not in ("auto", "min", "max"):
            raise InputError(f"mode must be 'auto', 'min' or 'max', got {self.mode!r}")
        if self.min_delta < 0:
            raise InputError(f"min_delta is at least 0, got {self.min_delta}")

    @property
    def sign(self) -> float:
        """The factor that makes better results larger: 1 or -1."""
        # "val_loss/OUTPUT", "val_OUTPUT/mae", "val_dice/1"
        parts = self.monitor.removeprefix(VALIDATION_PREFIX).split("/")
        is_less = not LESS_IS_BETTER.isdisjoint(parts) if self.mode == "auto" else self.mode == "min"
        return -1.0 if is_less else 1.0

    def check(self, results: Collection[str]) -> None:
        """Raise InputError unless ``monitor`` is one of these, or that of a class of one of them."""
        if not results:
            raise InputError(f"{type(self).__name__} looks at validations; pass validation=")
        if {self.monitor, re.sub(r"/\d+$", "", self.monitor)}.isdisjoint(results):
            raise InputError(f"there is no '{self.monitor}' to monitor, but {', '.join(results)}")

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted(done=done):
                store = RunStore.open(event.workdir) if done else None
                manifest = None if store is None else store.current()
                self._kept_before = frozenset(manifest.meta.get("checkpoints", ()) if manifest else ())
                self.seen, self.kept, self._done = {}, None, done
                self.started(event)
                self._look(row for row in (store.history() if store else ()) if row["step"] <= done)
            case StepDone(row):
                self._look([row])
            case WorkersChanged(done=done):
                self.seen = {step: value for step, value in self.seen.items() if step <= done}

    def started(self, event: RunStarted) -> None:
        """Take the beginning of a run."""

    def decide(self) -> None:
        """Act upon a new result."""

    def has_version(self, step: int) -> bool:
        """Whether the run has the version of a step, or may keep it: earlier calls may not have kept it."""
        return step >= self._done or step in self._kept_before

    def score(self, value: float) -> float:
        """Return a result as a number that is larger where it is better; NaN is the worst."""
        return float("-inf") if value != value else self.sign * value

    def is_better(self, value: float, best: float) -> bool:
        """Whether a score is better than the best before it."""
        return value > best + self.min_delta

    def _look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        before = len(self.seen)
        for row in rows:
            results = [name for name in row if name.startswith(VALIDATION_PREFIX)]
            if results and self.monitor not in row:
                raise InputError(f"there is no '{self.monitor}' to monitor, but {', '.join(results)}")
            if results:
                self.seen[row["step"]] = float(row[self.monitor])
        if len(self.seen) > before:
            self.decide()
