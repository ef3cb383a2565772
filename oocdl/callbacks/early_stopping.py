"""``EarlyStopping``: ends a run once its validations get no better."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass

from oocdl.callbacks.monitored import Monitored
from oocdl.errors import InputError, ModelWarning
from oocdl.events import RunStarted, Stop


@dataclass(eq=False)
class EarlyStopping(Monitored):
    """Ends a run after ``patience`` validations in a row that were no better than the best one before them.

    A result is better only by more than ``min_delta``. ``mode`` is "min", "max", or "auto": losses and errors
    are to be small, all other results large. With ``restore_best_weights`` the run keeps the version of its
    best validation, and once it is ended, predicts, evaluates and exports with those weights; else with those
    of its last step. The names are Keras's. The decision depends on the history alone, so a run that was
    killed ends at the same step, with the same bits.

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
        if self.patience < 1:
            raise InputError(f"patience is at least 1, got {self.patience}")

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
            if self.is_better(self.score(value), best):
                best, best_step, waited = self.score(value), step, 0
        if self.restore_best_weights:
            if best_step is not None and not self.has_version(best_step):
                lost = f"; earlier calls had no EarlyStopping, and did not keep the best version, {best_step}"
                best_step = None
            self.kept = () if best_step is None else (best_step,)
        if waited >= self.patience:
            raise Stop(
                f"{self.monitor} was no better than {self.sign * best:.4g} for {waited} validations{lost}",
                best_step if self.restore_best_weights else None,
            )
