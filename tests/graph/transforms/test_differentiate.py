"""Reverse accumulation on whole networks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.ops import RULES
from oocdl.ops.loss_functions import add_loss
from oocdl.ops.update_rules import add_updates
from oocdl.optim import Adam
from tests.kit.interpret import evaluate

WINDOW = {"strides": (1, 1), "pads": (1, 1, 1, 1), "dilations": (1, 1)}
HALF = {"strides": (2, 2), "pads": (0, 0, 0, 0), "dilations": (1, 1)}


def unet(build: Builder) -> tuple[str, str, list[str]]:
    """A small U-Net with every kind of join: returns logits, labels, weights."""
    weights: list[str] = []

    def weight(*shape: int) -> str:
        weights.append(build.value(f"w{len(weights)}", shape, "float64", Role.WEIGHT))
        return weights[-1]

    def block(x: str, channels: int) -> str:
        x = build("Conv", x, weight(channels, build.shape(x)[1], 3, 3), **WINDOW)
        mean, var = build.node("Moments", (x,), {"axes": (2, 3)})
        x = build("Normalize", x, mean, var, axes=(2, 3), eps=1e-5)
        x = build("Mul", x, weight(1, channels, 1, 1))
        return build("LeakyRelu", build("Add", x, weight(1, channels, 1, 1)), alpha=0.01)

    x = build.value("x", (2, 1, 8, 6), "float64", Role.INPUT)
    skip = block(x, 3)
    low = block(build("MaxPool", skip, kernel_shape=(2, 2), **HALF), 4)
    low = build("Add", low, block(low, 4))
    up = build("ConvTranspose", low, weight(4, 3, 2, 2), spatial=(8, 6), **HALF)
    joined = block(build("Concat", skip, up, axis=1), 3)
    logits = build("Conv", joined, weight(3, 3, 1, 1), **{**WINDOW, "pads": (0, 0, 0, 0)})
    return logits, build.value("y", (2, 8, 6), "int64", Role.TARGET), weights


def attention(build: Builder) -> tuple[str, str, list[str]]:
    """Embedding, layer norm, causal attention, tied output: returns logits, labels, weights."""
    ids = build.value("x", (2, 5), "int64", Role.INPUT)
    table, mix = (
        build.value(name, shape, "float64", Role.WEIGHT)
        for name, shape in (("table", (7, 4)), ("mix", (4, 12)))
    )
    x = build("Gather", table, ids)
    mean, var = build.node("Moments", (x,), {"axes": (2,)})
    y = build("Normalize", x, mean, var, axes=(2,), eps=1e-5)
    parts = build.node(
        "Split", (build("Einsum", y, mix, equation="nte,ef->ntf"),), {"axis": 2, "sizes": (4, 4, 4)}
    )
    q, k, v = (
        build("Transpose", build("Reshape", part, shape=(2, 5, 2, 2)), perm=(0, 2, 1, 3)) for part in parts
    )
    mask = build.constant(np.triu(np.full((5, 5), -1e9), 1))
    scores = build("Add", build("Einsum", q, k, equation="nhqe,nhke->nhqk"), mask)
    out = build("Einsum", build("Softmax", scores, axis=3), v, equation="nhqk,nhke->nhqe")
    out = build("Reshape", build("Transpose", out, perm=(0, 2, 1, 3)), shape=(2, 5, 4))
    x = build("Gelu", build("Add", x, out), approximate="tanh")
    logits = build("Einsum", x, table, equation="nte,ve->ntv")
    return logits, build.value("y", (2, 5), "int64", Role.TARGET), [table, mix]


@pytest.mark.parametrize(("model", "spec"), [(unet, DiceCE()), (attention, CrossEntropy())])
def test_gradients_of_networks_are_autograds(model, spec) -> None:
    build = Builder(RULES)
    logits, labels, weights = model(build)
    build.outputs = [logits, add_loss(build, spec, logits, labels)]
    grads = differentiate(build, build.outputs[1], weights)
    add_updates(build, Adam(clip_norm=1.0), grads)
    random = np.random.default_rng(0)
    values = {
        name: torch.as_tensor(random.normal(size=build.shape(name)) * 0.5).requires_grad_()
        for name in weights
    }
    x = random.integers(7, size=(2, 5)) if model is attention else random.normal(size=(2, 1, 8, 6))
    y = random.integers(3, size=build.shape(labels))
    extra = {
        value.name: torch.zeros(value.shape, dtype=torch.float64) + (value.role is Role.SCALAR)
        for value in build.graph().of_role(Role.STATE, Role.SCALAR)
    }
    given = {"x": torch.as_tensor(x), "y": torch.as_tensor(y), **extra}
    forward = Builder(RULES)
    logits, labels, _ = model(forward)
    loss = add_loss(forward, spec, logits, labels)
    truth = evaluate(forward.graph(), {**values, **given})
    expected = torch.autograd.grad(truth[loss], [values[name] for name in weights])
    full = build.graph()
    small = canonicalize(replace(full, outputs=(*full.outputs, *grads.values())), RULES)
    assert len(small.nodes) < len(full.nodes)
    assert all(RULES[node.op].axes for node in small.nodes)
    assert len({node.name for node in small.nodes}) == len(small.nodes)
    with torch.no_grad():
        found = [evaluate(graph, {**values, **given}) for graph in (full, small)]
    names = [list(grads.values()), small.outputs[2:]]
    for results, outputs in zip(found, names, strict=True):
        for name, tensor in zip(outputs, expected, strict=True):
            torch.testing.assert_close(results[name], tensor, rtol=1e-10, atol=1e-12)
    for key in full.updates:
        torch.testing.assert_close(found[0][full.updates[key]], found[1][small.updates[key]])


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
