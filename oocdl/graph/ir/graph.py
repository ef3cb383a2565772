"""The intermediate representation: values, nodes, graphs. Frozen data, no behaviour.

One graph holds forward, loss, gradients and update. Transforms read a graph and return another.
Importers make nodes by ``Builder`` only, so every value has its shape and dtype from the moment it exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oocdl.errors import ModelError

assert ml_dtypes.bfloat16  # importing it has told NumPy the name
Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Attrs = Mapping[str, Any]


class Role(StrEnum):
    """The purpose of a value, which decides where its bytes come from and go to."""

    INPUT = "input"  # read from the dataset, by region
    TARGET = "target"  # read from the dataset, by region
    WEIGHT = "weight"  # versioned in the run, replaced by an update
    STATE = "state"  # optimizer state and running statistics, as weights
    SUM = "sum"  # gradients of a step's earlier passes; zeros in its first, never part of the run
    CONSTANT = "constant"  # a small array of the graph
    SCALAR = "scalar"  # one number a step: learning rate, bias correction
    RANDOM = "random"  # counter-based, keyed by (seed, pass, value, global index)
    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: a description, without contents."""

    name: str
    shape: Shape
    dtype: str
    """A NumPy dtype name: ``float32``, ``float64``, ``bfloat16``, ``int64``, ``bool``."""
    role: Role = Role.ACTIVATION

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole value."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on whole values, given by name. ``attrs`` are plain Python data and never change."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Graph:
    """Values and nodes in topological order."""

    values: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    """Names of the values that must be computed, updates aside: model outputs, or losses."""
    constants: Mapping[str, Array] = field(default_factory=dict)
    """Value of role CONSTANT -> its contents."""
    updates: Mapping[str, str] = field(default_factory=dict)
    """Weight or state -> the value that replaces it at the end of the step."""

    def of_role(self, *roles: Role) -> list[Value]:
        """Return the values that have one of ``roles``, in order of creation."""
        return [value for value in self.values.values() if value.role in roles]

    def consumers(self) -> dict[str, list[Node]]:
        """Return value name -> the nodes that read it, each once."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers.setdefault(name, []).append(node)
        return readers


def needed(graph: Graph, kept: Iterable[str] = ()) -> Graph:
    """Return the graph with the nodes that outputs and updates need, their values, and those of ``kept``."""
    live, nodes = {*graph.outputs, *graph.updates.values()}, []
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.inputs)
            nodes.append(node)
    live.update(kept, *(node.outputs for node in nodes))
    values = {name: value for name, value in graph.values.items() if name in live}
    constants = {name: array for name, array in graph.constants.items() if name in live}
    return replace(graph, values=values, nodes=tuple(nodes[::-1]), constants=constants)


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Return a node with what ``names`` has called otherwise: itself, its inputs and its outputs."""
    return replace(
        node,
        name=names.get(node.name, node.name),
        inputs=tuple(names.get(name, name) for name in node.inputs),
        outputs=tuple(names.get(name, name) for name in node.outputs),
    )


def is_float(dtype: str) -> bool:
    """Whether values of this dtype can have gradients."""
    return dtype.startswith(("float", "bfloat"))


def normalize_axis(axis: int, rank: int) -> int:
    """Return an axis counted from the first; raises ModelError for one that a value of ``rank`` lacks."""
    if not -rank <= axis < rank:
        raise ModelError(f"axis {axis} is not one of the {rank} axes of its operand")
    return axis % rank
