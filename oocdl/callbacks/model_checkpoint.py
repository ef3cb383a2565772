"""``ModelCheckpoint``: keeps the best versions of a run."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from oocdl.callbacks.monitored import Monitored
from oocdl.errors import InputError
from oocdl.events import RunStarted


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
    save_top_k: int = 1
    save_last: bool = True
    every_n_epochs: int = 1
    _steps_per_epoch: int = field(default=1, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save_top_k < -1 or self.every_n_epochs < 1:
            raise InputError(
                f"save_top_k is at least -1, every_n_epochs at least 1, got {self.save_top_k} and "
                f"{self.every_n_epochs}"
            )
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
