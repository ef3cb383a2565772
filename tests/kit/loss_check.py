"""A loss beside PyTorch's: value and gradient in float64, whole and cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops.loss_functions import Loss, add_loss
from oocdl.testing import run_graph
from tests.kit.interpret import evaluate

Tensor = torch.Tensor
Truth = Callable[..., Tensor]


def check(
    spec: Loss, x: Tensor, y: Tensor, truth: Truth, weights: Tensor | None = None, pieces: Sequence[int] = ()
) -> None:
    """Before and after ``canonicalize``, and with each cut class in so many ``pieces``."""
    build = Builder(RULES)
    logits = build.value("x", tuple(x.shape), "float64", Role.INPUT)
    target = build.value("y", tuple(y.shape), str(y.dtype).removeprefix("torch."), Role.TARGET)
    given, further = {"x": x.detach(), "y": y}, {}
    if weights is not None:
        further["sample_weights"] = build.value("w", tuple(weights.shape), "float64", Role.TARGET)
        given["w"] = weights
    loss = add_loss(build, spec, logits, target, further)
    build.outputs = [loss, differentiate(build, loss, [logits])[logits]]
    assert build.values[loss].shape == ()
    x = x.clone().requires_grad_()
    expected = truth(x, y) if weights is None else truth(x, y, weights)
    (slope,) = torch.autograd.grad(expected, x)
    graph = canonicalize(build.graph(), RULES)
    for each in (build.graph(), graph):
        found = evaluate(each, given)
        torch.testing.assert_close(found[each.outputs[0]], expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[each.outputs[1]], slope, rtol=1e-11, atol=1e-14)
    for count in pieces:
        arrays = {name: array.numpy() for name, array in given.items()}
        ran = run_graph(graph, RULES, arrays, cuts=dict.fromkeys(range(9), count))
        assert count == 1 or ran.plan.tasks > 3
        np.testing.assert_allclose(ran.outputs[graph.outputs[0]], expected.item(), rtol=1e-12)
        np.testing.assert_allclose(ran.outputs[graph.outputs[1]], slope.numpy(), rtol=1e-10, atol=1e-14)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape) * 3)


def labels(classes: int, *shape: int) -> Tensor:
    return torch.as_tensor(np.random.default_rng(4).integers(classes, size=shape))
