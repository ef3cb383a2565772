"""From a request to a pass that is ready to run: the recipe, and the cuts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Region
from oocdl.graph.onnx.reader import Imported
from oocdl.graph.transforms.bfloat16 import bfloat16_of, may_be_bfloat16
from oocdl.planning.pass_plan import PassPlan, look_at_pass, plan_pass, replan_pass
from oocdl.planning.recipe import FACTORS, GRAPH, Network, PassKind, Request, apply, import_model
from oocdl.planning.task_graph import TaskGraph, expand_pass, versioned_pieces
from oocdl.planning.tile_search import Layering, Limits

Frozen = Mapping[str, Any]
"""Cuts and grids of a plan, as ``plan.json`` holds them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Compiled:
    """One kind of pass through the network, ready to run; a step is one of them, or several."""

    imported: Imported
    plan: PassPlan
    graph: TaskGraph
    pieces: Mapping[str, tuple[Region, ...]]
    """How weights and state are stored."""
    loss: str | None
    parts: Mapping[str, str]
    """Output -> value of its (unweighted) loss."""
    outputs: Mapping[str, str]
    """Model output -> value, as the model computes it; empty where losses are computed instead."""
    feeds: Mapping[str, str]
    """Value of role INPUT or TARGET -> dataset array."""
    kept: Mapping[str, str]
    """Name that ``keep`` gives -> value."""
    bfloat16_values: frozenset[str]
    """Values that are stored as bfloat16."""
    sums: Mapping[str, tuple[Region, ...]]
    """How the sums of gradients that it makes are stored; they go from pass to pass, never to the run."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Draft:
    """A pass that can be cut in many ways."""

    request: Request
    network: Network
    """With a canonical graph."""
    layering: Layering
    """The network's graph over stored factors, with its layers."""
    pieces: Mapping[str, tuple[Region, ...]] | None = None
    """How weights are stored, if another plan has decided that already."""

    def with_bfloat16(self, names: Collection[str]) -> Draft:
        """The same pass with these values, too, stored as bfloat16."""
        names = self.network.bfloat16_values | frozenset(names)
        if names == self.network.bfloat16_values:
            return self
        network = replace(self.network, bfloat16_values=names)
        return replace(self, network=network, layering=_layering(network, self.request))

    def cut(self, limits: Limits) -> Compiled:
        """Cut so that units keep the limits; BudgetError if that cannot be."""
        return self._expanded(plan_pass(self.layering, limits))

    def look(self, limits: Limits) -> tuple[int, int, int]:
        """(layers, tasks, bytes of the largest unit) of what ``cut`` would make, closely.

        BudgetError as there.
        """
        return look_at_pass(self.layering, limits)

    def recut(self, frozen: Frozen) -> Compiled:
        """Repeat the cuts of an earlier plan."""
        return self._expanded(replan_pass(self.layering, frozen))

    def _expanded(self, plan: PassPlan) -> Compiled:
        network = self.network
        pieces = self.pieces or versioned_pieces(plan)
        sums = versioned_pieces(plan, (Role.SUM,)) if self.request.part is PassKind.EARLIER else {}
        return Compiled(
            imported=network.imported,
            plan=plan,
            graph=expand_pass(plan, {**pieces, **sums}, sums),
            pieces=pieces,
            loss=network.loss,
            parts=network.parts,
            outputs=network.outputs,
            feeds=network.feeds,
            kept=network.kept,
            bfloat16_values=network.bfloat16_values,
            sums=sums,
        )


def draft_pass(request: Request, pieces: Mapping[str, tuple[Region, ...]] | None = None) -> Draft:
    """A pass that is not cut yet; ``pieces`` says how weights are stored if another plan has decided that.

    Where products are in bfloat16, so are all values that may be stored so.
    """
    network = apply(GRAPH, import_model(request), request)
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
    factored = apply(FACTORS, network, request).factored
    assert factored is not None
    scratch_of = get_engine(request.settings.engine).scratch_of
    return Layering(factored, request.rules, partial(scratch_of, rules=request.rules))


def _first_stored(layering: Layering) -> frozenset[str]:
    """The values that layers store where only the class that is best to cut is cut."""
    return frozenset(name for layer in layering.layers(layering.best_cut(2)) for name in layer.stores)


def going_on(compiled: Compiled, sums: Mapping[str, tuple[Region, ...]]) -> Compiled:
    """The same pass where others of its step went before, which left ``sums``.

    What a ``Draft`` is cut into begins a step: to it, all sums are zeros.
    """
    graph = expand_pass(compiled.plan, {**compiled.pieces, **sums})
    return replace(compiled, graph=graph)
