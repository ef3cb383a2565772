"""From an ONNX file and settings to a plan: the passes, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import Any

from oocdl.bind import Binding
from oocdl.config import Settings
from oocdl.engines.engine import CHANNELS_LAST, get_engine, resolve
from oocdl.errors import InputError
from oocdl.graph.axes import Region
from oocdl.graph.cost import NeedsOf
from oocdl.graph.differentiate import differentiate
from oocdl.graph.expand import expand
from oocdl.graph.factorize import Factored, factorize
from oocdl.graph.fitting import Layering, Limits
from oocdl.graph.ir import Graph, Role
from oocdl.graph.layout import channels_last
from oocdl.graph.plan import StepPlan, look_at_step, plan_step, replan_step
from oocdl.graph.read_onnx import Imported, OnnxModel
from oocdl.graph.rounded import roundable, rounded, twin_of
from oocdl.graph.rule import Builder, Rules
from oocdl.graph.step import StepGraph, expand_step, versioned_pieces
from oocdl.ops.losses import CrossEntropy, Dice, DiceCE, Head, add_losses
from oocdl.ops.optimizers import add_sums, add_updates, shared_loss

Frozen = Mapping[str, Any]
"""Cuts and grids of a plan, as ``plan.json`` holds them."""


class Part(Enum):
    """What a pass (forward and backward) is of its step."""

    WHOLE = auto()
    """All of it: gradients make the update."""
    EARLIER = auto()
    """Not the last: gradients are added to those of the passes before, if any."""
    LAST = auto()
    """The last: the sum of all gradients makes the update."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """One kind of pass through the network, ready to run; a step is one of them, or several."""

    imported: Imported
    plan: StepPlan
    graph: StepGraph
    pieces: Mapping[str, tuple[Region, ...]]
    """How weights and state are stored."""
    loss: str | None
    parts: Mapping[str, str]
    """Output -> value of its (unweighted) loss."""
    outputs: Mapping[str, str]
    """Model output -> value, as the model computes it."""
    feeds: Mapping[str, str]
    """Value of role INPUT or TARGET -> dataset array."""
    kept: Mapping[str, str]
    """Name that ``keep`` gives -> value."""
    rounded: frozenset[str] = frozenset()
    """Values that are stored in 16 bits."""
    sums: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """How the sums of gradients that it makes are stored; they go from pass to pass, never to the run."""


def _imported(
    model: OnnxModel, binding: Binding, settings: Settings, batch: int, rules: Rules, training: bool
) -> Imported:
    dims = settings.dims or {}
    shapes = {port.name: binding.input_shape(port, batch, dims) for port in model.inputs}
    return model.bind(rules, shapes, precision=settings.dtype, training=training, freeze=settings.freeze)


def _ranks_last(settings: Settings) -> frozenset[int]:
    """Ranks of values that are to have their channels last."""
    return frozenset(CHANNELS_LAST.get(resolve(settings.engine), {}).get(settings.precision, ()))


def _needs(settings: Settings, rules: Rules) -> NeedsOf:
    """What a program wants while it runs with the engine."""
    return partial(get_engine(settings.engine).needs, rules=rules)


def _factored(graph: Graph, rules: Rules, last: frozenset[int]) -> Factored:
    """The graph over stored factors, values of ranks in ``last`` with their channels last."""
    return channels_last(factorize(graph, rules), last)


def _layering(graph: Graph, settings: Settings, rules: Rules) -> tuple[Layering, frozenset[str]]:
    """The graph's layers, and values that are stored in 16 bits: all that may be, where products have 16."""
    last, needs = _ranks_last(settings), _needs(settings, rules)
    if settings.precision != "bfloat16":
        return Layering(_factored(graph, rules, last), rules, needs), frozenset()
    names: frozenset[str] | None = None
    while True:
        layering = Layering(_factored(rounded(graph, names or (), True), rules, last), rules, needs)
        layers = layering.layers(layering.best_cut(2))
        if names is None:
            names = roundable(layering.factored.graph, layers) & set(graph.values)
            continue
        stored = {name for layer in layers for name in layer.stores}
        fewer = frozenset(name for name in names if twin_of(name) in stored)
        if fewer == names:
            return layering, names
        names = fewer  # what is made anew where it is read would be rounded for nothing


