"""The recipe: how a pass is made of a model, as two lists of transforms, whose result is checked.

    import, loss, attention, differentiate, accumulate, update, keep, canonicalize
        once for each kind of pass: ``GRAPH_TRANSFORMS``
    bfloat16, factorize, channels last
        for each choice of values to store as bfloat16: ``FACTOR_TRANSFORMS``
    partition, tile, expand
        for each choice of limits: ``compiler.Draft.cut``

Training and inference share the recipe. A transform says in which kinds of passes it takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from oocdl.config import Settings
from oocdl.engines.engine import resolve
from oocdl.engines.engine_registry import channels_last_ranks, widest_float
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import Imported, OnnxModel
from oocdl.graph.transforms.bfloat16 import use_bfloat16
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.channels_last import channels_last
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.graph.transforms.factorize import Factored, Factors, factorize
from oocdl.graph.transforms.verify import verify, verify_factored
from oocdl.ops import RULES
from oocdl.ops.gather import Rows, rows_of
from oocdl.ops.loss_functions import (
    Head,
    Labels,
    Loss,
    add_losses,
    check_axes,
    check_dropped,
    labels_of_head,
    reads_labels,
    takes_as_it_is,
)
from oocdl.ops.losses.deep_supervision import resized_target
from oocdl.ops.losses.number_losses import SAMPLE_WEIGHTS
from oocdl.ops.metric_functions import Surface
from oocdl.ops.metric_sums import HeadSums, add_metric_sums, suits
from oocdl.ops.param_groups import assigned
from oocdl.ops.sequences.written_out import with_attention
from oocdl.ops.update_rules import add_sums, add_updates, shared_loss
from oocdl.planning.binding import Binding, heads_of
from oocdl.planning.rebatched import check_rebatched


class PassKind(Enum):
    """The part that a pass has in its step."""

    FORWARD = auto()
    """The pass belongs to no step: it is inference, without gradients."""
    WHOLE = auto()
    """The pass is the whole step: its gradients make the update."""
    EARLIER = auto()
    """Another pass of the step follows: gradients are added to those of the passes before, if any."""
    LAST = auto()
    """The pass ends a step of several: the sum of all gradients makes the update."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """A pass that is to be compiled."""

    model: OnnxModel
    binding: Binding
    """Losses are computed if it has targets; a pass that belongs to a step needs them."""
    settings: Settings
    batch: int
    """Number of samples of the pass."""
    kind: PassKind
    factors: Mapping[str, Factors] = field(default_factory=dict)
    """Weight, state or sum -> its factors, if another pass has decided them."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether products are computed in bfloat16."""
        return self.settings.precision == "bfloat16"


