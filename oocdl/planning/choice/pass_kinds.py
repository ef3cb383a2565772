"""Compiles every kind of pass of a run: the main one first, the others with their weights cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oocdl.config import Settings
from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.heap import uncollected
from oocdl.ops import RULES
from oocdl.planning.binding import Binding
from oocdl.planning.choice.budget import compile_within
from oocdl.planning.compiler import CompiledPass, continue_step, draft_pass
from oocdl.planning.machine import Machine
from oocdl.planning.passes import (
    FIRST,
    MAIN,
    NEXT,
    RAGGED,
    SINGLE_PASS,
    VALIDATION,
    VALIDATION_RAGGED,
    Course,
)
from oocdl.planning.recipe import PassKind, Request


@uncollected()
def compile_passes(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    machine: Machine,
    course: Course,
    frozen: Mapping[str, Any],
    validation: Binding | None = None,
) -> dict[str, CompiledPass]:
    """Compile all kinds of passes of a run, by plan id.

    ``frozen`` holds the cuts of stored plans, of those that ``own_plans`` names. ``validation`` binds a
    dataset of its own for validation; None: it is done on samples of the other. BudgetError if a pass does
    not fit.
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
    validations = {plan_id: len(info.indices) for plan_id, info in course.validation_passes}
    forward = replace(request, kind=PassKind.FORWARD, binding=validation or binding)
    validated = {
        name: compiled(name, replace(forward, batch=size), main) for name, size in validations.items()
    }
    if last is PassKind.WHOLE:
        return found | validated
    first = compiled(FIRST, replace(request, kind=PassKind.EARLIER), main)
    after = {plan_id: continue_step(kind, first.sums) for plan_id, kind in found.items()}
    after[FIRST] = first
    if course.passes > 2:
        after[NEXT] = continue_step(first, first.sums)
    if course.passes_per_epoch % course.passes == 1:
        after[SINGLE_PASS] = found[RAGGED if course.ragged else MAIN]
    return after | validated


def own_plans(kinds: Mapping[str, CompiledPass]) -> dict[str, CompiledPass]:
    """Return the kinds that have a plan of their own; the others run the same plans on other chunks."""
    names = (MAIN, RAGGED, FIRST, VALIDATION, VALIDATION_RAGGED)
    return {name: kinds[name] for name in names if name in kinds}
