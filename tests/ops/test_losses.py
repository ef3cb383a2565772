"""Losses: values and gradients against ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops.losses import (
    BCE,
    L1,
    LOSSES,
    MSE,
    CrossEntropy,
    Dice,
    DiceCE,
    Head,
    Loss,
    add_loss,
    add_losses,
    class_axis,
)
from tests.kit.interpret import evaluate

Truth = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check(spec: Loss, x: torch.Tensor, y: torch.Tensor, truth: Truth) -> None:
    """Value and gradient in float64, before and after ``canonicalize``."""
    build = Builder(RULES)
    logits = build.value("x", tuple(x.shape), "float64", Role.INPUT)
    target = build.value("y", tuple(y.shape), str(y.dtype).removeprefix("torch."), Role.TARGET)
    loss = add_loss(build, spec, logits, target)
    grad = differentiate(build, loss, [logits])[logits]
    build.outputs = [loss, grad]
    assert build.values[loss].shape == ()
    x = x.clone().requires_grad_()
    expected = truth(x, y)
    (slope,) = torch.autograd.grad(expected, x)
    for graph in (build.graph(), canonicalize(build.graph(), RULES)):
        found = evaluate(graph, {"x": x.detach(), "y": y})
        torch.testing.assert_close(found[graph.outputs[0]], expected.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[graph.outputs[1]], slope, rtol=1e-11, atol=1e-14)


def normal(*shape: int) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(3).normal(size=shape) * 3)


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(4).integers(classes, size=shape))


@pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 3, 4, 5)])
def test_cross_entropy(shape: tuple[int, ...]) -> None:
    x = normal(shape[0], 6, *shape[1:])
    check(CrossEntropy(), x, labels(6, *shape), F.cross_entropy)


@pytest.mark.parametrize("ignore", [-100, 255, 0, 2])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 1.0, 0.25)])
def test_cross_entropy_ignores_and_weighs(ignore: int, weights: tuple[float, ...] | None) -> None:
    y = labels(4, 2, 5, 6)
    y[0, 1:3] = ignore
    vector = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    check(
        CrossEntropy(ignore, weights),
        normal(2, 4, 5, 6),
        y,
        lambda x, y: F.cross_entropy(x, y, vector, ignore_index=ignore),
    )


def test_cross_entropy_takes_a_kept_axis_and_small_integers() -> None:
    y = labels(3, 2, 1, 4, 4).to(torch.uint8)
    check(CrossEntropy(), normal(2, 3, 4, 4), y, lambda x, y: F.cross_entropy(x, y[:, 0].long()))


def test_cross_entropy_of_a_language_model() -> None:
    check(
        CrossEntropy(),
        normal(2, 5, 7),
        labels(7, 2, 5),
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    )


def test_cross_entropy_of_a_masked_class_is_finite() -> None:
    x = normal(3, 4)
    x[:, 3] = -torch.inf
    check(CrossEntropy(), x, labels(3, 3), F.cross_entropy)


def test_a_label_outside_the_classes_gives_nan() -> None:
    build = Builder(RULES)
    x, y = (
        build.value("x", (2, 3), "float64", Role.INPUT),
        build.value("y", (2,), "int64", Role.TARGET),
    )
    loss = add_loss(build, CrossEntropy(), x, y)
    assert evaluate(build.graph(), {"x": normal(2, 3), "y": torch.tensor([0, 3])})[loss].isnan()


def dice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As MONAI's DiceLoss(softmax=True, to_onehot_y=True, batch=True)."""
    p = F.softmax(x, 1)
    t = F.one_hot(y, x.shape[1]).movedim(-1, 1).to(x.dtype)
    axes = (0, *range(2, x.dim()))
    return 1 - ((2 * (p * t).sum(axes) + 1e-5) / (p.sum(axes) + t.sum(axes) + 1e-5)).mean()


def binary_dice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, t = x.sigmoid(), y.to(x.dtype).reshape(x.shape)
    return 1 - (2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5)


def bce(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(x, y.to(x.dtype).reshape(x.shape))


def test_dice() -> None:
    check(Dice(), normal(2, 4, 3, 5), labels(4, 2, 3, 5), dice)
    check(Dice(), normal(2, 1, 3, 5), labels(2, 2, 3, 5), binary_dice)
    check(Dice(), normal(2, 1, 3, 5), labels(2, 2, 1, 3, 5).double(), binary_dice)


def test_dice_ce() -> None:
    check(
        DiceCE(),
        normal(2, 4, 3, 5),
        labels(4, 2, 3, 5),
        lambda x, y: dice(x, y) + F.cross_entropy(x, y),
    )
    check(DiceCE(), normal(2, 1, 9), labels(2, 2, 9), lambda x, y: binary_dice(x, y) + bce(x, y))


def test_bce() -> None:
    x = normal(2, 3, 4) * 10
    x[0, 0, :2] = 0.0  # where a kink of max(x, 0) or |x| would show
    check(BCE(), x, labels(2, 2, 3, 4).double(), bce)
    check(BCE(), normal(2, 1, 4), labels(2, 2, 4), bce)


def test_regression() -> None:
    check(MSE(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.mse_loss)
    check(L1(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.l1_loss)


def test_several_heads_are_weighted() -> None:
    build = Builder(RULES)
    a, b = (build.value(name, (2, 3), "float64", Role.INPUT) for name in "ab")
    t = build.value("t", (2, 3), "float64", Role.TARGET)
    total, parts = add_losses(build, {"a": Head(MSE(), a, t, 0.5), "b": Head(L1(), b, t, 2.0)})
    x, y, z = normal(2, 3), normal(2, 3) * 2, normal(2, 3) + 1
    found = evaluate(build.graph(), {"a": x, "b": y, "t": z})
    torch.testing.assert_close(found[parts["a"]], F.mse_loss(x, z))
    torch.testing.assert_close(found[total], 0.5 * F.mse_loss(x, z) + 2 * F.l1_loss(y, z))


def test_names_are_the_public_ones() -> None:
    assert list(LOSSES) == ["cross_entropy", "dice", "dice_ce", "bce", "mse", "l1"]
    assert LOSSES["dice_ce"] == DiceCE()


def test_the_class_axis_is_one_where_it_can_be() -> None:
    assert class_axis((2, 3, 4), (2, 4)) == 1
    assert class_axis((2, 5, 7), (2, 5)) == 2
    assert class_axis((2, 5, 5), (2, 5)) == 1
    assert class_axis((2, 3, 4, 4), (2, 1, 4, 4)) == 1
    assert class_axis((2, 3), (2, 4)) is None


@pytest.mark.parametrize(
    ("spec", "x", "y", "why"),
    [
        (CrossEntropy(), ((2, 3), "float32"), ((4,), "int64"), "class axis"),
        (CrossEntropy(), ((2, 3), "float32"), ((2,), "float32"), "whole numbers"),
        (CrossEntropy(), ((2, 3), "int64"), ((2,), "int64"), "floating"),
        (CrossEntropy(class_weights=(1.0,)), ((2, 3), "float32"), ((2,), "int64"), "class weights"),
        (MSE(), ((2, 3), "float32"), ((3, 2), "float32"), "shape"),
    ],
)
def test_what_does_not_fit_is_refused(spec: Loss, x: Any, y: Any, why: str) -> None:
    build = Builder(RULES)
    logits, target = build.value("x", *x, Role.INPUT), build.value("y", *y, Role.TARGET)
    with pytest.raises(InputError, match=why):
        add_loss(build, spec, logits, target)
