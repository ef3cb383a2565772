"""Compiles a pass: applies the recipe to a request, cuts the layers and lists the tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import ceil
from typing import Any

from oocdl.engines.engine import get_engine, resolve
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Region
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch
from oocdl.graph.transforms.bfloat16 import bfloat16_of, may_be_bfloat16
from oocdl.ops import RULES
from oocdl.ops.optimizers import start_of
from oocdl.planning.calibrate import known_rates
from oocdl.planning.cost_model import Rates, scratch_ratio
from oocdl.planning.pass_plan import PassPlan, PassSize, estimate_pass, plan_pass, replan_pass
from oocdl.planning.predicted import import_networks
from oocdl.planning.recipe import (
    FACTOR_TRANSFORMS,
    GRAPH_TRANSFORMS,
    Interface,
    Network,
    PassKind,
    Request,
    apply,
)
from oocdl.planning.slot_search import weight_cuts
from oocdl.planning.task_graph import TaskGraph, expand_pass, versioned_pieces
from oocdl.planning.tile_search import Layering, Limits

Frozen = Mapping[str, Any]
"""Cuts and grids of a plan, as ``plan.json`` holds them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledPass(Interface):
    """One kind of pass through the network, ready to run; a step runs one pass or several."""

    plan: PassPlan
    graph: TaskGraph
    pieces: Mapping[str, tuple[Region, ...]]
    """Weight or state -> the regions that it is stored in."""
    starts: Mapping[str, float | str]
    """State of the optimizer -> the number that all its elements start as, where that is not zero; the weight
    that it starts as, where it is an average."""
    sums: Mapping[str, tuple[Region, ...]]
    """Sum of gradients that the pass makes -> the regions that it is stored in. Sums go from pass to pass,
    never to the run on disk."""
    side: int | None = None
    """See ``Draft.side``."""

    def named_losses(self, found: Mapping[str, float]) -> dict[str, float]:
        """Return the loss of a pass, and its parts if there are several, as the history names them.

        Empty for a pass that computes outputs.
        """
        if self.loss is None:
            return {}
        heads = self.output_losses if len(self.output_losses) > 1 else {}
        return {"loss": found[self.loss], **{f"loss/{name}": found[value] for name, value in heads.items()}}

    def __repr__(self) -> str:
        return f"<CompiledPass: {len(self.plan.layers)} layers, {self.plan.tasks} tasks>"


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """A pass that can be cut in many ways."""

    request: Request
    network: Network
    """The network with a canonical graph."""
    layering: Layering
    """The network's graph over stored factors, with its layers."""
    pieces: Mapping[str, tuple[Region, ...]] | None = None
    """Weight or state -> the regions that it is stored in, if another plan has decided that already."""
    sums: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """Sum of gradients -> the regions that it is stored in, if another plan has decided that already."""
    side: int | None = None
    """The set of ``weight_cuts`` that is cut, into a piece for each worker; None: neither."""

    def storing_bfloat16(self, names: Collection[str]) -> Draft:
        """The same pass with the values ``names``, too, stored as bfloat16."""
        names = self.network.bfloat16_values | frozenset(names)
        if names == self.network.bfloat16_values:
            return self
        network = replace(self.network, bfloat16_values=names)
        return replace(
            self, network=network, layering=_layering(network, self.request).on(self.layering.threads)
        )

    def on(self, threads: int) -> Draft:
        """The same pass with so many threads that run each unit together."""
        return replace(self, layering=self.layering.on(threads))

    def cut(self, limits: Limits) -> CompiledPass:
        """Cut the pass so that its units keep the limits; BudgetError if that cannot be."""
        return self._expanded(plan_pass(self.layering, self._asked(limits)))

    def estimate(self, limits: Limits) -> PassSize:
        """About how large the plan is that ``cut`` would make, much faster; BudgetError as there."""
        return estimate_pass(self.layering, self._asked(limits))

    def _asked(self, limits: Limits) -> Limits:
        """The limits, with the cuts that are wanted in any case."""
        if self.side is None:
            return limits
        return replace(limits, cuts=dict.fromkeys(weight_cuts(self.layering)[self.side], limits.workers))

    def recut(self, frozen: Frozen) -> CompiledPass:
        """Repeat the cuts of an earlier plan; InputError if they belong to another model or version."""
        return self._expanded(replan_pass(self.layering.on(int(frozen.get("threads", 1))), frozen))

    def _expanded(self, plan: PassPlan) -> CompiledPass:
        network, optimizer = self.network, self.request.settings.optimizer
        pieces = self.pieces or versioned_pieces(plan)
        earlier = self.request.kind is PassKind.EARLIER
        sums = self.sums or versioned_pieces(plan, (Role.SUM,)) if earlier else {}
        return CompiledPass(
            plan=plan,
            graph=expand_pass(plan, {**pieces, **sums}, sums),
            pieces=pieces,
            starts={
                name: start
                for name in pieces.keys() - network.imported.weights.keys()
                if (start := start_of(optimizer, name))
            },
            sums=sums,
            side=self.side,
            **{one.name: getattr(network, one.name) for one in fields(Interface)},
        )


def draft_pass(request: Request, pieces: Mapping[str, tuple[Region, ...]] | None = None) -> Draft:
    """Take a pass through the recipe, up to its layers, which are not cut yet.

    ``pieces`` are the regions that weights are stored in, if another plan has decided that. Where products
    are computed in bfloat16, all values that may be are stored as bfloat16. Raises InputError if the model
    and the settings do not agree.
    """
    network = apply(GRAPH_TRANSFORMS, import_networks(request), request)
    layering = _layering(network, request)
    if request.has_bfloat16:
        allowed = may_be_bfloat16(layering.factored.graph, _first_stored(layering))
        names = frozenset(allowed & network.graph.values.keys())
        while names != network.bfloat16_values:
            network = replace(network, bfloat16_values=names)
            layering = _layering(network, request)
            stored = _first_stored(layering)
            # A value that is recomputed where it is read would be rounded for nothing.
            names = frozenset(name for name in names if bfloat16_of(name) in stored)
    return Draft(request=request, network=network, layering=layering, pieces=pieces)


def _layering(network: Network, request: Request) -> Layering:
    """The layers of a network with a canonical graph."""
    factored = apply(FACTOR_TRANSFORMS, network, request).factored
    assert factored is not None
    engine = resolve(request.settings.engine)
    rates = known_rates(engine)
    return Layering(factored, RULES, partial(_scratch_of, engine, rates), rates)


def _scratch_of(engine: str, rates: Rates, program: Program) -> ProgramScratch:
    """Return the scratch that the engine tells of a program, or more where this machine takes more."""
    told = get_engine(engine).scratch_of(program, RULES)
    return told._replace(scratch_bytes=ceil(told.scratch_bytes * scratch_ratio(program, RULES, rates)))


def _first_stored(layering: Layering) -> frozenset[str]:
    """The values that layers store where only the class that is best to cut is cut."""
    return frozenset(name for layer in layering.layers(layering.best_cut(2)) for name in layer.stores)


def continue_step(compiled: CompiledPass, sums: Mapping[str, tuple[Region, ...]]) -> CompiledPass:
    """The same pass after others of its step, which left ``sums`` of gradients.

    A pass as ``Draft`` makes it begins a step: it takes all sums to be zeros.
    """
    graph = expand_pass(compiled.plan, {**compiled.pieces, **sums})
    return replace(compiled, graph=graph)
