"""Probabilities, and their means over networks and mirrored samples: one graph of copies of forward graphs.

Each copy reads its inputs mirrored, and what it predicts is mirrored back and added to what those before it
predict. Copies of a network share its weights; values of several networks have its number before their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Graph, Node, Role, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import WeightSource
from oocdl.ops import RULES
from oocdl.ops.ctc import CTC
from oocdl.ops.expression import Lifted, apply, lift
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import ACTIVATION_OF, Labels, Loss, are_exclusive
from oocdl.ops.losses.class_losses import class_axis
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.planning.binding import heads_of
from oocdl.planning.recipe import Network, Request, import_model, logits_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction(Request):
    """A pass that predicts means: of probabilities where losses have classes, else of outputs."""

    members: Sequence[tuple[Request, Mapping[str, Shape]]]
    """The request of each network, the first of which is this, and the shapes of labels in its training."""
    mirror: bool | Sequence[int]
    """The spatial axes that samples are mirrored along, in all combinations; True: all of them."""
    probabilities: bool
    """Whether outputs without probabilities are refused."""


_Head = tuple[str, Shape, str, int]
"""What is predicted of an output: a value, its shape, and activation and axis that make it probabilities."""


def import_networks(request: Request) -> Network:
    """Import the network of a pass, or those whose mean it predicts, as one graph.

    Raises InputError where they do not go together, or an output has no probabilities.
    """
    if not isinstance(request, Prediction):
        return import_model(request)
    networks, build = [import_model(one) for one, _ in request.members], Builder(RULES)
    build.scope = "/predicted/"
    shapes = [value.shape for value in networks[0].graph.of_role(Role.INPUT)]
    spaces = {shape[2:] for shape in shapes if len(shape) == max(map(len, shapes))}
    flips = _flips(request.mirror, len(next(iter(spaces))))
    totals, heads = dict[str, Lifted](), [_heads(*pair, request) for pair in enumerate(networks)]
    feeds, labels = dict[str, str](), dict[str, Labels | Rows]()
    weights = dict[str, WeightSource]()
    for number, network in enumerate(networks):
        first, its = ({output: head[1:] for output, head in heads[at].items()} for at in (0, number))
        if first != its:
            raise InputError(f"a mean is of equal outputs: run 1 has {first}, and run {number + 1} {its}")
        prefix, graph = f"/{number}/" if len(networks) > 1 else "", network.graph
        weights |= {prefix + name: source for name, source in network.imported.weights.items()}
        made, shared = {output for node in graph.nodes for output in node.outputs}, dict[str, str]()
        for axes in flips:
            own = f"{prefix}mirror{axes}/" if axes else prefix
            # Copies do not share inputs: all would compute at once what they read them for, and hold it.
            read = {name: own + name for name in network.feeds}
            build.values |= {it: replace(graph.values[name], name=it) for name, it in read.items()}
            feeds |= {read[name]: array for name, array in network.feeds.items()}
            labels |= {read[name]: rows for name, rows in network.labels.items()}
            given = {name: _mirrored(lift(build, value), axes, spaces).name for name, value in read.items()}
            copy = _copied(build, graph, shared | given, own)
            shared = {name: it for name, it in copy.items() if name not in made and name not in read}
            for output, (value, _, activation, axis) in heads[number].items():
                part = lift(build, copy[value])
                if activation:
                    part = apply(activation, part, **({"axis": axis} if axis else {}))
                part = _mirrored(part, axes, spaces)
                if output in totals:  # stored here: what copies compute does not wait for the last of them
                    part = apply("Add", totals[output], part, runs_once=True)
                totals[output] = part
    count = len(networks) * len(flips)
    outputs = {output: (total / count if count > 1 else total).name for output, total in totals.items()}
    graph = replace(build.graph(), outputs=tuple(outputs.values()))
    imported = replace(networks[0].imported, weights=weights)
    return Network(imported=imported, graph=graph, feeds=feeds, outputs=outputs, labels=labels)


def _heads(number: int, network: Network, prediction: Prediction) -> dict[str, _Head]:
    """Return what is predicted of each output of a network; of deep supervision, of the first alone."""
    (request, labels), values = prediction.members[number], network.graph.values
    losses = {output: spec for output, (spec, _) in heads_of(request.model, request.settings.loss).items()}
    deep = isinstance(request.settings.loss, DeepSupervision)
    heads = dict[str, _Head]()
    for output, value in list(network.outputs.items())[: 1 if deep else None]:
        spec, shape = losses.get(output), values[value].shape
        heads[output] = value, shape, "", 0
        exclusive = None if spec is None else are_exclusive(spec, shape)
        if spec is not None and exclusive is not None:
            logits = logits_of(network, output, spec, request.settings)
            axis = _class_axis(spec, shape, labels[output], network) if exclusive else 0
            heads[output] = logits, shape, ACTIVATION_OF[exclusive], axis
        elif prediction.probabilities:
            what = "no loss" if spec is None else f"the loss {type(spec).__name__}"
            raise InputError(f"output '{output}' has {what}, which knows no probabilities; leave them out")
    return heads


def _class_axis(spec: Loss, shape: Shape, labels: Shape, network: Network) -> int:
    """Return the axis of the classes of logits, by the shape of labels in training or that of the inputs."""
    if isinstance(spec, CTC):
        return len(shape) - 1
    inputs = {network.graph.values[name].shape[2:] for name in network.feeds}
    axis = 1 if shape[2:] and shape[2:] in inputs else class_axis(shape, (shape[0], *labels[1:]))
    if axis is None:
        raise InputError(
            f"the axis of classes is not known of logits {list(shape)}, whose labels were {list(labels)} in "
            "training: give samples of that size, or take outputs as they are"
        )
    return axis


def _copied(build: Builder, graph: Graph, names: Mapping[str, str], prefix: str) -> Mapping[str, str]:
    """Add a copy of a graph, but for values that have ``names``; returns what each value is called."""
    names = {name: names.get(name, prefix + name) for name in graph.values}
    new = {name: own for name, own in names.items() if own not in build.values}
    build.values |= {own: replace(graph.values[name], name=own) for name, own in new.items()}
    build.constants |= {names[name]: array for name, array in graph.constants.items()}
    for node in graph.nodes:
        inputs, outputs = (tuple(names[name] for name in some) for some in (node.inputs, node.outputs))
        build.nodes.append(Node(prefix + node.name, node.op, inputs, outputs, node.attrs))
    return names


def _flips(mirror: bool | Sequence[int], rank: int) -> list[tuple[int, ...]]:
    """Return all combinations of the axes to mirror along. Raises InputError for others than there are."""
    axes = range(rank) if mirror is True else () if mirror is False else mirror
    several = isinstance(axes, Sequence) and all(axis in range(rank) for axis in axes)
    if not several or not (axes or mirror is False):
        raise InputError(f"mirror takes True, or some of the {rank} spatial axes, from 0, not {mirror!r}")
    return [flip for count in range(len(set(axes)) + 1) for flip in combinations(sorted(set(axes)), count)]


def _mirrored(x: Lifted, axes: Sequence[int], spaces: Collection[Shape]) -> Lifted:
    """Add a value mirrored along spatial axes; one without these stays as it is."""
    space = x.shape[2:]
    if axes and space not in spaces and set(space) - {1}:
        raise InputError(
            f"mirror takes values with the extents of the input, or none, not {list(x.shape)}; leave it out"
        )
    for axis in axes if space in spaces else ():
        x = apply("Reverse", x, axis=axis + 2)
    return x
