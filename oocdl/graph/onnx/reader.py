"""ONNX files: what is in them, and the graph they become under given sizes.

All shapes follow from these by our rules; what a file says of sizes is a default for its inputs, and no more.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import Graph, Role, Shape, needed
from oocdl.graph.ir.op_rule import Builder, Rules
from oocdl.graph.onnx.baked import note_resized
from oocdl.graph.onnx.bodies import (
    FINAL,
    MOVES,
    activations_last,
    every_node,
    results_of_bodies,
    softmax_axes,
    without_functions,
)
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.checks import check
from oocdl.graph.onnx.context import Context, all_of
from oocdl.graph.onnx.input_sizes import EXPORT_OPEN, other_sizes, sizes_of
from oocdl.graph.onnx.lowering import lower_nodes, lowerings, reads, supported
from oocdl.graph.onnx.metadata import ExactNumbers, read_metadata
from oocdl.graph.onnx.model_file import OnnxNode, Port, load, nodes_of, port_of, shown, size_text, words
from oocdl.graph.onnx.onnx_file import OnnxFile, TracedFile, module_path
from oocdl.graph.onnx.own_operators import DETACH, OWN
from oocdl.graph.onnx.roles import OF_PYTORCH, evaluated, has_one_bias, role_of
from oocdl.graph.onnx.signs import Remark
from oocdl.graph.onnx.tensors import WeightSource, source
from oocdl.graph.onnx.trained import Trained, record_of
from oocdl.graph.onnx.whole_numbers import typed

__all__ = ["Imported", "OnnxModel", "Port", "WeightSource", "inspect_onnx", "lowerings", "supported"]

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"


@dataclass(frozen=True, eq=False, kw_only=True)
class Imported:
    """A model under given sizes, as a graph."""

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, str], ...]
    """(name in the file, value of the graph)"""
    weights: Mapping[str, WeightSource]
    """Initial contents of every value of role WEIGHT or STATE."""
    frozen: tuple[str, ...]
    """Weights that are never updated: ``freeze`` names them, or the file's metadata says so."""
    names: Mapping[str, str]
    """Name in the file -> value of the graph, for everything that has one."""
    final_activation: Mapping[str, str]
    """Output -> the Softmax, LogSoftmax or Sigmoid it ends in."""
    logits: Mapping[str, str]
    """Output -> the value before that, where nothing moves numbers after it."""
    softmax_axes: Mapping[str, Sequence[int]]
    """Output -> the axes of that value that its Softmax or LogSoftmax takes as one; none if it is no such."""
    trained: Trained
    """Part of each tensor and the reason for it, with remarks that the user should see."""
    rebatched: bool = False
    """Whether constants of the file were read as the size of the batch."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Node -> the path of the module that it is of, where the file knows it."""


def inspect_onnx(path: str | Path) -> OnnxModel:
    """Parse and check an ONNX file; no weight is read."""
    path = Path(path).absolute()
    model, spans = load(path)
    model = without_functions(model, {*OWN, DETACH})
    opset = check(model, OWN)
    initializers = {
        tensor.name: source(tensor, path, spans.get(index))
        for index, tensor in enumerate(model.graph.initializer)
    }
    said: dict[str, dict[str, str]] = defaultdict(dict)
    for info in model.graph.value_info:
        for entry in info.metadata_props:
            said[entry.key][info.name] = entry.value
    ends, nodes = {info.name for info in model.graph.output}, nodes_of(model.graph)
    metadata = read_metadata(model, initializers, nodes)
    exact = ExactNumbers(metadata.numbers) if metadata is not None else None
    nodes = nodes if exact is None else tuple(map(exact.node, nodes))
    return OnnxModel(
        path=path,
        opset=opset,
        producer=model.producer_name,
        inputs=tuple(port_of(info) for info in model.graph.input if info.name not in initializers),
        outputs=tuple(port_of(info, True) for info in model.graph.output),
        nodes=activations_last(nodes, ends, opset),
        initializers=initializers,
        kinds=said[_KIND],
        folded={name: words(text) for name, text in said[_FOLDED].items() if name in initializers},
        metadata=metadata,
        exact=exact,
    )