@dataclass(frozen=True, eq=False)
class TrainingGraph:
    """Forward, loss, gradient and update as one graph."""

    imported: Imported
    graph: Graph
    loss: str
    parts: Mapping[str, str]
    kept: Mapping[str, str]
    feeds: Mapping[str, str]


def training_graph(
    model: OnnxModel, binding: Binding, settings: Settings, batch: int, rules: Rules, part: Part
) -> TrainingGraph:
    """The model with its loss, gradients and updates (or sums) appended, expanded into primitives."""
    imported = _imported(model, binding, settings, batch, rules, training=True)
    build = Builder(rules, imported.graph)
    feeds = {name: binding.inputs[name] for name in binding.inputs}
    loss, parts = _add_losses(build, imported, binding, settings, feeds)
    frozen = set(imported.frozen)
    weights = [v.name for v in imported.graph.of_role(Role.WEIGHT) if v.name not in frozen]
    if not weights:
        raise InputError("nothing to train: the model has no float initializer that is not frozen")
    build.role = Role.GRADIENT
    summed: dict[str, str] = {}
    if part is Part.WHOLE:
        gradients = differentiate(build, loss, weights)
    else:
        own = differentiate(build, shared_loss(build, loss), weights)
        gradients = add_sums(build, own)
        summed = {own[weight]: total for weight, total in gradients.items()}
    if part is Part.EARLIER:
        build.updates |= {f"{weight}/accumulated": total for weight, total in gradients.items()}
    else:
        add_updates(build, settings.optimizer, gradients)
    kept = {} if part is Part.EARLIER else _kept(build, imported, settings, summed)
    build.outputs = [loss, *parts.values(), *kept.values()]
    graph = expand(build.graph(), rules)
    # Merging equal nodes can rename outputs, but never moves them.
    loss, *others = graph.outputs
    return TrainingGraph(
        imported,
        graph,
        loss,
        dict(zip(parts, others[: len(parts)], strict=True)),
        dict(zip(kept, others[len(parts) :], strict=True)),
        feeds,
    )


def _kept(
    build: Builder, imported: Imported, settings: Settings, summed: Mapping[str, str]
) -> dict[str, str]:
    """Name that ``keep`` gives -> value: by the name in the file, or ``grad/<value>``.

    The gradient of a weight is that of the step: ``summed`` maps the last pass's own to all passes' sum.
    """
    found: dict[str, str] = {}
    for name in settings.keep:
        value = imported.names.get(name, name)
        if value not in build.values or value in build.updates:
            raise InputError(
                f"keep names '{name}', which is no activation of the model and no gradient 'grad/<weight>'"
            )
        found[name] = summed.get(value, value)
    return found


def _add_losses(
    build: Builder, imported: Imported, binding: Binding, settings: Settings, feeds: dict[str, str]
) -> tuple[str, dict[str, str]]:
    outputs = dict(imported.outputs)
    heads: dict[str, Head] = {}
    batch = build.shape(imported.inputs[0])[0]
    for target in binding.targets:
        logits = _logits(imported, outputs, target.output, target.spec, settings)
        data = binding.arrays[target.array]
        labels = isinstance(target.spec, (CrossEntropy, Dice, DiceCE))
        dtype = "int64" if labels else settings.dtype
        name = f"target/{target.output}"
        build.value(name, (batch, *data.shape[1:]), dtype, Role.TARGET)
        feeds[name] = target.array
        heads[target.output] = Head(target.spec, logits, name, target.weight)
    return add_losses(build, heads)


def _logits(
    imported: Imported, outputs: Mapping[str, str], output: str, spec: object, settings: Settings
) -> str:
    """The value that the loss takes: an end in Softmax or Sigmoid is stripped only if allowed."""
    end = imported.final_activation.get(output)
    takes_logits = type(spec).__name__ not in ("MSE", "L1")
    if end is None or not takes_logits:
        return outputs[output]
    if settings.logits != "auto":
        raise InputError(
            f"output '{output}' ends in {end}, but the loss takes logits; pass logits='auto' to train "
            "on what comes before it, or export the model without it"
        )
    return imported.logits[output]


