"""Rewrites before cutting: what must go, and what must stay."""

from __future__ import annotations

import torch

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.ops import RULES
from tests.kit.interpret import evaluate


def start() -> tuple[Builder, str]:
    build = Builder(RULES)
    return build, build.value("x", (2, 3), "float64", Role.INPUT)


def finish(build: Builder, *outputs: str) -> tuple[Graph, list[str]]:
    """The expanded graph, checked to give the same values, and its operators."""
    build.outputs = list(outputs)
    before, after = build.graph(), canonicalize(build.graph(), RULES)
    given = {
        value.name: torch.arange(value.size, dtype=torch.float64).reshape(value.shape)
        for value in before.of_role(Role.INPUT, Role.WEIGHT)
    }
    first, second = evaluate(before, given), evaluate(after, given)
    for old, new in zip(before.outputs, after.outputs, strict=True):
        torch.testing.assert_close(first[old], second[new])
    for key, value in before.updates.items():
        torch.testing.assert_close(first[value], second[after.updates[key]])
    return after, [node.op for node in after.nodes]


def test_composites_keep_the_names_of_their_outputs() -> None:
    build, x = start()
    parts = build.node("Split", [build("Softmax", x, axis=1)], {"axis": 1, "sizes": (1, 2)}, names=["a", "b"])
    graph, ops = finish(build, *parts)
    assert graph.outputs == ("a", "b")
    assert ops == ["ReduceMax", "Sub", "LogSumExp", "Sub", "Exp", "Slice", "Slice"]


def test_twins_merge_with_their_constants() -> None:
    build, x = start()
    twice = [build("Exp", build("Mul", x, build.constant(2.0, "float64"))) for _ in range(2)]
    graph, ops = finish(build, build("Add", *twice))
    assert ops == ["Mul", "Exp", "Add"]
    assert len(graph.constants) == 1


def test_different_attributes_do_not_merge() -> None:
    build, x = start()
    both = [build("LeakyRelu", x, alpha=alpha) for alpha in (0.1, 0.2)]
    assert finish(build, *both)[1] == ["LeakyRelu", "LeakyRelu"]


def test_dead_nodes_go_and_declared_values_stay() -> None:
    build, x = start()
    build("Exp", build("Mul", x, build.constant(3.0, "float64")))
    build.value("unused", (2,), "float64", Role.WEIGHT)
    build.updates["unused"] = build("Slice", "unused", axis=0, start=0, stop=2, step=1)
    graph, ops = finish(build, build("Neg", x))
    assert ops == ["Slice", "Neg"]
    assert set(graph.values) == {"x", "unused", graph.outputs[0], graph.updates["unused"]}


def test_an_expand_that_broadcasting_does_is_dropped() -> None:
    build, x = start()
    wide = build("Expand", build("ReduceSum", x, axes=(1,)), shape=(2, 3))
    assert finish(build, build("Mul", x, wide))[1] == ["ReduceSum", "Mul"]


def test_an_expand_that_makes_the_shape_stays() -> None:
    build, x = start()
    total = build("ReduceSum", x, axes=(1,))
    wide = build("Expand", total, shape=(2, 3))
    assert finish(build, build("Add", wide, wide))[1] == ["ReduceSum", "Expand", "Add"]
    assert "Expand" in finish(build, build("ReduceSum", wide, axes=(1,)))[1]
    ids = build.constant([0, 1, 1])
    rows = build("Expand", build("ReduceSum", x, axes=(0,)), shape=(2, 3))
    assert "Expand" in finish(build, build("Gather", rows, ids))[1]


def test_identities_and_reshapes_are_dropped() -> None:
    build, x = start()
    y = build("Reshape", build("Reshape", build("Identity", x), shape=(6,)), shape=(3, 2))
    back = build("Reshape", build("Reshape", build("Exp", x), shape=(6,)), shape=(2, 3))
    graph, ops = finish(build, y, build("Neg", back), build("Identity", x))
    assert ops == ["Reshape", "Exp", "Neg"]
    assert graph.outputs[2] == "x"


def test_concats_of_concats_copy_each_part_once() -> None:
    """As in dense blocks, whose layers would otherwise copy the first part dozens of times."""
    build, x = start()
    block, parts = x, [x]
    for op in ("Exp", "Neg", "Tanh"):
        parts.append(build(op, block))
        block = build("Concat", block, parts[-1], axis=0)
    across = build("Concat", block, block, axis=1)
    graph, ops = finish(build, across)
    assert ops == ["Exp", "Concat", "Neg", "Concat", "Tanh", "Concat", "Concat"]
    counts = [len(node.inputs) for node in graph.nodes if node.op == "Concat"]
    assert counts == [2, 3, 4, 2], "along another axis a Concat stays"


def test_an_output_that_equals_another_value_lends_it_its_name() -> None:
    build, x = start()
    y = build("Exp", x)
    named = build.node("Identity", [y], names=["logits"])[0]
    graph, ops = finish(build, named, build("Neg", y))
    assert graph.outputs[0] == "logits"
    assert ops == ["Exp", "Neg"]


def test_one_times_x_is_x() -> None:
    build, x = start()
    assert finish(build, build("Neg", build("Mul", build.constant(1.0, "float64"), x)))[1] == ["Neg"]
