"""Checks what holds for every graph, whichever transform made it; the recipe does so for those it ends with.

Each transform relies on what the one before it promised; a broken promise would otherwise show as
wrong numbers, or as a KeyError in another module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod

from oocdl.errors import GraphError, ModelError
from oocdl.graph.ir.graph import Graph, Node, Role, Value
from oocdl.graph.ir.index import Index, Plain, Whole
from oocdl.graph.ir.op_rule import Rules, Spec
from oocdl.graph.transforms.factorize import Cell, Factored, View

MADE = (Role.ACTIVATION, Role.GRADIENT)
"""Roles of values that nodes make; values of all other roles come from outside the graph."""
REPLACED = (Role.WEIGHT, Role.STATE, Role.SUM)
"""Roles of values that an update may replace."""


def verify(graph: Graph, rules: Rules, after: str, names: Iterable[str] = ()) -> None:
    """Raise GraphError, which names the transform ``after`` which it was found, if ``graph`` is not sound.

    In a sound graph each value has exactly one producer, or a role that needs none, and is made before
    it is read; each node's operator has a rule, and shapes and dtypes are those that it infers;
    constants have contents; outputs are values, and so are ``names`` (others ask for them) and updates,
    of the shape and dtype of what they replace.
    """
    _raise_first(chain(_values(graph), _nodes(graph, rules), _results(graph, names)), after)


def verify_factored(factored: Factored, after: str) -> None:
    """Raise GraphError if ``factored`` is not sound; the graph inside it is left to ``verify``.

    In a sound one each value is stored by its factors, itself or under the name of another of the same
    factors; cells are the nodes that are left, and see stored values by all of their axes, in
    letters of the right extents; orders are permutations.
    """
    _raise_first(chain(_stored(factored), _cells(factored), _orders(factored)), after)


def _raise_first(problems: Iterator[str], after: str) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise GraphError(f"after '{after}': {problem}; this is a defect of oocdl, please report it")


def _spec(value: Value) -> Spec:
    return value.shape, value.dtype


def _text(specs: Sequence[Spec]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in specs)


def _values(graph: Graph) -> Iterator[str]:
    for name, value in graph.values.items():
        if value.name != name:
            yield f"value '{name}' is named '{value.name}'"
        array = graph.constants.get(name)
        if (array is None) == (value.role is Role.CONSTANT):
            yield f"value '{name}' of role {value.role} has {'no' if array is None else 'constant'} contents"
        elif array is not None and (array.shape, array.dtype.name) != _spec(value):
            spec = _text([(array.shape, array.dtype.name)])
            yield f"constant '{name}' is {_text([_spec(value)])}, its contents are {spec}"
    for name in graph.constants:
        if name not in graph.values:
            yield f"constant contents '{name}' belong to no value"


def _nodes(graph: Graph, rules: Rules) -> Iterator[str]:
    names: set[str] = set()
    known = {name for name, value in graph.values.items() if value.role not in MADE}
    for node in graph.nodes:
        label = f"node '{node.name}' ({node.op})"
        if node.name in names:
            yield f"{label} has the name of another"
        names.add(node.name)
        for name in node.inputs:
            if name not in known:
                yield f"{label} reads '{name}', which nothing before it makes"
        for name in node.outputs:
            if name in known:
                yield f"{label} makes '{name}', which is there already"
            if name not in graph.values:
                yield f"{label} makes '{name}', which is no value"
            known.add(name)
        yield from (f"{label} {problem}" for problem in _inference(graph, node, rules))
    for name, value in graph.values.items():
        if name not in known:
            yield f"value '{name}' of role {value.role} has no node that makes it"


def _inference(graph: Graph, node: Node, rules: Rules) -> Iterator[str]:
    """Yield the problem if a node's outputs have other shapes or dtypes than its rule infers."""
    rule = rules.get(node.op)
    if rule is None:
        yield "has no rule"
        return
    try:
        results = rule.infer(node, [graph.values[name] for name in node.inputs])
    except ModelError as error:
        yield f"is refused by its rule: {error}"
        return
    inferred = [(tuple(shape), dtype) for shape, dtype in results]
    recorded = [_spec(graph.values[name]) for name in node.outputs]
    if inferred != recorded:
        yield f"makes {_text(inferred)} by its rule, but {_text(recorded)} is recorded"


