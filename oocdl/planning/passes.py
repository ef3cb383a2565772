"""Which passes make up a step, and the plans that they run.

A pass is one forward and backward through the network, for one batch. With ``accumulate=k`` a step
is k of them: all but the last only add up gradients, the last one makes the update too. A pass finds
the sums of those before among the chunks that go from pass to pass; for the first of a step they are
zeros. The last step of an epoch may have fewer passes, and its last pass fewer samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from oocdl.config import Settings
from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.heap import uncollected
from oocdl.ops import RULES
from oocdl.ops.optimizers import SHARE, scalars
from oocdl.planning.binding import Binding
from oocdl.planning.budget import compile_within
from oocdl.planning.compiler import CompiledPass, continue_step, draft_pass
from oocdl.planning.machine import Machine
from oocdl.planning.recipe import PassKind, Request
from oocdl.storage.dataset.dataset import batches

MAIN, RAGGED = "main", "ragged"
"""Ids of the passes that make an update: of a full batch, and of the smaller one that may end an epoch."""
FIRST, NEXT = "first", "next"
"""Ids of the passes that others of their step follow: the first, and all between it and the last."""
SINGLE_PASS = "alone"
"""Id of the last pass of an epoch where it is a step of its own, although other steps have several."""


@dataclass(frozen=True)
class PassInfo:
    """What differs from pass to pass. Small: it travels with every task."""

    number: int
    """Which pass of the run it is, from 0; a step has one pass or several."""
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


@uncollected()
def compile_passes(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    machine: Machine,
    course: Course,
    frozen: Mapping[str, Any],
) -> dict[str, CompiledPass]:
    """Compile all kinds of passes of a run, by plan id.

    ``frozen`` holds the cuts of stored plans, of those that ``own_plans`` names. BudgetError if a pass
    does not fit.
    """

    def compiled(plan_id: str, request: Request, like: CompiledPass | None = None) -> CompiledPass:
        if like is None:
            return compile_within(draft_pass(request), settings, machine, frozen.get(plan_id))
        # Weights stay where they are: all passes of a run are split and cut in the way of its main one.
        factored = like.plan.factored
        shared = factored.graph.of_role(Role.WEIGHT, Role.STATE, Role.SUM)
        request = replace(request, factors={value.name: factored.factors[value.name] for value in shared})
        whole = machine.workers > 1 and not like.plan.cuts
        draft = replace(draft_pass(request, like.pieces), side=like.side)
        hosts = like.plan.hosts or machine.workers
        alike = replace(machine, slots=1) if whole else machine
        return compile_within(draft, settings, alike, frozen.get(plan_id), hosts)

    last = PassKind.WHOLE if course.passes == 1 else PassKind.LAST
    request = Request(
        model=model, binding=binding, settings=settings, batch=settings.batch_size, rules=RULES, kind=last
    )
    main = compiled(MAIN, request)
    found = {MAIN: main}
    if course.ragged:
        found[RAGGED] = compiled(RAGGED, replace(request, batch=course.ragged), main)
    if last is PassKind.WHOLE:
        return found
    first = compiled(FIRST, replace(request, kind=PassKind.EARLIER), main)
    after = {plan_id: continue_step(kind, first.sums) for plan_id, kind in found.items()}
    after[FIRST] = first
    if course.passes > 2:
        after[NEXT] = continue_step(first, first.sums)
    if course.passes_per_epoch % course.passes == 1:
        after[SINGLE_PASS] = found[RAGGED if course.ragged else MAIN]
    return after


def own_plans(kinds: Mapping[str, CompiledPass]) -> dict[str, CompiledPass]:
    """Those of all kinds that have a plan of their own; the others run the same plans on other chunks."""
    return {name: kinds[name] for name in (MAIN, RAGGED, FIRST) if name in kinds}
