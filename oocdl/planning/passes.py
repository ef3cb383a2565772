"""The passes that make up a step, and the plans that they run.

A pass is one forward and backward through the network, for one batch. With ``accumulate=k`` a step
is k of them: all but the last only add up gradients, the last one makes the update too. A pass finds
the sums of those before among the chunks that go from pass to pass; for the first of a step they are
zeros. The last step of an epoch may have fewer passes, and its last pass fewer samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from oocdl.config import Settings
from oocdl.ops.optimizers import SHARE, scalars
from oocdl.storage.dataset.dataset import batches

MAIN, RAGGED = "main", "ragged"
"""Ids of the passes that make an update: of a full batch, and of the smaller one that may end an epoch."""
FIRST, NEXT = "first", "next"
"""Ids of the passes that others of their step follow: the first, and all between it and the last."""
SINGLE_PASS = "alone"
"""Id of the last pass of an epoch where it is a step of its own, although other steps have several."""


@dataclass(frozen=True)
class PassInfo:
    """Facts that differ from pass to pass. Small: they travel with every task."""

    number: int
    """Number of the pass in the run, from 0; a step has one pass or several."""
    seed: int
    indices: tuple[int, ...] = ()
    """Dataset rows of the batch, in order."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Value of role SCALAR -> number; the learning rate is one."""


@dataclass(frozen=True)
class Step:
    """One update and the passes that make it."""

    number: int
    epoch: int
    first_pass: int
    """Number of its first pass, counted over the whole run."""
    batches: tuple[tuple[int, ...], ...]
    """Dataset rows of each pass, in order."""


@dataclass(frozen=True)
class Course:
    """All steps of a run."""

    samples: int
    settings: Settings

    @property
    def passes_per_epoch(self) -> int:
        """Batches of an epoch, the ragged last one included."""
        return -(-self.samples // self.settings.batch_size)

    @property
    def passes(self) -> int:
        """Passes of a step; the last step of an epoch may have fewer."""
        return min(self.settings.accumulate, self.passes_per_epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Updates of an epoch."""
        return -(-self.passes_per_epoch // self.passes)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        limit = self.settings.epochs * self.steps_per_epoch
        return limit if self.settings.steps is None else self.settings.steps

    @property
    def ragged(self) -> int:
        """Samples of the smaller last batch of an epoch; 0 if there is none."""
        return self.samples % self.settings.batch_size

    def passes_until(self, step: int) -> int:
        """Passes of all steps before ``step``."""
        epoch, done = divmod(step, self.steps_per_epoch)
        return epoch * self.passes_per_epoch + done * self.passes

    def steps_from(self, number: int) -> Iterator[Step]:
        """The steps of the run from ``number`` on."""
        settings, size = self.settings, self.passes
        while number < self.total_steps:
            epoch, skipped = divmod(number, self.steps_per_epoch)
            found = batches(self.samples, settings.batch_size, settings.shuffle, settings.seed, epoch)
            found = islice(found, skipped * size, None)
            for first in range(skipped * size, self.passes_per_epoch, size):
                if number < self.total_steps:
                    rows = tuple(tuple(int(at) for at in indices) for indices in islice(found, size))
                    yield Step(number, epoch, epoch * self.passes_per_epoch + first, rows)
                    number += 1

    def passes_of(self, step: Step) -> list[tuple[str, PassInfo]]:
        """For each pass of a step, the id of its plan and what differs from pass to pass."""
        settings, count = self.settings, len(step.batches)
        numbers = scalars(settings.optimizer, step.number) | ({SHARE: 1 / count} if self.passes > 1 else {})
        found = []
        for index, rows in enumerate(step.batches):
            if index < count - 1:
                plan_id = NEXT if index else FIRST
            elif self.passes > count == 1:
                plan_id = SINGLE_PASS
            else:
                plan_id = MAIN if len(rows) == settings.batch_size else RAGGED
            found.append((plan_id, PassInfo(step.first_pass + index, settings.seed, rows, numbers)))
        return found
