"""Reverse accumulation on whole networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.ops import RULES
from oocdl.ops.loss_functions import add_loss
from oocdl.ops.update_rules import add_updates
from oocdl.optim import Adam
from tests.kit import models
from tests.kit.interpret import evaluate
from tests.kit.onnx_kit import perturbed


@pytest.mark.parametrize(
    ("model", "x", "labels", "spec"),
    [
        (models.UNet3d(norm="instance", base=2), torch.randn(2, 1, 8, 8, 8), (2, 8, 8, 8), DiceCE()),
        (models.GPT(), torch.arange(24).reshape(2, 12), (2, 12), CrossEntropy()),
    ],
    ids=["U-Net", "GPT"],
)
def test_gradients_of_networks_are_autograds(model, x, labels, spec, tmp_path: Path) -> None:
    path = models.export(perturbed(model), (x,), tmp_path / "model.onnx")
    imported = inspect_onnx(path).bind(RULES, precision="float64")
    build = Builder(RULES, imported.graph)
    y = build.value("y", labels, "int64", Role.TARGET)
    build.outputs.append(loss := add_loss(build, spec, build.outputs[0], y))
    forward, weights = build.graph(), list(imported.weights)
    grads = differentiate(build, loss, weights)
    add_updates(build, Adam(clip_norm=1.0), grads)
    values = {name: torch.as_tensor(imported.weights[name].read()).requires_grad_() for name in weights}
    extra = {
        value.name: torch.zeros(value.shape, dtype=torch.float64) + (value.role is Role.SCALAR)
        for value in build.graph().of_role(Role.STATE, Role.SCALAR)
    }
    x = x.double() if x.is_floating_point() else x
    given = {"x": x, "y": torch.as_tensor(np.random.default_rng(0).integers(3, size=labels)), **extra}
    truth = evaluate(forward, {**values, **given})
    expected = torch.autograd.grad(truth[loss], list(values.values()))
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
