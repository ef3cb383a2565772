"""The passes that make up a step, and the plans that they run.

A pass is one forward and backward through the network, for one batch. With ``accumulate=k`` a step
is k of them: all but the last only add up gradients, the last one makes the update too. A pass finds
the sums of those before among the chunks that go from pass to pass; for the first of a step they are
zeros. The last step of an epoch may have fewer passes, and its last pass fewer samples.

A validation is a series of forward passes between two steps, over samples that no step has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from oocdl.config import Settings
from oocdl.errors import InputError
from oocdl.ops.param_groups import step_scalars
from oocdl.ops.update_rules import SHARE
from oocdl.storage.dataset.dataset import batches, held_out

MAIN, RAGGED = "main", "ragged"
"""Ids of the passes that make an update: of a full batch, and of the smaller one that may end an epoch."""
FIRST, NEXT = "first", "next"
"""Ids of the passes that others of their step follow: the first, and all between it and the last."""
SINGLE_PASS = "alone"
"""Id of the last pass of an epoch where it is a step of its own, although other steps have several."""
VALIDATION, VALIDATION_RAGGED = "validation", "validation_ragged"
"""Ids of the passes of a validation: of a full batch, and of the smaller one that may end it."""


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
    """Samples of the dataset, those that are held out included."""
    settings: Settings
    further_samples: int = 0
    """Samples of the validation dataset; 0 if there is none."""

    @cached_property
    def validated(self) -> Sequence[int]:
        """Rows to validate on, ascending, of their dataset. Raises InputError for rows that do not exist."""
        asked = self.settings.held_out
        if asked is None:
            return range(self.further_samples)
        if isinstance(asked, float):
            rows = held_out(self.samples, asked, self.settings.seed).tolist()
        else:
            rows = asked
            if rows[-1] >= self.samples:
                raise InputError(f"validation has index {rows[-1]}, the dataset has {self.samples} samples")
        if len(rows) >= self.samples:
            raise InputError(
                f"validation holds out all of the {self.samples} samples: none is left to train on"
            )
        return tuple(rows)

    @cached_property
    def trained(self) -> Sequence[int]:
        """Rows of the dataset to train on, ascending."""
        if self.settings.held_out is None:
            return range(self.samples)
        apart = set(self.validated)
        return tuple(row for row in range(self.samples) if row not in apart)

    @property
    def passes_per_epoch(self) -> int:
        """Batches of an epoch, the ragged last one included."""
        return -(-len(self.trained) // self.settings.batch_size)

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
        return len(self.trained) % self.settings.batch_size

    @property
    def validation_batch(self) -> int:
        """Samples of a full batch of a validation; 0 if there is none."""
        return min(self.settings.batch_size, len(self.validated))

    @property
    def validation_passes(self) -> list[tuple[str, PassInfo]]:
        """For each pass of a validation, the id of its plan and what differs from pass to pass."""
        rows, size = self.validated, self.validation_batch
        starts = range(0, len(rows), size) if size else ()
        batches = [tuple(rows[start : start + size]) for start in starts]
        return [
            (VALIDATION if len(batch) == size else VALIDATION_RAGGED, PassInfo(0, self.settings.seed, batch))
            for batch in batches
        ]

    def validates_after(self, done: int) -> bool:
        """Whether a validation follows once ``done`` steps are done."""
        settings = self.settings
        if not self.validated:
            return False
        if done == self.total_steps:
            return True
        if settings.validation_steps is not None:
            return done % settings.validation_steps == 0
        epochs, left = divmod(done, self.steps_per_epoch)
        freq = settings.validation_freq
        return left == 0 and (epochs % freq == 0 if isinstance(freq, int) else epochs in freq)

    def passes_until(self, step: int) -> int:
        """Passes of all steps before ``step``."""
        epoch, done = divmod(step, self.steps_per_epoch)
        return epoch * self.passes_per_epoch + done * self.passes

    def steps_from(self, number: int) -> Iterator[Step]:
        """The steps of the run from ``number`` on."""
        settings, size, trained = self.settings, self.passes, self.trained
        while number < self.total_steps:
            epoch, skipped = divmod(number, self.steps_per_epoch)
            found = batches(len(trained), settings.batch_size, settings.shuffle, settings.seed, epoch)
            found = islice(found, skipped * size, None)
            for first in range(skipped * size, self.passes_per_epoch, size):
                if number < self.total_steps:
                    rows = tuple(tuple(trained[at] for at in indices) for indices in islice(found, size))
                    yield Step(number, epoch, epoch * self.passes_per_epoch + first, rows)
                    number += 1

    def passes_of(self, step: Step) -> list[tuple[str, PassInfo]]:
        """For each pass of a step, the id of its plan and what differs from pass to pass."""
        settings, count = self.settings, len(step.batches)
        numbers = step_scalars(settings.optimizer, settings.param_groups, settings.ema, step.number)
        numbers |= {SHARE: 1 / count} if self.passes > 1 else {}
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
