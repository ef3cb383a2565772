"""Reverse accumulation: what a gradient is named, what has none, and whose rule is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from tests.kit.interpret import evaluate


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
