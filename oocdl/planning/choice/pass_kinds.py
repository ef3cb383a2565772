"""Compiles every kind of pass of a run: the main one first, the others with their weights cut alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oocdl.config import Settings
from oocdl.errors import BudgetError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Region
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.heap import uncollected
from oocdl.planning.binding import Binding
from oocdl.planning.choice.budget import cut, fastest_cut, smallest_budget
from oocdl.planning.choice.host_search import fastest_over_hosts, on_hosts
from oocdl.planning.compiler import CompiledPass, Draft, Frozen, continue_step, draft_pass
from oocdl.planning.machine import Machine, check_capacity, check_device
from oocdl.planning.passes import FIRST, MAIN, NEXT, VALIDATION, Course, Kind, role_of
from oocdl.planning.recipe import PassKind, Request


@uncollected()
def compile_passes(
    model: OnnxModel,
    bindings: Mapping[str, Binding],
    settings: Settings,
    machine: Machine,
    course: Course,
    frozen: Mapping[str, Any],
    validations: Mapping[str, Binding],
) -> dict[str, CompiledPass]:
    """Compile all kinds of passes of a run, by plan id; the first is the main one.

    ``bindings`` tie the network to arrays of each size, by label. ``frozen`` holds the cuts of stored plans,
    of those that ``own_plans`` names. BudgetError if a pass does not fit.
    """
    main: CompiledPass | None = None
    own: dict[tuple[PassKind, Kind], CompiledPass] = {}
    found: dict[str, CompiledPass] = {}
    sums: Mapping[str, tuple[Region, ...]] = {}
    for plan_id, kind in {**course.kinds, **course.validation_kinds}.items():
        of = validations if kind.role == VALIDATION else bindings
        part, shared = _part(kind.role, course.passes), replace(kind, role="", is_rest=False)
        compiled = own.get((part, shared))
        if compiled is None:
            request = Request(
                model=model,
                binding=of[kind.label],
                settings=settings,
                batch=kind.batch,
                kind=part,
            )
            how = machine, frozen.get(plan_id)
            if main is None:
                compiled = compile_within(draft_pass(request), *how)
            else:
                compiled = _alike(request, *how, main, sums)
            own[part, shared] = compiled
        main, found[plan_id] = main or compiled, compiled
        if part is PassKind.EARLIER:
            sums = sums or compiled.sums
    follow = (MAIN, NEXT) if course.passes > 1 else ()
    return {
        plan_id: continue_step(one, sums) if role_of(plan_id) in follow else one
        for plan_id, one in found.items()
    }


def _part(role: str, passes: int) -> PassKind:
    """Return the part that passes of a role have in their step."""
    if role == VALIDATION:
        return PassKind.FORWARD
    if role in (FIRST, NEXT):
        return PassKind.EARLIER
    return PassKind.WHOLE if passes == 1 else PassKind.LAST


def _alike(
    request: Request,
    machine: Machine,
    frozen: Frozen | None,
    like: CompiledPass,
    sums: Mapping[str, tuple[Region, ...]],
) -> CompiledPass:
    """Compile a pass whose weights, state and sums stay where others of the run have them."""
    whole = machine.workers > 1 and not like.plan.cuts
    draft, threads = replace(draft_alike(request, like), side=like.side, sums=sums), like.plan.threads
    if threads > 1 and frozen is None:
        found = fastest_cut(draft.on(threads), replace(machine, together=threads))
        if found is not None:
            return found.compiled
    hosts = like.plan.hosts or machine.workers
    return compile_within(draft, replace(machine, slots=1) if whole else machine, frozen, hosts)


def draft_alike(request: Request, like: CompiledPass) -> Draft:
    """Take a pass up to its layers, with weights and state where another pass has them."""
    factored = like.plan.factored
    shared = factored.graph.of_role(Role.WEIGHT, Role.STATE, Role.SUM)
    request = replace(request, factors={value.name: factored.factors[value.name] for value in shared})
    return draft_pass(request, like.pieces)


def own_plans(kinds: Mapping[str, CompiledPass]) -> dict[str, CompiledPass]:
    """Return the kinds that have a plan of their own; the others run the same plans on other chunks."""
    roles = (MAIN, FIRST, VALIDATION)
    return {name: one for name, one in kinds.items() if role_of(name) in roles}


def compile_within(
    draft: Draft, machine: Machine, frozen: Frozen | None = None, hosts: int | None = None
) -> CompiledPass:
    """Cut a pass so that it keeps the budget; ``frozen`` are the cuts of a stored plan to repeat.

    Large units read fewer halos, small ones leave more memory for the tier: of units that leave room for
    one that is read ahead, and of half that size, those with fewer predicted seconds are taken; where the
    smaller would not fit, of the first and of larger ones beside which none is read ahead. If nothing fits,
    BudgetError says which budget would do.

    ``hosts``: of several workers so many get work, as in another pass of the run; None: all, or those with
    which a step is predicted to be faster.
    """
    if frozen is not None:
        return _repeated(draft, machine, frozen)
    if hosts is not None and hosts < machine.workers:
        return on_hosts(compile_within(draft, machine.of(hosts), None, hosts), hosts)
    if hosts is None and machine.workers > 1 and draft.request.settings.parallel == "auto":
        compiled = fastest_over_hosts(draft, machine)
    else:
        found = fastest_cut(draft, machine)
        compiled = None if found is None else found.compiled
    if compiled is None:
        worst = cut(draft, machine, machine.capacity_bytes)
        assert isinstance(worst, BudgetError)
        raise BudgetError(_refusal(worst, machine, smallest_budget(draft, machine)))
    return compiled


def _refusal(what: BudgetError, machine: Machine, needed_bytes: int) -> str:
    way_out = f"memory='{-(-needed_bytes >> 20)}MiB' would do"
    if machine.capacity_bytes == 1 and needed_bytes == machine.least_bytes + machine.slack_bytes:
        loading = f"{-(-machine.least_bytes >> 20)} MiB while it loads engine '{machine.engine}'"
        return f"a process takes {loading}, before any array; {way_out}"
    process = f"the process itself ({-(-machine.base_bytes >> 20)} MiB with engine '{machine.engine}')"
    left = str(what) if machine.capacity_bytes > 1 else "nothing is left"
    return f"{left} beside {process}{machine.why_reading}; {way_out}"


def _repeated(draft: Draft, machine: Machine, frozen: Frozen) -> CompiledPass:
    """The pass with the cuts of a stored plan; BudgetError if they do not fit this machine."""
    compiled = draft.storing_bfloat16(frozen.get("rounded", ())).recut(frozen)
    try:
        check_capacity(compiled.plan, machine)
    except BudgetError as error:
        plan = compiled.plan
        needed = plan.peak_unit_bytes + machine.growth_bytes(plan.counts, plan.hosts) + machine.base_bytes
        text = _refusal(error, machine, max(needed, machine.least_bytes) + machine.slack_bytes)
        text += " by the plan that is repeated; a new one (replan=True, no plan=) may need less"
        raise BudgetError(text) from None
    check_device(compiled.plan, machine)
    return compiled
