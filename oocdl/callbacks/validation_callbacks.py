"""Callbacks that act upon the results of validations: end a run, keep versions, lower the learning rate."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from numbers import Integral, Real
from typing import Any, Literal

from oocdl.callbacks.committed_rows import earlier_rows
from oocdl.errors import InputError, ModelWarning
from oocdl.events import VALIDATION_PREFIX, Acting, Event, RunStarted, StepDone, Stop, WorkersChanged
from oocdl.storage.run.run_store import RunStore

LESS_IS_BETTER = frozenset({"loss", "mae", "rmse"})
"""Results that are better where they are smaller."""


def _check(kind: Any, least: int, **values: Any) -> None:
    """Raise InputError for a value that is no number of a kind, or too small."""
    for name, value in values.items():
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value < inf:
            what = "whole number" if kind is Integral else "number"
            raise InputError(f"{name} is a {what} of at least {least}, got {value!r}")


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
        if not isinstance(self.monitor, str) or not self.monitor.startswith(VALIDATION_PREFIX):
            wanted = "a result of validations, such as 'val_loss'"
            raise InputError(f"monitor names {wanted}, got {self.monitor!r}")
        if self.mode not in ("auto", "min", "max"):
            raise InputError(f"mode must be 'auto', 'min' or 'max', got {self.mode!r}")
        _check(Real, 0, min_delta=self.min_delta)

    @property
    def sign(self) -> float:
        """The factor that makes better results larger: 1 or -1."""
        # "val_loss/OUTPUT", "val_OUTPUT/mae", "val_dice/1"
        parts = self.monitor.removeprefix(VALIDATION_PREFIX).split("/")
        is_less = not LESS_IS_BETTER.isdisjoint(parts) if self.mode == "auto" else self.mode == "min"
        return -1.0 if is_less else 1.0

    def check(self, results: Collection[str]) -> None:
        """Raise InputError unless ``monitor`` is one of these."""
        if not results:
            raise InputError(f"{type(self).__name__} looks at validations; pass validation=")
        if self.monitor not in results:
            metric = re.sub(r"/\d+$", "", self.monitor)
            near = [name for name in results if re.sub(r"/\d+$", "", name) in (name, metric)]
            raise InputError(f"there is no '{self.monitor}' to monitor, but {', '.join(near)}")

    def __call__(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted(done=done):
                manifest = RunStore.open(event.workdir).current() if done else None
                self._kept_before = frozenset(manifest.meta.get("checkpoints", ()) if manifest else ())
                self.seen, self.kept, self.restored, self._done = {}, None, None, done
                self.started(event)
                self._look(earlier_rows(event))
            case StepDone(row):
                self._look([row])
            case WorkersChanged(done=done):
                self.seen = {step: value for step, value in self.seen.items() if step <= done}
                with suppress(Stop):  # what is left did not end the run before
                    self.decide()

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

    def _look(self, rows: Iterable[Mapping[str, Any]]) -> None:
        before = len(self.seen)
        for row in rows:
            results = [name for name in row if name.startswith(VALIDATION_PREFIX)]
            if results and self.monitor not in row:
                old = f" at step {row['step']}, which is done: choose another workdir, or resume='restart'"
                known = ", ".join(results) + (old if row["step"] <= self._done else "")
                raise InputError(f"there is no '{self.monitor}' to monitor, but {known}")
            if results:
                self.seen[row["step"]] = float(row[self.monitor])
        if len(self.seen) > before:
            self.decide()


@dataclass(eq=False)
class EarlyStopping(Monitored):
    """Ends a run after ``patience`` validations in a row that were no better than the best one before them.

    A result is better only by more than ``min_delta``. ``mode`` is "min", "max", or "auto": losses and errors
    are to be small, all other results large. With ``restore_best_weights`` the run keeps the version of its
    best validation, and once it is ended, here or by its last step, predicts, evaluates and exports with
    those weights; else with those of its last step. The names are Keras's. The decision depends on the
    history alone, so a run that was killed ends at the same step, with the same bits.

    Warns of a learning rate whose schedule is as long as the run. Raises InputError if ``monitor`` is no
    result of a validation, such as "val_loss" or "val_dice".

    >>> stop = EarlyStopping(monitor="val_dice", patience=5)
    >>> run = oocdl.fit(model, data, validation=0.2, metrics="dice", callbacks=[stop])  # doctest: +SKIP
    """

    _: KW_ONLY
    patience: int = 10
    restore_best_weights: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(Integral, 1, patience=self.patience)

    def versions(self, validations: int) -> int:
        """Return one, the best, if it is restored."""
        return int(self.restore_best_weights)

    def started(self, event: RunStarted) -> None:
        """Warn of a schedule that a run that ends early does not get to the end of."""
        if rate := event.plan.course.falling_rate:
            warnings.warn(
                f"EarlyStopping may end the run before the learning rate has fallen: {rate} lasts until its "
                "end; take a constant rate, or oocdl.callbacks.ReduceLROnPlateau",
                ModelWarning,
                stacklevel=2,
            )

    def decide(self) -> None:
        """Raise Stop after too many results that were no better."""
        best, best_step, waited, lost = float("-inf"), None, 0, ""
        for step, value in self.seen.items():
            waited += 1
            if self.score(value) > best + self.min_delta:
                best, best_step, waited = self.score(value), step, 0
        if self.restore_best_weights:
            if best_step is not None and not self.has_version(best_step):
                lost = f"; earlier calls had no EarlyStopping, and did not keep the best version, {best_step}"
                best_step = None
            self.kept = () if best_step is None else (best_step,)
            self.restored = best_step
        if waited >= self.patience:
            raise Stop(
                f"{self.monitor} was no better than {self.sign * best:.4g} for {waited} validations{lost}",
                self.restored,
            )


@dataclass(eq=False)
class ModelCheckpoint(Monitored):
    """Keeps the ``save_top_k`` best versions of a run beside its last one; -1 keeps that of each validation.

    Among equal results the earlier is the better one, and NaN is the worst. Only validations after each
    ``every_n_epochs``-th epoch count, and of those before a call the ones whose versions the run has. A kept
    version has weights and state, and takes as much disk space as the run without it. ``Run.checkpoints``
    lists them, ``Run.best`` is the best; ``predict``, ``evaluate``, ``export`` and ``load_into`` take
    ``which="best"`` or a step. The names are Lightning's. A run always keeps its last version, so
    ``save_last`` is True.

    Raises InputError if ``monitor`` is no result of a validation, such as "val_loss" or "val_dice".

    >>> best = ModelCheckpoint(monitor="val_dice", save_top_k=3)
    >>> run = oocdl.fit(model, data, validation=0.2, metrics="dice", callbacks=[best])  # doctest: +SKIP
    """

    _: KW_ONLY
    min_delta: float = field(default=0.0, init=False, repr=False)
    save_top_k: int = 1
    save_last: bool = True
    every_n_epochs: int = 1
    _steps_per_epoch: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(Integral, -1, save_top_k=self.save_top_k)
        _check(Integral, 1, every_n_epochs=self.every_n_epochs)
        if not self.save_last:
            raise InputError("a run always keeps its last version; leave save_last out")

    def versions(self, validations: int) -> int:
        """Return ``save_top_k``, or the number of validations."""
        return validations if self.save_top_k < 0 else min(self.save_top_k, validations)

    def started(self, event: RunStarted) -> None:
        """Take the length of an epoch."""
        self._steps_per_epoch, self.kept = event.plan.course.steps_per_epoch, ()

    def decide(self) -> None:
        """Choose the steps whose versions are kept."""
        every = self._steps_per_epoch * self.every_n_epochs
        counted = [step for step in self.seen if step % every == 0 or self.every_n_epochs == 1]
        counted = [step for step in counted if self.has_version(step)]
        ranked = sorted(counted, key=lambda step: (-self.score(self.seen[step]), step))
        self.kept = tuple(ranked if self.save_top_k < 0 else ranked[: self.save_top_k])


@dataclass(eq=False)
class ReduceLROnPlateau(Monitored):
    """Multiplies the learning rate by ``factor`` after ``patience`` validations that were no better.

    A result is better only by more than ``min_delta``. ``mode`` is "min", "max", or "auto": losses and errors
    are to be small, all other results large. After a reduction, ``cooldown`` validations are not counted.
    The rate gets no lower than ``min_lr``. Names, defaults and counting are Keras's; a schedule, if there is
    one, is multiplied. Factors depend on the history alone, so a run that was killed goes on with the same
    bits.

    Raises InputError if ``monitor`` is no result of a validation, such as "val_loss" or "val_dice".

    >>> slower = ReduceLROnPlateau(factor=0.5, patience=3)
    >>> run = oocdl.fit(model, data, lr=0.01, validation=0.2, callbacks=[slower])  # doctest: +SKIP
    """

    min_delta: float = 1e-4
    _: KW_ONLY
    factor: float = 0.1
    patience: int = 10
    cooldown: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(Integral, 1, patience=self.patience)
        _check(Integral, 0, cooldown=self.cooldown)
        _check(Real, 0, factor=self.factor, min_lr=self.min_lr)
        if not 0 < self.factor < 1:
            raise InputError(f"factor is between 0 and 1, got {self.factor}")

    def rate(self, lr: float) -> float:
        """Return the learning rate of the next step, where its schedule says ``lr``."""
        return max(lr * self.factor ** self._reductions(), min(lr, self.min_lr))

    def _reductions(self) -> int:
        best, waited, cooling, count = float("-inf"), 0, 0, 0
        for value in self.seen.values():
            if cooling:
                cooling, waited = cooling - 1, 0
            if self.score(value) > best + self.min_delta:
                best, waited = self.score(value), 0
            elif not cooling:
                waited += 1
                if waited >= self.patience:
                    count, waited, cooling = count + 1, 0, self.cooldown
        return count