@dataclass(frozen=True, eq=False, kw_only=True)
class Interface:
    """The values of a pass that others use, by their meaning."""

    imported: Imported
    feeds: Mapping[str, str]
    """Value of role INPUT or TARGET -> dataset array."""
    labels: Mapping[str, Labels | Rows] = field(default_factory=dict)
    """Value of role TARGET -> the classes of its loss, of role INPUT -> rows; where known."""
    outputs: Mapping[str, str]
    """Model output -> value, as the model computes it. Where losses are computed instead: what these take of
    the outputs whose labels metrics need."""
    loss: str | None = None
    output_losses: Mapping[str, str] = field(default_factory=dict)
    """Output -> value of its (unweighted) loss."""
    metric_sums: Mapping[str, HeadSums] = field(default_factory=dict)
    """Output that has metrics -> the sums that they are made of."""
    kept_values: Mapping[str, str] = field(default_factory=dict)
    """Name that ``keep`` gives -> value."""
    bfloat16_values: frozenset[str] = frozenset()
    """Values of the canonical graph that are stored as bfloat16."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Network(Interface):
    """A pass on its way through the recipe: its graph, and what values of the graph are to others."""

    graph: Graph
    gradients: Mapping[str, str] = field(default_factory=dict)
    """Weight -> value that the update takes for its gradient; empty once the graph is canonical."""
    idle: frozenset[str] = frozenset()
    """Weights that the loss does not depend on, such as those of a head without a target."""
    summed: Mapping[str, str] = field(default_factory=dict)
    """Gradient of this pass -> its sum with those of the passes before, where these are added up."""
    factored: Factored | None = None
    """The graph over stored factors; None until the transform "factorize"."""

    @property
    def results(self) -> tuple[str, ...]:
        """The values that the pass has to compute, updates aside."""
        loss = () if self.loss is None else (self.loss,)
        sums = (value for head in self.metric_sums.values() for value in head.values.values())
        return (
            *loss, *self.output_losses.values(), *self.outputs.values(), *self.kept_values.values(), *sums,
        )  # fmt: skip


@dataclass(frozen=True)
class Transform:
    """One line of the recipe: a named function from network to network."""

    name: str
    apply: Callable[[Network, Request], Network]
    kinds: frozenset[PassKind] = frozenset(PassKind)
    """The kinds of passes in which it takes part."""


def import_model(request: Request) -> Network:
    """Import the model as a verified graph, which all transforms begin with."""
    binding, settings = request.binding, request.settings
    dims = settings.dims or {}
    shapes = {port.name: binding.input_shape(port, request.batch, dims) for port in request.model.inputs}
    imported = request.model.bind(
        RULES, shapes, precision=settings.dtype, training=request.kind is not PassKind.FORWARD,
        freeze=settings.freeze, outputs=heads_of(request.model, settings.loss),
    )  # fmt: skip
    check_rebatched(request.model, imported)
    if request.settings.strict and request.kind is not PassKind.FORWARD:
        imported.trained.refuse()
    network = Network(
        imported=imported,
        graph=imported.graph,
        feeds=dict(binding.inputs),
        outputs=dict(imported.outputs),
        labels=rows_of(imported.graph, negative=request.model.opset >= 11),
    )
    verify(network.graph, RULES, "import", network.results)
    return network


def apply(transforms: Sequence[Transform], network: Network, request: Request) -> Network:
    """Apply the ``transforms`` that take part in this kind of pass, and verify the last graph that they make.

    Only where that is not sound, or a transform fails, each graph is verified: GraphError names the transform
    that broke it.
    """
    made: list[tuple[str, Network]] = []
    try:
        for transform in transforms:
            if request.kind in transform.kinds:
                network = transform.apply(network, request)
                made.append((transform.name, network))
        if made:
            _verify(*made[-1], request)
    except Exception:
        for name, each in made:
            _verify(name, each, request)
        raise
    return network


def _verify(name: str, network: Network, request: Request) -> None:
    if network.factored is None:
        verify(network.graph, RULES, name, (*network.results, *network.feeds))
    else:
        verify_factored(network.factored, name)


def _add_loss(network: Network, request: Request) -> Network:
    """Add the loss of each target, and their weighted sum; nothing where there are no targets."""
    if not request.binding.targets:
        return network
    build = Builder(RULES, network.graph)
    widest = widest_float(resolve(request.settings.engine))
    heads: dict[str, Head] = {}
    feeds = dict(network.feeds)
    for target in request.binding.targets:
        logits = logits_of(network, target.output, target.spec, request.settings)
        if target.resized:
            name = resized_target(build, next(iter(heads.values())).target, logits, widest)
        else:
            dtype = "int64" if reads_labels(target.spec) else request.settings.dtype
            name = _read(build, request, target.array, f"target/{target.output}", dtype)
            feeds[name] = target.array
        further: dict[str, str] = {}
        for what, array in target.further.items():
            dtype = request.settings.dtype if what == SAMPLE_WEIGHTS else "int64"
            further[what] = _read(build, request, array, f"target/{target.output}/{what}", dtype)
            feeds[further[what]] = array
        head = heads[target.output] = Head(target.spec, logits, name, target.weight, further)
        check_axes(build, target.output, head, network.imported.softmax_axes.get(target.output, ()))
    loss, output_losses = add_losses(build, heads, feeds)
    metrics = request.settings.metrics if request.kind is PassKind.FORWARD else ()
    # Smaller outputs on one target with a larger one, whose target is made smaller, are aids of training.
    scored = {output: head for output, head in heads.items() if head.target in feeds}
    sums = add_metric_sums(build, metrics, scored, widest) if metrics else {}
    kept = {
        output: head.logits
        for output, head in scored.items()
        if any(isinstance(one, Surface) and suits(one, output, head.spec) for one in metrics)
    }
    found = {value: its for head in heads.values() for value, its in labels_of_head(build, head).items()}
    return replace(
        network,
        graph=build.graph(),
        feeds=feeds,
        labels={**rows_of(build.graph(), negative=True), **network.labels, **found},
        outputs=kept,
        loss=loss,
        output_losses=output_losses,
        metric_sums=sums,
    )


def _read(build: Builder, request: Request, array: str, name: str, dtype: str) -> str:
    """Declare a value that a loss reads from an array of the dataset."""
    shape = (request.batch, *request.binding.arrays[array].shape[1:])
    return build.value(build.unique(name), shape, dtype, Role.TARGET)


def logits_of(network: Network, output: str, spec: Loss, settings: Settings) -> str:
    """The value that the loss takes: a Softmax or Sigmoid at the end is stripped only if allowed."""
    end = network.imported.final_activation.get(output)
    if end is None or takes_as_it_is(spec, end):
        return network.outputs[output]
    logits = network.imported.logits.get(output)
    if settings.logits != "auto" or logits is None:
        why = f"output '{output}' ends in {end}, but the loss takes logits"
        way_out = "" if logits is None else "pass logits='auto' to train on what comes before it, or "
        raise InputError(f"{why}; {way_out}export the model without it")
    check_dropped(spec, end, output, network.graph.values[logits].shape)
    return logits


def _attention(network: Network, request: Request) -> Network:
    """Make attention that is written out one node, unless ``keep`` names what is inside of it."""
    names = (name.removeprefix("grad/") for name in request.settings.keep)
    kept = {network.imported.names.get(name, name) for name in names}
    graph = replace(network.graph, outputs=network.results)
    graph = with_attention(graph, RULES, {*kept, *network.feeds})
    return replace(network, graph=replace(graph, outputs=network.graph.outputs))


def _differentiate(network: Network, request: Request) -> Network:
    """Add the gradient of the loss by each weight that is not frozen."""
    assert network.loss is not None
    frozen = set(network.imported.frozen)
    weights = [value.name for value in network.graph.of_role(Role.WEIGHT) if value.name not in frozen]
    if not weights:
        raise InputError("nothing to train: each float initializer is frozen; Constant nodes are not trained")
    build = Builder(RULES, network.graph)
    build.role = Role.GRADIENT
    whole = request.kind is PassKind.WHOLE
    loss = network.loss if whole else shared_loss(build, network.loss)
    found = differentiate(build, loss, weights)
    gradients = {weight: found.get(weight) or build.zeros_like(weight) for weight in weights}
    idle = frozenset(weights) - build.sources(network.loss)
    if len(idle) == len(weights):
        raise InputError("nothing to train: the loss depends on no weight that is not frozen")
    return replace(network, graph=build.graph(), gradients=gradients, idle=idle)


def _accumulate(network: Network, request: Request) -> Network:
    """Add each gradient to the sum of those of the passes before."""
    build = Builder(RULES, network.graph)
    sums = add_sums(build, network.gradients)
    summed = {network.gradients[weight]: total for weight, total in sums.items()}
    return replace(network, graph=build.graph(), gradients=sums, summed=summed)


def _update(network: Network, request: Request) -> Network:
    """Add what replaces weights and state at the end of the step; an earlier pass replaces sums only."""
    build = Builder(RULES, network.graph)
    if request.kind is PassKind.EARLIER:
        build.updates |= {f"{weight}/accumulated": total for weight, total in network.gradients.items()}
    else:
        settings, groups = request.settings, None
        if settings.param_groups is not None:
            names = {weight: request.model.names_of(weight) for weight in network.gradients}
            flat = [weight for weight in names if len(build.shape(weight)) <= 1]
            groups = assigned(settings.optimizer, settings.param_groups, names, flat)
        averages = settings.ema is not None
        add_updates(
            build, settings.optimizer, network.gradients, network.idle, groups=groups, averages=averages
        )
    return replace(network, graph=build.graph())


def _keep(network: Network, request: Request) -> Network:
    """Find the values that ``keep`` names, by the name in the file or ``grad/<value>``.

    Of gradients that are added up over several passes, the sum is kept.
    """
    kept: dict[str, str] = {}
    for name in request.settings.keep:
        value = network.imported.names.get(name, name)
        if value not in network.graph.values or value in network.graph.updates:
            raise InputError(
                f"keep names '{name}', which is no activation of the model and no gradient 'grad/<weight>'"
            )
        kept[name] = network.summed.get(value, value)
    return replace(network, kept_values=kept)


def _canonicalize(network: Network, request: Request) -> Network:
    """Rewrite into operators that can be cut; merge equal nodes and drop those that nothing needs.

    Merging equal nodes can rename results, but never reorders them.
    """
    graph = canonicalize(replace(network.graph, outputs=network.results), RULES)
    name = dict(zip(network.results, graph.outputs, strict=True))
    return replace(
        network,
        graph=graph,
        gradients={},
        summed={},
        outputs={output: name[value] for output, value in network.outputs.items()},
        loss=None if network.loss is None else name[network.loss],
        output_losses={output: name[value] for output, value in network.output_losses.items()},
        metric_sums={
            output: HeadSums({title: name[value] for title, value in head.values.items()}, head.known)
            for output, head in network.metric_sums.items()
        },
        kept_values={title: name[value] for title, value in network.kept_values.items()},
    )


def _bfloat16(network: Network, request: Request) -> Network:
    """Have products take bfloat16 if that is the precision; cast around values stored as bfloat16."""
    if not request.has_bfloat16 and not network.bfloat16_values:
        return network
    return replace(
        network,
        graph=use_bfloat16(network.graph, RULES, network.bfloat16_values, request.has_bfloat16),
    )


def _factorize(network: Network, request: Request) -> Network:
    """Write dimensions as lists of factors."""
    return replace(network, factored=factorize(network.graph, RULES, request.factors))


def _channels_last(network: Network, request: Request) -> Network:
    """Have arrays lie channels last, of the ranks for which the engine wants that."""
    assert network.factored is not None
    ranks = channels_last_ranks(resolve(request.settings.engine), request.settings.precision)
    return replace(network, factored=channels_last(network.factored, RULES, frozenset(ranks)))


TRAINING = frozenset(PassKind) - {PassKind.FORWARD}

GRAPH_TRANSFORMS = (
    Transform("loss", _add_loss),
    Transform("attention", _attention),
    Transform("differentiate", _differentiate, TRAINING),
    Transform("accumulate", _accumulate, frozenset({PassKind.EARLIER, PassKind.LAST})),
    Transform("update", _update, TRAINING),
    Transform("keep", _keep, frozenset({PassKind.WHOLE, PassKind.LAST})),
    Transform("canonicalize", _canonicalize),
)
"""Transforms from an imported model to a graph of operators that can be cut."""

FACTOR_TRANSFORMS = (
    Transform("bfloat16", _bfloat16),
    Transform("factorize", _factorize),
    Transform("channels last", _channels_last),
)
"""Transforms from there to a graph over stored factors, for one choice of ``bfloat16_values``."""
