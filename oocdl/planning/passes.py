"""The passes that make up a step, and the plans that they run.

A pass is one forward and backward through the network, for one batch. With ``accumulate=k`` a step
is k of them: all but the last only add up gradients, the last one makes the update too. A pass finds
the sums of those before among the chunks that go from pass to pass; for the first of a step they are
zeros. The last step of an epoch may have fewer passes, and its last pass fewer samples.

Samples of a pass have one size. Where samples differ in size there is a plan for each, whose id ends in it.

A validation is a series of forward passes between two steps, over samples that no step has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from oocdl.augmentation.crop import crop_of
from oocdl.config import Settings
from oocdl.errors import InputError
from oocdl.ops.param_groups import rates_of, step_scalars
from oocdl.ops.schedules import Rate, lasts_a_run
from oocdl.ops.update_rules import SHARE
from oocdl.storage.dataset.sampling import held_out, permutation

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
class Kind:
    """A kind of passes: those that run one plan."""

    role: str
    label: str
    """Label of the size of its samples; empty for the main size."""
    batch: int
    """Number of samples."""
    is_rest: bool = False
    """Whether they are what is left of full batches."""


@dataclass(frozen=True)
class Course:
    """All steps of a run."""

    samples: int
    """Samples of the dataset, those that are held out included."""
    settings: Settings
    further_samples: int = 0
    """Samples of the validation dataset; 0 if there is none."""
    labels: Sequence[str] = ()
    """The label of each sample's size; empty where all have one size."""
    further_labels: Sequence[str] = ()
    """Those of the samples of the validation dataset."""

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
    def trained_labels(self) -> Sequence[str]:
        """The label of each sample's size as it is trained on: crops have one size."""
        return () if crop_of(self.settings.augment) else self.labels

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Label of a size -> samples of it that are trained on."""
        return _counts(self.trained, self.trained_labels)

    @property
    def passes_per_epoch(self) -> int:
        """Batches of an epoch, smaller ones included."""
        return sum(-(-count // self.settings.batch_size) for count in self.counts.values())

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
    def falling_rate(self) -> Rate | None:
        """The learning rate if it is a schedule that falls until the end of the run; else None."""
        rate = self.settings.optimizer.lr
        return rate if lasts_a_run(rate, self.total_steps) else None

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of passes of the steps, by plan id; the first is the main one."""
        roles = [MAIN]
        if self.passes > 1:
            alone = self.passes_per_epoch % self.passes == 1
            roles += [FIRST, *([NEXT] if self.passes > 2 else []), *([SINGLE_PASS] if alone else [])]
        found = _kinds(roles, self.counts, self.settings.batch_size)
        if self.trained_labels:
            return found
        # Where all samples have one size, the smaller batch is the last of its epoch.
        left = any(kind.is_rest for kind in found.values())
        ends = (MAIN, SINGLE_PASS)
        return {
            name.partition("/")[0]: kind
            for name, kind in found.items()
            if (kind.role in ends if kind.is_rest else not left or kind.role != SINGLE_PASS)
        }

    @cached_property
    def validation_kinds(self) -> Mapping[str, Kind]:
        """The kinds of passes of a validation, by plan id."""
        counts = _counts(self.validated, self._validation_labels)
        return _kinds([VALIDATION], counts, self.settings.batch_size)

    @property
    def _validation_labels(self) -> Sequence[str]:
        return self.further_labels if self.settings.held_out is None else self.labels

    @cached_property
    def validation_passes(self) -> list[tuple[str, PassInfo]]:
        """For each pass of a validation, the id of its plan and what differs from pass to pass."""
        labels, seed = self._validation_labels, self.settings.seed
        ids = _ids(self.validation_kinds)
        found = by_size(self.validated, labels, self.settings.batch_size)
        return [(ids[VALIDATION, _label(labels, rows), len(rows)], PassInfo(0, seed, rows)) for rows in found]

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

    @property
    def validations(self) -> int:
        """The most validations that the run may have."""
        freq, every = self.settings.validation_freq, self.settings.validation_steps
        if every is None:
            if not isinstance(freq, int):
                return len(set(freq)) + 1
            every = self.steps_per_epoch * freq
        return -(-self.total_steps // every)

    def passes_until(self, step: int) -> int:
        """Passes of all steps before ``step``."""
        epoch, done = divmod(step, self.steps_per_epoch)
        return epoch * self.passes_per_epoch + done * self.passes

    def steps_from(self, number: int) -> Iterator[Step]:
        """The steps of the run from ``number`` on."""
        settings, size, trained = self.settings, self.passes, self.trained
        count = len(trained)
        while number < self.total_steps:
            epoch, skipped = divmod(number, self.steps_per_epoch)
            order = permutation(settings.seed, epoch, count) if settings.shuffle else range(count)
            found = by_size((trained[int(at)] for at in order), self.trained_labels, settings.batch_size)
            batches = islice(found, skipped * size, None)
            for first in range(skipped * size, self.passes_per_epoch, size):
                if number < self.total_steps:
                    rows = tuple(islice(batches, size))
                    yield Step(number, epoch, epoch * self.passes_per_epoch + first, rows)
                    number += 1

    def passes_of(
        self, step: Step, rate: Callable[[float], float] = lambda lr: lr
    ) -> list[tuple[str, PassInfo]]:
        """For each pass of a step, the id of its plan and what differs from pass to pass.

        ``rate`` makes learning rates of those of the schedule.
        """
        settings, count = self.settings, len(step.batches)
        numbers = step_scalars(settings.optimizer, settings.param_groups, settings.ema, step.number)
        numbers |= {SHARE: 1 / count} if self.passes > 1 else {}
        numbers |= {name: rate(lr) for name, lr in rates_of(numbers).items()}
        found = []
        for index, rows in enumerate(step.batches):
            role = (NEXT if index else FIRST) if index < count - 1 else MAIN
            role = SINGLE_PASS if self.passes > count == 1 else role
            plan_id = self._ids[role, _label(self.trained_labels, rows), len(rows)]
            found.append((plan_id, PassInfo(step.first_pass + index, settings.seed, rows, numbers)))
        return found

    @cached_property
    def _ids(self) -> Mapping[tuple[str, str, int], str]:
        return _ids(self.kinds)


def by_size(rows: Iterable[int], labels: Sequence[str], size: int) -> Iterator[tuple[int, ...]]:
    """Yield batches of rows of one size each, as soon as they are full; smaller ones at the end.

    These come in the order in which their sizes first appeared. Without labels all have one size.

    >>> list(by_size([3, 0, 2, 1, 4], ["a", "a", "b", "b", "a"], 2))
    [(3, 2), (0, 1), (4,)]
    """
    waiting: dict[str, list[int]] = {}
    for row in rows:
        batch = waiting.setdefault(labels[row] if labels else "", [])
        batch.append(row)
        if len(batch) == size:
            yield tuple(batch)
            batch.clear()
    yield from (tuple(batch) for batch in waiting.values() if batch)


def role_of(plan_id: str) -> str:
    """Return the role of a kind of passes in its step: its id without size and batch.

    >>> role_of("first@96x112x80/2"), role_of("ragged")
    ('first', 'main')
    """
    base = plan_id.partition("@")[0].partition("/")[0]
    return {RAGGED: MAIN, VALIDATION_RAGGED: VALIDATION}.get(base, base)


def _label(labels: Sequence[str], rows: Sequence[int]) -> str:
    return labels[rows[0]] if labels else ""


def _counts(rows: Sequence[int], labels: Sequence[str]) -> Mapping[str, int]:
    found = Counter(labels[row] for row in rows) if labels else {"": len(rows)} if rows else {}
    return dict(sorted(found.items()))  # the main size, whose label is empty, first


def _kinds(roles: Sequence[str], counts: Mapping[str, int], batch_size: int) -> Mapping[str, Kind]:
    """Return kinds of passes by id: for each size a full batch, or all samples, and what is left."""
    found = {}
    for label, count in counts.items():
        full, rest = min(batch_size, count), count % batch_size if count > batch_size else 0
        for role in roles:
            name = f"{role}@{label}" if label else role
            found[name] = Kind(role, label, full)
            if rest:
                usual = {MAIN: RAGGED, VALIDATION: VALIDATION_RAGGED}.get(name)
                found[usual or f"{name}/{rest}"] = Kind(role, label, rest, is_rest=True)
    return found


def _ids(kinds: Mapping[str, Kind]) -> Mapping[tuple[str, str, int], str]:
    return {(kind.role, kind.label, kind.batch): name for name, kind in kinds.items()}
