"""Rewrites of graphs: what must go and what must stay, gradients by name, how values lie in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oocdl.errors import ModelError
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Graph, Role, Shape
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.channels_last import channels_last
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.graph.transforms.factorize import factorize
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


def small_graph() -> tuple[Builder, str, str]:
    build = Builder(RULES)
    x, y = (build.value(name, (3,), "float64", Role.WEIGHT) for name in "xy")
    return build, x, y


def total(build: Builder, value: str) -> str:
    return build("Reshape", build("ReduceSum", value, axes=(0,)), shape=())


def test_what_reaches_a_value_twice_is_summed_under_its_name() -> None:
    build, x, _ = small_graph()
    loss = total(build, build("Mul", build("Exp", x), x))
    grads = differentiate(build, loss, [x])
    assert grads == {"x": "grad/x"}
    assert build.values["grad/x"].role is Role.GRADIENT
    (made,) = (node for node in build.nodes if "grad/x" in node.outputs)
    assert made.op == "Add"


def test_what_the_loss_does_not_need_has_none() -> None:
    build, x, y = small_graph()
    assert list(differentiate(build, total(build, build("Exp", x)), [x, y])) == [x]


def test_nothing_is_made_for_what_is_not_asked() -> None:
    build, x, y = small_graph()
    loss = total(build, build("Add", build("Tanh", y), build("Exp", x)))
    differentiate(build, loss, [x])
    assert "TanhGrad" not in {node.op for node in build.nodes}


def test_a_forward_value_may_be_named_like_a_gradient() -> None:
    build, x, _ = small_graph()
    build.node("Exp", [x], names=["grad/x"])
    grads = differentiate(build, total(build, build("Exp", build("Mul", "grad/x", x))), [x])
    values = {"x": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)}
    found = evaluate(build.graph(), {**values, "y": values["x"]})
    expected = torch.autograd.grad((values["x"] * values["x"].exp()).exp().sum(), values["x"])[0]
    torch.testing.assert_close(found[grads["x"]], expected)


def test_a_loss_is_one_number() -> None:
    build, x, _ = small_graph()
    with pytest.raises(ModelError, match=r"loss 'exp' must be one floating-point number"):
        differentiate(build, build("Exp", x), [x])


def test_a_wrong_gradient_rule_is_named() -> None:
    rules = dict(RULES)
    rules["Exp"] = replace(RULES["Exp"], gradient=lambda build, node, g: [])
    rules["Neg"] = replace(RULES["Neg"], gradient=lambda b, n, g: [b("ReduceSum", g, axes=(0,))])
    for op, why in (("Exp", "0 gradients for 1 inputs"), ("Neg", r"float64 \[1\]")):
        build = Builder(rules)
        x = build.value("x", (3,), "float64", Role.WEIGHT)
        loss = total(build, build(op, x))
        with pytest.raises(ModelError, match=f"node '{op.lower()}'.*{why}"):
            differentiate(build, loss, [x])


LAST = (0, 2, 3, 4, 1)
SPACE = (4, 5, 6)


def orders(build: Builder, *outputs: str) -> dict[str, Order]:
    """Those of the graph's values that do not lie as they are numbered."""
    build.outputs = list(outputs)
    return dict(channels_last(factorize(build.graph(), RULES), RULES).orders)


def conv(build: Builder, x: str, channels: int) -> str:
    """A convolution of width 3 whose weights are named after its result."""
    inside, *space = build.shape(x)[1:]
    rank = len(space)
    weights = build.value(f"w{len(build.values)}", (channels, inside, *(3,) * rank), "float32", Role.WEIGHT)
    ones = (1,) * rank
    return build("Conv", x, weights, strides=ones, dilations=ones, pads=ones * 2)


def begun(shape: Shape) -> tuple[Builder, str]:
    build = Builder(RULES)
    return build, build.value("x", shape, "float32", Role.INPUT)


def test_data_of_convolutions_and_what_follows_it_element_by_element() -> None:
    build, x = begun((2, 1, *SPACE))
    first = conv(build, x, 8)
    active = build("Relu", first)
    other = build.value("other", (2, 8, *SPACE), "float32", Role.INPUT)
    total = build("Add", build("Sigmoid", active), other)
    second = conv(build, total, 12)
    found = orders(build, second)
    # One channel is not enough; what is added to what lies so lies so, too, wherever it comes from.
    assert found == {name: LAST for name in found}
    assert {first, active, other, total, second} <= found.keys()
    assert "x" not in found
    assert not {value.name for value in build.values.values() if value.role is Role.WEIGHT} & found.keys()


def test_a_batch_of_one_has_no_axis() -> None:
    build, x = begun((1, 8, *SPACE))
    assert set(orders(build, conv(build, x, 16)).values()) == {(1, 2, 3, 0)}


def test_too_few_channels_and_odd_numbers_stay_planes() -> None:
    build, x = begun((2, 4, *SPACE))
    made = [conv(build, x, channels) for channels in (4, 7, 10, 12)]
    assert orders(build, *made) == {made[-1]: LAST}


def test_images_as_the_engine_likes_them() -> None:
    build, x = begun((2, 16, 8, 8))
    build.outputs = [active] = [build("Relu", conv(build, x, 16))]
    factored = factorize(build.graph(), RULES)
    last = (0, 2, 3, 1)
    assert channels_last(factored, RULES).orders[active] == channels_last(factored, RULES).orders[x] == last
    assert channels_last(factored, RULES, (5,)).orders == {}


def test_without_a_convolution_nothing_is_ordered() -> None:
    build, x = begun((2, 16, *SPACE))
    assert orders(build, build("Relu", x)) == {}


def test_logits_of_a_cross_entropy_stay_planes() -> None:
    """A LogSumExp runs over the channels of a place, and is faster plane by plane."""
    build, x = begun((2, 8, *SPACE))
    logits = conv(build, x, 8)
    total = build("LogSumExp", logits, axes=(1,), keepdims=True)
    loss = build("Sub", logits, total)
    assert orders(build, loss) == {"x": LAST}
    build, x = begun((2, 8, *SPACE))
    logits = conv(build, x, 8)
    over_depth = orders(build, build("LogSumExp", logits, axes=(2,), keepdims=True))
    assert over_depth["x"] == over_depth[logits] == LAST


def test_gradients_lie_as_what_they_are_gradients_of() -> None:
    build, x = begun((2, 8, *SPACE))
    dy = build.value("dy", (2, 16, *SPACE), "float32", Role.INPUT)
    ones = (1, 1, 1)
    grad = build("ConvWeightGrad", x, dy, kernel_shape=(3, 3, 3), strides=ones, dilations=ones, pads=(1,) * 6)
    assert orders(build, grad) == {"x": LAST, "dy": LAST}
