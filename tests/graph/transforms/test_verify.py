"""Every promise that transforms give each other: a sound graph is let through, and each breach is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oocdl.errors import GraphError
from oocdl.graph.ir.graph import Graph, Role, Value
from oocdl.graph.ir.index import Plain
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.bfloat16 import bfloat16_of, use_bfloat16
from oocdl.graph.transforms.channels_last import channels_last
from oocdl.graph.transforms.factorize import Factored, factorize
from oocdl.graph.transforms.verify import verify, verify_factored
from oocdl.ops import RULES


def sound() -> Graph:
    """``loss = sum(relu(x @ w) * 2)`` and ``w <- w - w``; the sum goes through a Reshape that disappears."""
    build = Builder(RULES)
    x = build.value("x", (2, 6), "float32", Role.INPUT)
    w = build.value("w", (6, 12), "float32", Role.WEIGHT)
    [product] = build.node("Einsum", (x, w), {"equation": "ab,bc->ac"}, ["product"], "product")
    [active] = build.node("Relu", (product,), names=["active"], label="active")
    two = build.constant(2.0, stem="two")
    [twice] = build.node("Mul", (active, two), names=["twice"], label="twice")
    [split] = build.node("Reshape", (twice,), {"shape": (2, 3, 4)}, ["split"], "split")
    [total] = build.node("ReduceSum", (split,), {"axes": (0, 1, 2)}, ["total"], "total")
    [loss] = build.node("Reshape", (total,), {"shape": ()}, ["loss"], "loss")
    build.updates[w] = build.node("Sub", (w, w), names=["w/next"], label="w/next")[0]
    build.outputs = [loss]
    return build.graph()


def with_values(graph: Graph, *values: Value) -> Graph:
    return replace(graph, values={**graph.values, **{value.name: value for value in values}})


def changed(**changes: Any) -> Callable[[Any], Any]:
    return lambda made: replace(made, **changes)


def node_with(which: str, /, **changes: Any) -> Callable[[Graph], Graph]:
    """Change one node of a graph."""

    def change(graph: Graph) -> Graph:
        nodes = (replace(node, **changes) if node.name == which else node for node in graph.nodes)
        return replace(graph, nodes=tuple(nodes))

    return change


def without_values(graph: Graph, *names: str) -> Graph:
    return replace(graph, values={name: value for name, value in graph.values.items() if name not in names})


def test_a_sound_graph_is_let_through() -> None:
    verify(sound(), RULES, "import", ["loss", "x"])


BREACHES: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "order": (
        lambda graph: replace(graph, nodes=graph.nodes[::-1]),
        "node 'loss' (Reshape) reads 'total', which nothing before it makes"),
    "unknown input": (
        node_with("active", inputs=("lost",)),
        "node 'active' (Relu) reads 'lost', which nothing before it makes"),
    "made twice": (
        node_with("twice", outputs=("active",)), "node 'twice' (Mul) makes 'active', which is there already"),
    "a source that is made": (
        node_with("active", outputs=("w",)), "node 'active' (Relu) makes 'w', which is there already"),
    "nameless result": (
        lambda graph: without_values(graph, "active"),
        "node 'active' (Relu) makes 'active', which is no value"),
    "two nodes of one name": (
        node_with("twice", name="active"), "node 'active' (Mul) has the name of another"),
    "no producer": (
        lambda graph: with_values(graph, Value("dead", (3,), "float32")),
        "value 'dead' of role activation has no node that makes it"),
    "no rule": (node_with("active", op="Rectify"), "node 'active' (Rectify) has no rule"),
    "refused by the rule": (
        node_with("split", attrs={"shape": (5, 5)}), "node 'split' (Reshape) is refused by its rule: "),
    "another shape": (
        lambda graph: with_values(graph, Value("active", (2, 1), "float32")),
        "node 'active' (Relu) makes float32 [2, 12] by its rule, but float32 [2, 1] is recorded"),
    "another dtype": (
        lambda graph: with_values(graph, Value("active", (2, 12), "float64")),
        "node 'active' (Relu) makes float32 [2, 12] by its rule, but float64 [2, 12] is recorded"),
    "fewer results": (
        lambda graph: node_with("loss", outputs=())(without_values(graph, "loss")),
        "node 'loss' (Reshape) makes float32 [] by its rule, but  is recorded"),
    "a value of another name": (
        lambda graph: replace(graph, values={**graph.values, "x": replace(graph.values["x"], name="y")}),
        "value 'x' is named 'y'"),
    "a constant without contents": (changed(constants={}), "value 'two' of role constant has no contents"),
    "contents of what is no constant": (
        lambda graph: replace(graph, constants={**graph.constants, "x": np.zeros((2, 6), "float32")}),
        "value 'x' of role input has constant contents"),
    "contents of another shape": (
        changed(constants={"two": np.zeros(3, "float32")}),
        "constant 'two' is float32 [], its contents are float32 [3]"),
    "contents of another dtype": (
        changed(constants={"two": np.zeros((), "float64")}),
        "constant 'two' is float32 [], its contents are float64 []"),
    "contents of nothing": (
        lambda graph: replace(graph, constants={**graph.constants, "three": np.zeros(())}),
        "constant contents 'three' belong to no value"),
    "unknown output": (changed(outputs=("loss", "accuracy")), "output 'accuracy' is no value"),
    "an update of nothing": (
        lambda graph: replace(graph, updates={**graph.updates, "v": "w/next"}),
        "'v' has an update, but is no weight, state or sum"),
    "an update of what stays": (
        changed(updates={"x": "x"}), "'x' has an update, but is no weight, state or sum"),
    "an unknown update": (changed(updates={"w": "w/after"}), "the update 'w/after' of 'w' is no value"),
    "an update of another shape": (
        changed(updates={"w": "active"}), "'w' is float32 [6, 12], its update 'active' is float32 [2, 12]"),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_every_breach_is_found_and_named(breach: str) -> None:
    spoil, problem = BREACHES[breach]
    with pytest.raises(GraphError) as caught:
        verify(spoil(sound()), RULES, "canonicalize")
    assert str(caught.value).startswith(f"after 'canonicalize': {problem}")
    assert str(caught.value).endswith("; this is a defect of oocdl, please report it")


def test_a_name_that_others_ask_for_has_to_be_a_value() -> None:
    with pytest.raises(GraphError, match="after 'keep': name 'hidden' is no value"):
        verify(sound(), RULES, "keep", ["loss", "hidden"])


def test_products_of_bfloat16_and_what_they_leave_behind_are_sound() -> None:
    graph = use_bfloat16(sound(), RULES, ["active"], products=True)
    verify(graph, RULES, "bfloat16")
    assert bfloat16_of("x") in graph.values
    assert graph.values["product"].dtype == "float32"  # bfloat16 is summed in float32


def factored() -> Factored:
    return channels_last(factorize(sound(), RULES), RULES)


def convolution() -> Factored:
    """A convolution whose data have their channels last."""
    build = Builder(RULES)
    x = build.value("x", (2, 8, 5, 5), "float32", Role.INPUT)
    w = build.value("w", (8, 8, 3, 3), "float32", Role.WEIGHT)
    ones = (1, 1)
    build.outputs = [build("Conv", x, w, strides=ones, dilations=ones, pads=(1, 1, 1, 1))]
    return channels_last(factorize(build.graph(), RULES), RULES)


def with_view(made: Factored, **changes: Any) -> Factored:
    """Change what the Einsum, which comes first, sees of ``x``."""
    first, *cells = made.cells
    view = replace(first.inputs[0], **changes)
    return replace(made, cells=(replace(first, inputs=(view, first.inputs[1])), *cells))


def test_a_sound_factored_graph_is_let_through() -> None:
    made = factored()
    assert made.stored("split") == "twice" and made.shapes["twice"] == (2, 3, 4)
    verify_factored(made, "factorize")
    assert convolution().orders["x"] == (0, 2, 3, 1)
    verify_factored(convolution(), "channels last")


FACTORED: dict[str, tuple[Callable[[Factored], Factored], str]] = {
    "factors of another shape": (
        lambda made: replace(made, factors={**made.factors, "x": ((2,), (3, 3))}),
        "value 'x' of shape [2, 6] has factors [(2,), (3, 3)]"),
    "no factors": (
        lambda made: replace(made, factors={name: f for name, f in made.factors.items() if name != "x"}),
        "value 'x' of shape [2, 6] has factors []"),
    "an alias of what is not stored": (
        lambda made: replace(made, alias={**made.alias, "split": "elsewhere"}),
        "value 'split' is stored as 'elsewhere', which is not stored"),
    "an alias of an alias": (
        lambda made: replace(made, alias={**made.alias, "twice": "split"}),
        "value 'twice' is stored as 'split', which is not stored"),
    "an alias of other factors": (
        lambda made: replace(made, alias={**made.alias, "split": "x"}),
        "value 'split' has factors [(2,), (3,), (4,)], but is stored as 'x' of shape [2, 6]"),
    "an alias of another dtype": (
        lambda made: replace(made, graph=with_values(made.graph, Value("split", (2, 3, 4), "bfloat16"))),
        "value 'split' is bfloat16, but is stored as 'twice' of float32"),
    "another shape": (
        lambda made: replace(made, shapes={**made.shapes, "x": (6, 2)}),
        "value 'x' has factors [(2,), (6,)], but is stored as 'x' of shape [6, 2]"),
    "nothing is stored": (
        lambda made: replace(made, shapes={**made.shapes, "y": (6, 2)}),
        "'y' is stored, but is no value, or another is stored in its place"),
    "stored twice": (
        lambda made: replace(made, shapes={**made.shapes, "split": (2, 3, 4)}),
        "'split' is stored, but is no value, or another is stored in its place"),
    "a lost cell": (
        lambda made: replace(made, cells=made.cells[1:]),
        "cells are not the nodes that are left, in their order"),
    "a view of another value": (
        lambda made: with_view(made, value="w"), "node 'product' (Einsum) sees 'x' as 'w', not as 'x'"),
    "a view of another shape": (
        lambda made: with_view(made, shape=(6, 2)), "node 'product' (Einsum) sees 'x' as of shape [6, 2]"),
    "a view of some axes": (
        lambda made: with_view(made, positions=((0,), ())),
        "node 'product' (Einsum) sees 'x' by the stored axes [(0,), ()] of 2"),
    "too few indices": (
        lambda made: with_view(made, indices=((), made.cells[0].inputs[0].indices[1])),
        "node 'product' (Einsum) sees 'x' by 0 indices for 1 stored axes"),
    "a letter of another extent": (
        lambda made: with_view(made, indices=made.cells[0].inputs[0].indices[::-1]),
        "node 'product' (Einsum) sees 'x' by Plain(letter='b') where its extent is 2"),
    "an unknown letter": (
        lambda made: with_view(made, indices=((Plain("q"),), made.cells[0].inputs[0].indices[1])),
        "node 'product' (Einsum) sees 'x' by Plain(letter='q') where its extent is 2"),
    "an order of what is not stored": (
        changed(orders={"split": (0, 1, 2)}), "'split' has an order in memory, but is not stored"),
    "no permutation": (
        changed(orders={"x": (0, 0)}), "'x' has order [0, 0], which is no permutation of its axes"),
}  # fmt: skip


@pytest.mark.parametrize("breach", FACTORED)
def test_every_breach_of_a_factored_graph_is_found_and_named(breach: str) -> None:
    spoil, problem = FACTORED[breach]
    with pytest.raises(GraphError) as caught:
        verify_factored(spoil(factored()), "factorize")
    assert str(caught.value).startswith(f"after 'factorize': {problem};")