def _results(graph: Graph, names: Iterable[str]) -> Iterator[str]:
    for kind, wanted in (("output", graph.outputs), ("name", names)):
        for name in wanted:
            if name not in graph.values:
                yield f"{kind} '{name}' is no value"
    for name, new in graph.updates.items():
        if name not in graph.values or graph.values[name].role not in REPLACED:
            yield f"'{name}' has an update, but is no weight, state or sum"
        elif new not in graph.values:
            yield f"the update '{new}' of '{name}' is no value"
        elif _spec(graph.values[new]) != _spec(graph.values[name]):
            specs = [_text([_spec(graph.values[value])]) for value in (name, new)]
            yield f"'{name}' is {specs[0]}, its update '{new}' is {specs[1]}"


def _stored(factored: Factored) -> Iterator[str]:
    values = factored.graph.values
    for name, value in values.items():
        factors = factored.factors.get(name, ())
        if tuple(map(prod, factors)) != value.shape:
            yield f"value '{name}' of shape {list(value.shape)} has factors {list(factors)}"
        stored = factored.stored(name)
        if stored not in factored.shapes or stored not in values:
            yield f"value '{name}' is stored as '{stored}', which is not stored"
        elif factored.shapes[stored] != tuple(chain.from_iterable(factors)):
            shape = list(factored.shapes[stored])
            yield f"value '{name}' has factors {list(factors)}, but is stored as '{stored}' of shape {shape}"
        elif values[stored].dtype != value.dtype:
            yield f"value '{name}' is {value.dtype}, but is stored as '{stored}' of {values[stored].dtype}"
    for name in factored.shapes:
        if name not in values or factored.stored(name) != name:
            yield f"'{name}' is stored, but is no value, or another is stored in its place"


def _cells(factored: Factored) -> Iterator[str]:
    left = [node for node in factored.graph.nodes if not set(node.outputs) <= factored.alias.keys()]
    if [cell.node.name for cell in factored.cells] != [node.name for node in left]:
        yield "cells are not the nodes that are left, in their order"
    sound: set[tuple[object, ...]] = set()
    for cell in factored.cells:
        for names, views in ((cell.node.inputs, cell.inputs), (cell.node.outputs, cell.outputs)):
            for name, view in zip(names, views, strict=True):
                # Nodes alike share what their views consist of.
                axes = id(view.positions), id(view.indices), id(cell.extents), factored.shapes.get(view.value)
                problem = _name(factored, name, view) or (axes not in sound and _view(factored, cell, view))
                if not problem:
                    sound.add(axes)
                else:
                    yield f"node '{cell.node.name}' ({cell.node.op}) sees '{name}' {problem}"


def _name(factored: Factored, name: str, view: View) -> str:
    """Return what a view of the value ``name`` is instead; empty if it is that."""
    if view.value != factored.stored(name):
        return f"as '{view.value}', not as '{factored.stored(name)}'"
    if view.shape != factored.graph.values[name].shape:
        return f"as of shape {list(view.shape)}"
    return ""


def _view(factored: Factored, cell: Cell, view: View) -> str:
    """Return what is wrong with the axes of a cell's view; empty if nothing is."""
    shape = factored.shapes[view.value]
    if tuple(chain.from_iterable(view.positions)) != tuple(range(len(shape))):
        return f"by the stored axes {list(view.positions)} of {len(shape)}"
    for positions, indices in zip(view.positions, view.indices, strict=True):
        if len(indices) != max(len(positions), 1):
            return f"by {len(indices)} indices for {len(positions)} stored axes"
        for position, index in zip(positions, indices, strict=False):
            if not _fits(cell, index, shape[position]):
                return f"by {index} where its extent is {shape[position]}"
    return ""


def _fits(cell: Cell, index: Index | None, extent: int) -> bool:
    """Whether an index has a letter of the cell; where it is that letter, it has to have the right extent."""
    if index is None or isinstance(index, Whole):
        return True
    known = cell.extents.get(index.letter)
    return known == extent if isinstance(index, Plain) else known is not None


def _orders(factored: Factored) -> Iterator[str]:
    for name, order in factored.orders.items():
        if name not in factored.shapes:
            yield f"'{name}' has an order in memory, but is not stored"
        elif sorted(order) != list(range(len(factored.shapes[name]))):
            yield f"'{name}' has order {list(order)}, which is no permutation of its axes"