@dataclass(frozen=True, eq=False)
class Draft:
    """A training step, or the first ``part`` of one, that can be cut in many ways."""

    made: TrainingGraph
    layering: Layering
    part: Part
    pieces: Mapping[str, tuple[Region, ...]] | None = None
    """How weights are stored, if another plan has decided that already."""
    rounded: frozenset[str] = frozenset()
    """Values that are stored in 16 bits."""
    last: frozenset[int] = frozenset()
    """Ranks of values that have their channels last, where convolutions read or make them."""
    low: bool = False
    """Whether products are computed in 16 bits."""

    def rounding(self, names: Collection[str]) -> Draft:
        """The same step with these values, too, stored in 16 bits."""
        names = self.rounded | frozenset(names)
        if names == self.rounded:
            return self
        rules = self.layering.rules
        graph = rounded(self.made.graph, names, self.low)
        layering = Layering(_factored(graph, rules, self.last), rules, self.layering.needs)
        return replace(self, layering=layering, rounded=names)

    def cut(self, limits: Limits) -> Compiled:
        """Cut so that units keep the limits; BudgetError if that cannot be."""
        return self._expanded(plan_step(self.layering, limits))

    def look(self, limits: Limits) -> tuple[int, int, int]:
        """(layers, tasks, bytes of the largest unit) of what ``cut`` would make, closely.

        BudgetError as there.
        """
        return look_at_step(self.layering, limits)

    def recut(self, frozen: Frozen) -> Compiled:
        """Repeat the cuts of an earlier plan."""
        return self._expanded(replan_step(self.layering, frozen))

    def _expanded(self, plan: StepPlan) -> Compiled:
        made = self.made
        pieces = self.pieces or versioned_pieces(plan)
        sums = versioned_pieces(plan, (Role.SUM,)) if self.part is Part.EARLIER else {}
        return Compiled(
            made.imported,
            plan,
            expand_step(plan, {**pieces, **sums}, sums),
            pieces,
            made.loss,
            made.parts,
            dict(made.imported.outputs),
            made.feeds,
            made.kept,
            self.rounded,
            sums,
        )


def draft_training(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    batch: int,
    rules: Rules,
    part: Part = Part.WHOLE,
    pieces: Mapping[str, tuple[Region, ...]] | None = None,
) -> Draft:
    """A training step, or the first ``part`` of one, for batches of ``batch`` samples, not cut yet."""
    made = training_graph(model, binding, settings, batch, rules, part)
    layering, names = _layering(made.graph, settings, rules)
    last, low = _ranks_last(settings), settings.precision == "bfloat16"
    return Draft(made, layering, part, pieces, names, last, low)


def going_on(compiled: Compiled, sums: Mapping[str, tuple[Region, ...]]) -> Compiled:
    """The same pass where others of its step went before, which left ``sums``.

    What a ``Draft`` is cut into begins a step: to it, all sums are zeros.
    """
    graph = expand_step(compiled.plan, {**compiled.pieces, **sums})
    return replace(compiled, graph=graph)


def compile_inference(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    batch: int,
    rules: Rules,
    limits: Limits,
) -> Compiled:
    """A forward pass as the trained model would do it; with losses if ``binding`` has targets."""
    imported = _imported(model, binding, settings, batch, rules, training=False)
    build = Builder(rules, imported.graph)
    feeds = {name: binding.inputs[name] for name in binding.inputs}
    loss: str | None = None
    parts: dict[str, str] = {}
    outputs = dict(imported.outputs)
    if binding.targets:
        loss, parts = _add_losses(build, imported, binding, settings, feeds)
        build.outputs = [loss, *parts.values()]
    else:
        build.outputs = list(outputs.values())
    build.updates = {}
    graph = expand(build.graph(), rules)
    if loss is not None:
        loss, *others = graph.outputs
        parts = dict(zip(parts, others, strict=True))
    else:
        outputs = dict(zip(outputs, graph.outputs, strict=True))
    plan = plan_step(_layering(graph, settings, rules)[0], limits)
    pieces = versioned_pieces(plan)
    return Compiled(imported, plan, expand_step(plan, pieces), pieces, loss, parts, outputs, feeds, {})
