"""Probabilities, and means of them over networks and mirrored samples: one graph of copies of forward graphs.

Each copy reads its inputs mirrored, and what it predicts is mirrored back and added to what those before it
predict. Copies of a network share its weights; those of several networks are told apart by a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Graph, Node, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops import RULES
from oocdl.ops.ctc import CTC
from oocdl.ops.expression import Lifted, apply, lift
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import Labels, Loss, activation_of
from oocdl.ops.losses.class_losses import class_axis
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.planning.binding import heads_of
from oocdl.planning.recipe import Network, Request, import_model, logits_of


@dataclass(frozen=True, eq=False, kw_only=True)
class Member(Request):
    """A network whose predictions are wanted, with the settings of its run."""

    labels: Mapping[str, Shape]
    """Output -> the shape that its labels had in training; empty if they had the extents of the inputs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Prediction(Request):
    """A pass whose outputs are means over networks and mirrored samples: of probabilities where losses have
    classes, else of outputs. ``model``, ``binding`` and ``settings`` are those of the first network."""

    members: Sequence[Member]
    mirror: Sequence[int] = ()
    """The spatial axes that samples are mirrored along, in all combinations."""
    probabilities: bool = False
    """Whether outputs without probabilities are refused."""


@dataclass(frozen=True)
class _Head:
    """What is predicted of an output: a value, and the activation that makes it probabilities, if any."""

    value: str
    shape: Shape
    activation: str | None
    axis: int | None


def import_networks(request: Request) -> Network:
    """Import the networks of a pass as one graph.

    Raises InputError where networks do not go together, or an output has no probabilities.
    """
    if not isinstance(request, Prediction):
        return import_model(request)
    networks, build = [import_model(one) for one in request.members], Builder(RULES)
    build.scope = "/predicted/"
    rank = max(len(port.dims) for port in request.model.inputs)
    flips = [axes for count in range(len(request.mirror) + 1) for axes in combinations(request.mirror, count)]
    totals: dict[str, Lifted] = {}
    feeds, labels = dict[str, str](), dict[str, Labels | Rows]()
    weights, first = dict(networks[0].imported.weights), dict[str, _Head]()
    for number, (member, network) in enumerate(zip(request.members, networks, strict=True)):
        prefix = f"/{number}/" if len(networks) > 1 else ""
        heads = _heads(network, member, request.probabilities)
        first = first or heads
        _check_alike(first, heads, number)
        graph = network.graph
        names = _declared(build, graph, prefix)
        feeds |= {names[name]: array for name, array in network.feeds.items()}
        labels |= {names[name]: rows for name, rows in network.labels.items()}
        for axes in flips:
            places = [axis + 2 for axis in axes]
            given = {name: _mirrored(lift(build, names[name]), places, rank).name for name in network.feeds}
            copy = _copied(build, graph, names | given, f"{prefix}mirror{axes}/" if axes else prefix)
            for output, head in heads.items():
                found = lift(build, copy[head.value])
                if head.activation is not None:
                    found = apply(head.activation, found, **({"axis": head.axis} if head.axis else {}))
                found = _mirrored(found, places, rank)
                if output in totals:  # stored here: what copies make does not wait for the last one
                    found = apply("Add", totals[output], found, runs_once=True)
                totals[output] = found
        if prefix:
            weights = weights if number else {}
            weights |= {prefix + name: source for name, source in network.imported.weights.items()}
    copies = len(networks) * len(flips)
    outputs = {output: (total / copies if copies > 1 else total).name for output, total in totals.items()}
    imported = replace(networks[0].imported, weights=weights)
    graph = replace(build.graph(), outputs=tuple(outputs.values()))
    return Network(imported=imported, graph=graph, feeds=feeds, outputs=outputs, labels=labels)


def network_of(weight: str) -> tuple[int, str]:
    """Return the number of the network that a weight is of, where there are several, and its name there.

    >>> network_of("/2/conv.weight")
    (2, 'conv.weight')
    """
    _, number, name = weight.split("/", 2)
    return int(number), name


