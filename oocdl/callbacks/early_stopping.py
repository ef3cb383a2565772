"""``EarlyStopping``: ends a run once its validations get no better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oocdl.errors import InputError
from oocdl.events import VALIDATION_PREFIX, Event, RunStarted, StepDone, Stop, WorkersChanged
from oocdl.storage.run.run_store import RunStore

LESS_IS_BETTER = frozenset({"loss", "mae", "rmse"})
"""Results that are better where they are smaller."""


class EarlyStopping:
    """Ends a run after ``patience`` validations in a row that were no better than the best one before them.

    A result is better only by more than ``min_delta``. ``mode`` is "min", "max", or "auto": losses and errors
    are to be small, all other results large. The names are Keras's. The decision depends on the history
    alone, so a run that was killed ends at the same step, with the same bits. It keeps the weights of its
    last step.

    Raises InputError if ``monitor`` is no result of a validation, such as "val_loss" or "val_dice".

    >>> stop = EarlyStopping(monitor="val_dice", patience=5)
    >>> run = oocdl.fit(model, data, validation=0.2, metrics="dice", callbacks=[stop])  # doctest: +SKIP
    """

    def __init__(
        self, monitor: str = "val_loss", *, patience: int = 10, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        if not monitor.startswith(VALIDATION_PREFIX):
            raise InputError(f"monitor names a result of validations, such as 'val_loss', got {monitor!r}")
        if mode not in ("auto", "min", "max"):
            raise InputError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
        if patience < 1 or min_delta < 0:
            raise InputError(f"patience is at least 1, min_delta at least 0, got {patience} and {min_delta}")
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        parts = monitor.removeprefix(VALIDATION_PREFIX).split(
            "/"
        )  # "val_loss/OUTPUT", "val_OUTPUT/mae", "val_dice/1"
        is_less = not LESS_IS_BETTER.isdisjoint(parts) if mode == "auto" else mode == "min"
        self._sign = -1.0 if is_less else 1.0
        self._seen: dict[int, float] = {}
        """Step -> the result after it."""

    def __call__(self, event: Event) -> None:
        """Take one event. Raises Stop if the run is to end."""
        match event:
            case RunStarted():
                if not event.plan.course.validated:
                    raise InputError("EarlyStopping looks at validations; pass validation=")
                self._seen = {}
                rows = RunStore.open(event.workdir).history() if event.done else []
                self._look(row for row in rows if row["step"] <= event.done)
            case StepDone(row):
                self._look([row])
            case WorkersChanged(done=done):
                self._seen = {step: value for step, value in self._seen.items() if step <= done}

    def _look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows of the history; raises Stop if the last of the results is the last one to wait for."""
        before = len(self._seen)
        for row in rows:
            results = [name for name in row if name.startswith(VALIDATION_PREFIX)]
            if results and self.monitor not in row:
                raise InputError(f"there is no '{self.monitor}' to monitor, but {', '.join(results)}")
            if results:
                self._seen[row["step"]] = float(row[self.monitor])
        if len(self._seen) > before and (waited := self._waited()) >= self.patience:
            best = self._sign * max(self._sign * value for value in self._seen.values())
            raise Stop(f"{self.monitor} was no better than {best:.4g} for {waited} validations")

    def _waited(self) -> int:
        """Return the number of validations since the last that was better than all before it."""
        best, waited = float("-inf"), 0
        for value in self._seen.values():
            better = self._sign * value > best + self.min_delta
            best, waited = (self._sign * value, 0) if better else (best, waited + 1)
        return waited