class OnnxModel(OnnxFile):
    """A checked ONNX file that graphs are made of."""

    def bind(
        self,
        rules: Rules,
        shapes: Mapping[str, Shape] | None = None,
        *,
        precision: str = "float32",
        training: bool = True,
        freeze: Sequence[str] = (),
        outputs: Collection[str] = (),
    ) -> Imported:
        """Make the graph of this model for inputs of the given shapes.

        ``freeze`` holds glob patterns of initializers. A BatchNorm whose running
        statistics it names uses them, and so does one that the file has in evaluation mode beside others in
        training mode; all others normalize by the batch. If the model is refused, it is made of nothing but
        what ``outputs`` need, where some are given.
        """
        try:
            return self._bind(rules, shapes, precision, training, freeze)
        except UnsupportedError as error:
            left_out = [shown(port.name) for port in self.outputs if port.name not in outputs]
            if not outputs or not left_out:
                raise
            found = self._only(outputs)._bind(rules, shapes, precision, training, freeze)
            text = f"output {', '.join(left_out)} is neither trained nor predicted: {error}"
            remarks = *found.trained.remarks, Remark(text, "take it out of the file")
            return replace(found, trained=replace(found.trained, remarks=remarks))

    def _only(self, outputs: Collection[str]) -> OnnxModel:
        """Return the model without other outputs, and without the nodes that only those need."""
        live, nodes = set(outputs), list[OnnxNode]()
        for node in reversed(self.nodes):
            if not live.isdisjoint(node.outputs):
                live |= reads(node)
                nodes.append(node)
        ports = tuple(port for port in self.outputs if port.name in outputs)
        return replace(self, outputs=ports, nodes=tuple(nodes[::-1]))

    def _bind(
        self,
        rules: Rules,
        shapes: Mapping[str, Shape] | None,
        precision: str,
        training: bool,
        freeze: Sequence[str],
    ) -> Imported:
        bound, traced = sizes_of(self.inputs, shapes or {})
        if self.metadata is not None:
            self.metadata.sizes.check(self.inputs, bound, training)
        before: Mapping[str, Shape] = {}
        batch: tuple[int, int] | None = None
        alone = True
        if traced != bound:
            reader = _Reader(self, rules, precision, False, freeze).run(traced)
            before = {name: reader.ctx.build.shape(value) for name, value in reader.values().items()}
            heads = {(traced[name][:1], bound[name][:1]) for name in bound}
            if len(heads) == 1:
                [[[old], [new]]] = heads
                batch = (old, new) if old != new else None
            alone = all(bound[name][1:] == traced[name][1:] for name in bound)
        elsewhere = other_sizes(self.inputs, bound)
        try:
            reader = _Reader(self, rules, precision, training, freeze, before, batch, alone)
            imported = reader.run(bound).imported()
        except ModelError as error:
            if not elsewhere:
                raise
            raise ModelError(f"{error} ({elsewhere.partition(':')[0]})") from error
        if not elsewhere:
            return imported
        remarks = *imported.trained.remarks, Remark(elsewhere, EXPORT_OPEN)
        return replace(imported, trained=replace(imported.trained, remarks=remarks))