def _heads(network: Network, member: Member, probabilities: bool) -> dict[str, _Head]:
    """Return what is predicted of each output; of deep supervision, the first alone."""
    loss, values = member.settings.loss, network.graph.values
    losses: dict[str, Loss] = {name: spec for name, (spec, _) in heads_of(member.model, loss).items()}
    if isinstance(loss, DeepSupervision):
        losses = dict(list(losses.items())[:1])
    found = {}
    for output, value in network.outputs.items():
        spec = losses.get(output)
        if isinstance(loss, DeepSupervision) and spec is None:
            continue
        activation = None if spec is None else activation_of(spec, values[value].shape)
        if activation is None and probabilities:
            what = "no loss" if spec is None else f"the loss {type(spec).__name__}"
            raise InputError(f"output '{output}' has {what}, which makes no probabilities; leave them out")
        if spec is None or activation is None:
            found[output] = _Head(value, values[value].shape, None, None)
            continue
        logits = logits_of(network, output, spec, member.settings)
        axis = _class_axis(network, member, spec, output, logits) if activation == "Softmax" else None
        found[output] = _Head(logits, values[logits].shape, activation, axis)
    return found


def _class_axis(network: Network, member: Member, spec: Loss, output: str, logits: str) -> int:
    """Return the axis of the classes that the loss compared in training."""
    shape, labels = network.graph.values[logits].shape, member.labels[output]
    if isinstance(spec, CTC):
        return len(shape) - 1
    inputs = {network.graph.values[name].shape[2:] for name in network.feeds}
    alike = not labels and len(shape) > 2 and shape[2:] in inputs
    axis = 1 if alike else class_axis(shape, (shape[0], *labels[1:]))
    if axis is None:
        raise InputError(
            f"output '{output}' of shape {list(shape)} has classes on an unknown axis, as labels had the shape "
            f"{list(labels)} in training; give samples of that size, or take no probabilities, nor means"
        )
    return axis


def _check_alike(first: Mapping[str, _Head], heads: Mapping[str, _Head], number: int) -> None:
    """Raise InputError if networks predict different things."""
    told, others = (
        {name: (list(head.shape), head.activation, head.axis) for name, head in some.items()}
        for some in (first, heads)
    )
    if told != others:
        raise InputError(
            f"run {number + 1} predicts {others}, and run 1 {told}: a mean is of equal outputs; leave it out"
        )


def _declared(build: Builder, graph: Graph, prefix: str) -> dict[str, str]:
    """Declare what no node makes, once for all copies of a graph; returns what it is called there.

    Networks do not share inputs: all would compute at once what they read them for, and hold it.
    """
    made = {output for node in graph.nodes for output in node.outputs}
    names = {name: prefix + name for name in graph.values if name not in made}
    build.values |= {own: replace(graph.values[name], name=own) for name, own in names.items()}
    build.constants |= {names[name]: array for name, array in graph.constants.items()}
    return names


def _copied(build: Builder, graph: Graph, names: Mapping[str, str], prefix: str) -> Mapping[str, str]:
    """Add a copy of all nodes, which read ``names``; returns what each value is called there."""
    names = dict(names)
    for node in graph.nodes:
        names |= {output: prefix + output for output in node.outputs}
        inputs, outputs = (tuple(names[name] for name in some) for some in (node.inputs, node.outputs))
        build.nodes.append(Node(prefix + node.name, node.op, inputs, outputs, node.attrs))
        for output in node.outputs:
            build.values[names[output]] = replace(graph.values[output], name=names[output])
    return names


def _mirrored(x: Lifted, axes: Sequence[int], rank: int) -> Lifted:
    """Add a value mirrored along axes; one without spatial axes stays as it is."""
    if len(x.shape) > 2 and len(x.shape) != rank and axes:
        raise InputError(
            f"mirror is for values of {rank} axes, as the largest input has, or without spatial ones, and "
            f"'{x.name}' has the shape {list(x.shape)}; leave mirror out"
        )
    for axis in axes if len(x.shape) == rank else ():
        x = apply("Reverse", x, axis=axis)
    return x
