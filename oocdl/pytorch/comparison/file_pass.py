"""Runs the network of a file forward and backward on whole arrays, as its graph says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.torch.torch_engine import Step
from oocdl.engines.torch.transfer import to_torch
from oocdl.graph.ir.graph import Array, Graph, Role, is_float
from oocdl.graph.ir.index import as_slices
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.ir.operands import endings
from oocdl.graph.onnx.reader import Imported, OnnxModel
from oocdl.graph.partition.tiling import whole_unit
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.graph.transforms.factorize import Factored, factorize
from oocdl.ops.registry import RULES
from oocdl.ops.sequences.written_out import with_attention
from oocdl.pytorch.comparison.modes import Draw, draws_of
from oocdl.pytorch.module_calls import Tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class Pass:
    """A network at given sizes, ready to run: outputs, and in training gradients and updates."""

    imported: Imported
    graph: Graph
    factored: Factored
    results: Mapping[str, str]
    """``output NAME``, ``gradient NAME`` or ``update NAME`` -> value of the graph."""
    cotangents: Mapping[str, str]
    """Output -> the value that holds the gradient that it is given."""
    draws: tuple[Draw, ...]

    def run(
        self, held: Tensors, given: Tensors, random: Tensors, look: Callable[[Tensor], object] | None = None
    ) -> dict[str, Tensor]:
        """Compute everything; returns results by the titles of ``results``.

        ``held``: contents by initializer; ``given``: inputs and, by output, cotangents. ``look`` is called
        with every value on the way.
        """
        arrays: dict[str, Array] = {name: np.asarray(data) for name, data in self.graph.constants.items()}
        arrays |= {name: x.detach().numpy() for name, x in {**held, **random}.items()}
        arrays |= {self.cotangents.get(name, name): x.detach().numpy() for name, x in given.items()}
        wanted = list(dict.fromkeys(self.factored.stored(value) for value in self.results.values()))
        sources = [name for name in wanted if name in arrays]
        unit = whole_unit(self.factored, RULES, [name for name in wanted if name not in sources])
        program = without_group_axes(unit.program)
        slots: dict[int, Tensor] = {}
        for slot, (name, region) in zip(program.inputs, unit.reads, strict=True):
            array = np.asarray(arrays[name], self.graph.values[name].dtype)
            read = array.reshape(self.factored.shapes[name])[as_slices(region)]
            slots[slot] = to_torch(np.asarray(read))
        with torch.inference_mode():
            for item, ending in zip(program.instructions, endings(program), strict=True):
                Step(item, ()).run(slots, {})
                for slot in item.outputs if look is not None else ():
                    look(slots[slot])  # type: ignore[misc]
                for slot in ending:
                    del slots[slot]
        stored = {name: slots[end.slot] for (name, _), end in zip(unit.makes, program.outputs, strict=True)}
        stored |= {name: to_torch(arrays[name]) for name in sources}
        return {
            title: stored[self.factored.stored(value)].reshape(self.graph.values[value].shape).clone()
            for title, value in self.results.items()
        }


def training_pass(model: OnnxModel, shapes: Mapping[str, tuple[int, ...]], precision: str) -> Pass:
    """The network as it is trained: outputs, gradients of all that is trained, updates of its statistics."""
    imported = model.bind(RULES, shapes, precision=precision, training=True)
    build = Builder(RULES, _with_attention(imported))
    cotangents, total = {}, None
    for name, value in imported.outputs:
        if not is_float(build.dtype(value)):
            continue
        shape = build.shape(value)
        cotangents[name] = build.value(f"cotangent/{name}", shape, build.dtype(value), Role.TARGET)
        part = build("Mul", value, cotangents[name])
        part = build("ReduceSum", part, axes=tuple(range(len(shape)))) if shape else part
        part = build("Reshape", part, shape=())
        total = part if total is None else build("Add", total, part)
    trained = [v.name for v in imported.graph.of_role(Role.WEIGHT) if v.name not in imported.frozen]
    build.role = Role.GRADIENT
    gradients = {} if total is None else differentiate(build, total, trained)
    results = {f"output {name}": value for name, value in imported.outputs}
    results |= {f"gradient {name}": value for name, value in gradients.items()}
    results |= {f"update {name}": value for name, value in build.updates.items()}
    return _ready(imported, build.graph(), results, cotangents)


def inference_pass(model: OnnxModel, shapes: Mapping[str, tuple[int, ...]], precision: str) -> Pass:
    """The network as it predicts: outputs only."""
    imported = model.bind(RULES, shapes, precision=precision, training=False)
    results = {f"output {name}": value for name, value in imported.outputs}
    return _ready(imported, _with_attention(imported), results, {})


def _with_attention(imported: Imported) -> Graph:
    outputs = tuple(dict.fromkeys(value for _, value in imported.outputs))
    return with_attention(replace(imported.graph, outputs=outputs), RULES, set(imported.inputs))


def _ready(
    imported: Imported, graph: Graph, results: Mapping[str, str], cotangents: Mapping[str, str]
) -> Pass:
    small = canonicalize(replace(graph, outputs=tuple(results.values()), updates={}), RULES)
    return Pass(
        imported=imported,
        graph=small,
        factored=factorize(small, RULES),
        results=dict(zip(results, small.outputs, strict=True)),
        cotangents=cotangents,
        draws=draws_of(imported.graph),
    )