class _Reader:
    def __init__(
        self,
        model: OnnxModel,
        rules: Rules,
        precision: str,
        training: bool,
        freeze: Sequence[str],
        traced: Mapping[str, Shape] | None = None,
        batch: tuple[int, int] | None = None,
        alone: bool = True,
    ) -> None:
        if precision not in ("float32", "float64"):
            raise ModelError(f"precision '{precision}' is not float32 or float64")
        self.model, self.freeze = model, freeze
        read = {name for node in every_node(model.nodes) for name in node.inputs}
        self._lowerings = lowerings(rules)
        self.ctx = Context(
            build=Builder(rules),
            precision=precision,
            training=training,
            opset=model.opset,
            frozen=lambda name: model.pattern_of(name, freeze) is not None,
            evaluated=evaluated(model),
            is_of_pytorch=model.metadata is not None or model.producer in OF_PYTORCH,
            facts=model.metadata.facts if model.metadata is not None else {},
            traced=traced or {},
            batch=batch,
            alone=alone,
            exact=model.exact,
            read=frozenset(read | {port.name for port in model.outputs} | results_of_bodies(model.nodes)),
            lower=lambda nodes: lower_nodes(self.ctx, self._lowerings, nodes),
        )
        self.weights: dict[str, WeightSource] = {}
        self.frozen: dict[str, None] = {}
        self.roles: dict[str, Role] = {}

    def run(self, shapes: Mapping[str, Shape]) -> _Reader:
        """Lower every node, or raise one error that names all nodes that cannot be lowered."""
        ctx = self.ctx
        self._declare(shapes)
        try:
            refused = lower_nodes(ctx, self._lowerings, self.model.nodes, top=True)
        except ModelError as error:
            node, text = ctx.node, str(error).replace("\n", "\\n").replace("\r", "\\r")
            named = re.search(rf"(?<!\w){re.escape(node.name.strip('/'))}(?!\w)", text)
            text = text if named else f"node {shown(node.name)} ({node.op}): {text}"
            raise ModelError(text) from error.__cause__
        if refused:
            own = any(item.op not in supported(ctx.build.rules) for item in refused)
            raise UnsupportedError(all_of(refused, own), refused)
        ctx.build.scope = ""
        return self

    def _declare(self, shapes: Mapping[str, Shape]) -> None:
        """Declare values for inputs and initializers; small constants are read."""
        ctx, build = self.ctx, self.ctx.build
        for port in self.model.inputs:
            number = np.dtype(port.dtype).kind
            dtype = "bool" if number == "b" else "int64" if number in "iu" else ctx.precision
            value = build.value(port.name, shapes[port.name], dtype, Role.INPUT)
            ctx.env[port.name] = typed(value, np.dtype(port.dtype))
            note_resized(ctx, port.name, shapes[port.name])
        for name, item in self.model.initializers.items():
            if name not in ctx.read:
                continue
            role = role_of(self.model, item)
            if role is Role.CONSTANT and item.is_float and item.nbytes > MOST_CONSTANT_BYTES:
                role = Role.WEIGHT  # a large table: streamed like a weight, never updated
                self.frozen[name] = None
            self.roles[name] = role
            if role is not Role.CONSTANT:
                self.weights[name] = item.astype(ctx.precision)
                fact = ctx.facts.get(name)
                untrained = fact is not None and fact.kind == "parameter" and not fact.requires_grad
                if untrained or ctx.frozen(name):
                    self.frozen[name] = None
                ctx.env[name] = build.value(name, item.shape, ctx.precision, role)
                if has_one_bias(self.model, item):
                    ctx.single_biases.add(name)
            elif item.nbytes > MOST_CONSTANT_BYTES:
                raise UnsupportedError(f"constant {shown(name)} of {size_text(item.nbytes)} is too large")
            else:
                ctx.env[name] = item.raw() if self.model.exact is None else self.model.exact.array(item.raw())

    def values(self) -> dict[str, str]:
        """Return name in the file -> value of the graph, for everything that became one."""
        return {name: str(made) for name, made in self.ctx.env.items() if isinstance(made, str)}

    def imported(self) -> Imported:
        """Return the result, without nodes and values that no output needs."""
        ctx, build = self.ctx, self.ctx.build
        outputs = []
        for port in self.model.outputs:
            made = ctx.env[port.name]
            if isinstance(made, list):
                raise ModelError(f"output {shown(port.name)} is a sequence; outputs have to be tensors")
            value = str(made) if isinstance(made, str) else ctx.store(made)
            if value not in build.makers:  # an input, say: units deliver what nodes make
                value = build("Cast", value, to=build.dtype(value))
            outputs.append((port.name, value))
        build.outputs = list(dict.fromkeys(value for _, value in outputs))
        inputs = tuple(port.name for port in self.model.inputs)
        graph = needed(build.graph(), (*inputs, *build.updates))
        values, ends = graph.values, self._ends()
        used = {name: r for name, r in self.roles.items() if r is Role.CONSTANT or name in values}
        file = TracedFile(model=self.model, roles=used, frozen=self.frozen.keys(), evaluated=ctx.evaluated)
        return Imported(
            graph=graph,
            inputs=inputs,
            outputs=tuple(outputs),
            weights={name: item for name, item in self.weights.items() if name in values},
            frozen=tuple(name for name in self.frozen if name in values),
            names={name: value for name, value in self.values().items() if value in values},
            final_activation={name: op for name, (op, _, _) in ends.items()},
            logits={name: value for name, (_, value, _) in ends.items() if value},
            softmax_axes={name: axes for name, (_, _, axes) in ends.items()},
            trained=record_of(file, self.freeze),
            rebatched=ctx.rebatched,
            modules={one.name.strip("/"): path for one in self.model.nodes if (path := module_path(one))},
        )

    def _ends(self) -> dict[str, tuple[str, str, Sequence[int]]]:
        """Return output -> its final activation, the value before, and the axes that it takes as one.

        Of an activation whose numbers are moved by what comes after, these are "" and none.
        """
        makers = {name: node for node in self.model.nodes for name in node.outputs}
        found = {}
        for port in self.model.outputs:
            node, moved = makers.get(port.name), False
            while node is not None and node.op in ("Identity", "Cast", *MOVES):
                moved |= node.op in MOVES
                node = makers.get(node.inputs[0])
            if node is not None and node.op in FINAL:
                value = self.ctx.env[node.inputs[0]]
                if isinstance(value, str):
                    alone, rank = moved or node.op == "Sigmoid", len(self.ctx.build.shape(value))
                    axes: Sequence[int] = () if alone else softmax_axes(node, self.model.opset, rank)
                    found[port.name] = (node.op, "" if moved else value, axes)
        return found
