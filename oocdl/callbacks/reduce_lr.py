"""``ReduceLROnPlateau``: lowers the learning rate once validations get no better."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from oocdl.callbacks.monitored import Monitored
from oocdl.errors import InputError


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
        if not 0 < self.factor < 1 or self.patience < 1 or min(self.cooldown, self.min_lr) < 0:
            raise InputError(
                "factor is between 0 and 1, patience at least 1, cooldown and min_lr at least 0, got "
                f"{self.factor}, {self.patience}, {self.cooldown} and {self.min_lr}"
            )

    def rate(self, lr: float) -> float:
        """Return the learning rate of the next step, where its schedule says ``lr``."""
        return max(lr * self.factor ** self._reductions(), min(lr, self.min_lr))

    def _reductions(self) -> int:
        best, waited, cooling, count = float("-inf"), 0, 0, 0
        for value in self.seen.values():
            if cooling:
                cooling, waited = cooling - 1, 0
            if self.is_better(self.score(value), best):
                best, waited = self.score(value), 0
            elif not cooling:
                waited += 1
                if waited >= self.patience:
                    count, waited, cooling = count + 1, 0, self.cooldown
        return count
