"""Losses: values and gradients are PyTorch's, MONAI's and nnU-Net's, in float64, whole and cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oocdl
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.losses import BCE, L1, MSE, CrossEntropy, DeepSupervision, Dice, DiceCE, Focal, Huber, Tversky
from oocdl.ops import RULES, loss_functions
from oocdl.ops.loss_functions import (
    LOSSES,
    Head,
    Loss,
    add_loss,
    add_losses,
    further_arrays,
    labels_of,
    reads_labels,
    register,
)
from oocdl.ops.losses.class_losses import class_axis
from oocdl.ops.losses.deep_supervision import resized_target
from oocdl.ops.own_loss import OwnLoss, aligned, mean
from oocdl.testing import run_graph
from tests.kit import nets
from tests.kit.interpret import evaluate

Tensor = torch.Tensor
Truth = Callable[..., Tensor]


def check(spec: Loss, x: Tensor, y: Tensor, truth: Truth, weights: Tensor | None = None) -> None:
    """Value and gradient, before and after ``canonicalize``, and with each cut class in 1 and 3 pieces."""
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
    arrays = {name: array.numpy() for name, array in given.items()}
    for count in (1, 3) if x.isfinite().all() else ():  # what a run is given is finite
        ran = run_graph(graph, RULES, arrays, cuts=dict.fromkeys(range(9), count))
        np.testing.assert_allclose(ran.outputs[graph.outputs[0]], expected.item(), rtol=1e-12)
        np.testing.assert_allclose(ran.outputs[graph.outputs[1]], slope.numpy(), rtol=1e-10, atol=1e-14)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape) * 3)


def positive(*shape: int) -> Tensor:
    return normal(*shape, seed=9).abs()


def labels(classes: int, *shape: int) -> Tensor:
    return torch.as_tensor(np.random.default_rng(4).integers(classes, size=shape))


def some_ignored(ignore: int, classes: int = 4) -> Tensor:
    y = labels(classes, 2, 3, 5)
    y[0, 1:] = ignore
    return y


# --- what others make of it ------------------------------------------------------------------


def places(x: Tensor, y: Tensor, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chances, truth, and which places count."""
    counts = (y != ignore).reshape(x.shape[0], 1, *x.shape[2:]).to(x.dtype)
    known = torch.where(y == ignore, 0, y)
    if x.shape[1] == 1:
        return x.sigmoid(), known.reshape(x.shape).to(x.dtype), counts
    return F.softmax(x, 1), F.one_hot(known, x.shape[1]).movedim(-1, 1).to(x.dtype), counts


def overlaps(x: Tensor, y: Tensor, ignore: int) -> list[Tensor]:
    """Of each class what is found rightly, wrongly, and not."""
    p, t, m = places(x, y, ignore)
    return [(v * m).sum((0, *range(2, x.dim()))) for v in (p * t, p * (1 - t), (1 - p) * t)]


def dice(x: Tensor, y: Tensor, ignore: int = -100, weight: Tensor | None = None) -> Tensor:
    """MONAI's DiceLoss(batch=True) with its class weights, and nnU-Net's mask."""
    hit, wrong, missed = overlaps(x, y, ignore)
    lost = 1 - (2 * hit + 1e-5) / torch.clip(2 * hit + wrong + missed + 1e-5, 1e-8)
    return (lost if weight is None else lost * weight).mean()


def tversky(x: Tensor, y: Tensor, alpha: float, beta: float, ignore: int = -100) -> Tensor:
    """MONAI's TverskyLoss(batch=True), of places that are not ignored."""
    hit, wrong, missed = overlaps(x, y, ignore)
    return 1 - ((hit + 1e-5) / (hit + alpha * wrong + beta * missed + 1e-5)).mean()


def surprise(x: Tensor, y: Tensor, ignore: int = -100, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy; of one class that of nnU-Net's DC_and_BCE_loss. Nothing where no place counts."""
    if x.shape[1] == 1:
        _, t, m = places(x, y, ignore)
        each = F.binary_cross_entropy_with_logits(x, t, reduction="none")
        return (each * m).sum() / torch.clip(m.sum(), min=1e-8)
    if not (y != ignore).any():
        return 0 * x.sum()
    return F.cross_entropy(x, y, weight, ignore_index=ignore)


def both(x: Tensor, y: Tensor, ignore: int = -100, weight: Tensor | None = None) -> Tensor:
    """nnU-Net's DC_and_CE_loss, batch Dice with background; 1 - Dice in place of -Dice."""
    return dice(x, y, ignore) + surprise(x, y, ignore, weight)


def softmax_focal(x: Tensor, y: Tensor, gamma: float, alpha: float | None) -> Tensor:
    """MONAI's softmax_focal_loss, each element."""
    low, t = F.log_softmax(x, 1), F.one_hot(y, x.shape[1]).movedim(-1, 1).to(x.dtype)
    loss = -((1 - low.exp()) ** gamma) * low * t
    if alpha is None:
        return loss
    factors = torch.full((x.shape[1],), alpha, dtype=x.dtype)
    factors[0] = 1 - alpha
    return loss * factors.reshape(-1, *(1 for _ in x.shape[2:]))


def sigmoid_focal(x: Tensor, y: Tensor, gamma: float, alpha: float | None) -> Tensor:
    """torchvision's sigmoid_focal_loss, each element."""
    p, t = x.sigmoid(), y.to(x.dtype).reshape(x.shape)
    missed = 1 - (p * t + (1 - p) * (1 - t))
    loss = F.binary_cross_entropy_with_logits(x, t, reduction="none") * missed**gamma
    return loss if alpha is None else loss * (alpha * t + (1 - alpha) * (1 - t))


def bends(x: Tensor, y: Tensor, *at: float) -> tuple[Tensor, Tensor]:
    """Where slopes bend: differences ``at``."""
    x[0, 0, : len(at)] = y[0, 0, : len(at)] + torch.tensor(at)
    return x, y


VECTOR = (0.5, 2.0, 1.0, 0.25)
WEIGHTS = torch.tensor(VECTOR, dtype=torch.float64)
HIDDEN, WITHOUT = torch.tensor([0.5, 2.0, 0.0, 0.25], dtype=torch.float64), (0.5, 2.0, 0.0, 0.25)
X, ONE, Y = normal(2, 4, 3, 5), normal(2, 1, 3, 5), labels(4, 2, 3, 5)
HOT, EXACT = labels(2, 2, 4, 3, 5).double(), labels(2, 2, 3, 8).double()
FAR = torch.tensor([0.0, 0.0, 1.0, 1.0, -800.0, 800.0], dtype=torch.float64)[:, None]
CHANCELESS = torch.tensor([[-999.0, 0.0, 999.0], [999.0, 0.0, -999.0]], dtype=torch.float64)
MASKED = torch.where(torch.arange(4) == 3, -torch.inf, normal(3, 4))
CERTAIN = torch.tensor([1000.0, 0.0, 0.0], dtype=torch.float64)[None, :, None].expand(2, 3, 4)
bce = F.binary_cross_entropy_with_logits

CASES: dict[str, tuple[Loss, Tensor, Tensor, Truth]] = {
    **{
        f"cross-entropy of {shape}": (
            CrossEntropy(), normal(shape[0], 6, *shape[1:]), labels(6, *shape), F.cross_entropy)
        for shape in ((4,), (2, 5), (2, 3, 4, 5))
    },
    **{
        f"cross-entropy, {ignore} ignored, {weights}, smoothed by {share}": (
            CrossEntropy(ignore, weights, label_smoothing=share), X, some_ignored(ignore),
            partial(F.cross_entropy, weight=None if weights is None else WEIGHTS, ignore_index=ignore,
                    label_smoothing=share))
        for ignore in (-100, 255, 0, 2)
        for weights in (None, VECTOR)
        for share in (0.0, 0.1, 1.0)[: 3 if ignore in (-100, 2) else 1]
    },
    "classes without a chance": (CrossEntropy(), CHANCELESS, torch.tensor([0, 0]), F.cross_entropy),
    "a kept axis and small integers": (
        CrossEntropy(), normal(2, 3, 4, 4), labels(3, 2, 1, 4, 4).to(torch.uint8),
        lambda x, y: F.cross_entropy(x, y[:, 0].long())),
    "a language model": (
        CrossEntropy(), normal(2, 5, 7), labels(7, 2, 5), lambda x, y: F.cross_entropy(x.transpose(1, 2), y)),
    "far from 0": (CrossEntropy(), normal(3, 4) - 1e9, labels(4, 3), F.cross_entropy),
    "smoothed, far from 0": (
        CrossEntropy(label_smoothing=0.1), normal(3, 4) + 1e9, labels(4, 3),
        partial(F.cross_entropy, label_smoothing=0.1)),
    "a masked class": (CrossEntropy(), MASKED, labels(3, 3), F.cross_entropy),
    **{
        f"{name}, slopes at zero and far from it": (loss, FAR, FAR.flip(0).clamp(0, 1), truth)
        for name, loss, truth in (("l1", L1(), F.l1_loss), ("mse", MSE(), F.mse_loss), ("bce", BCE(), bce))
    },
    "mse": (MSE(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.mse_loss),
    "l1": (L1(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.l1_loss),
    "bce": (BCE(), *bends(normal(2, 3, 8) * 10, EXACT, 0.0, 0.0), bce),
    "bce of labels": (BCE(), ONE, labels(2, 2, 3, 5), surprise),
    **{
        f"bce, positives weigh {weight}": (
            BCE(weight), *bends(normal(2, 3, 8) * 10, EXACT, 0.0, 0.0),
            partial(bce, pos_weight=torch.tensor(weight, dtype=torch.float64).reshape(-1, 1)))
        for weight in (3.0, (0.5, 2.0, 8.0))
    },
    **{
        f"huber {delta}": (
            Huber(delta), *bends(normal(2, 3, 8), normal(2, 3, 8, seed=5), delta, -delta, 0.0),
            partial(F.huber_loss, delta=delta))
        for delta in (0.5, 1.0, 4.0)
    },
    "dice": (Dice(), X, Y, dice),
    "dice of one class": (Dice(), ONE, labels(2, 2, 3, 5), dice),
    "dice of one class with its axis": (Dice(), ONE, labels(2, 2, 1, 3, 5).double(), dice),
    "dice_ce": (DiceCE(), X, Y, both),
    "dice_ce of one class": (DiceCE(), normal(2, 1, 9), labels(2, 2, 9), both),
    **{
        f"{name}, {ignore} ignored": (loss, x, some_ignored(ignore, classes), partial(truth, ignore=ignore))
        for ignore in (-100, 255, 0, 2)
        for name, loss, x, classes, truth in (
            ("dice", Dice(ignore_index=ignore), X, 4, dice),
            ("dice_ce", DiceCE(cross_entropy=CrossEntropy(ignore)), X, 4, both),
            ("dice_ce of one class", DiceCE(cross_entropy=CrossEntropy(ignore)), ONE, 2, both),
            ("tversky", Tversky(0.2, 0.9, ignore_index=ignore), X, 4, partial(tversky, alpha=0.2, beta=0.9)),
        )
    },
    "dice_ce of nothing": (DiceCE(), normal(2, 4, 3), torch.full((2, 3), -100), both),
    "dice_ce of nothing in one class": (DiceCE(), normal(2, 1, 3), torch.full((2, 3), -100), both),
    "dice of weights": (
        Dice(ignore_index=255, class_weights=WITHOUT), X, some_ignored(255),
        partial(dice, ignore=255, weight=HIDDEN)),
    "dice_ce of weights of both": (
        DiceCE(Dice(class_weights=WITHOUT), CrossEntropy(255, WITHOUT)), X, some_ignored(255),
        lambda x, y: dice(x, y, 255, HIDDEN) + surprise(x, y, 255, HIDDEN)),
    "dice_ce of weights of one": (
        DiceCE(cross_entropy=CrossEntropy(255, WITHOUT)), X, some_ignored(255),
        partial(both, ignore=255, weight=HIDDEN)),
    "tversky": (Tversky(), X, Y, partial(tversky, alpha=0.5, beta=0.5)),
    "tversky of one class": (
        Tversky(0.2, 0.9), ONE, labels(2, 2, 3, 5), partial(tversky, alpha=0.2, beta=0.9)),
    # MONAI's slope is NaN there, of a gamma below 1.
    "focal of certain places": (
        Focal(0.5), CERTAIN, torch.zeros(2, 4, dtype=torch.int64), lambda x, y: x.sum() * 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_others_have_it(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize(("gamma", "alpha"), [(2.0, None), (2.0, 0.25), (0.0, 0.25), (1.5, None)])
def test_focal_is_monais(gamma: float, alpha: float | None) -> None:
    spec, several = Focal(gamma, alpha), Focal(gamma, alpha, use_softmax=False)
    check(spec, X, Y, lambda x, y: softmax_focal(x, y, gamma, alpha).mean())
    check(spec, normal(2, 1, 7), labels(2, 2, 7), lambda x, y: sigmoid_focal(x, y, gamma, alpha).mean())
    check(several, X, HOT, lambda x, y: sigmoid_focal(x, y, gamma, alpha).mean())
    factors = WEIGHTS[:, None, None]
    weighed = Focal(gamma, alpha, class_weights=VECTOR)
    check(weighed, X, Y, lambda x, y: (softmax_focal(x, y, gamma, alpha) * factors).mean())
    weighed = Focal(gamma, alpha, use_softmax=False, class_weights=VECTOR)
    check(weighed, X, HOT, lambda x, y: (sigmoid_focal(x, y, gamma, alpha) * factors).mean())


def test_focal_and_tversky_are_monais_own() -> None:
    losses = pytest.importorskip("monai.losses")
    focal = pytest.importorskip("monai.losses.focal_loss")
    one = labels(2, 2, 1, 7)
    hot = F.one_hot(Y, 4).movedim(-1, 1).double()
    for alpha in (None, 0.25):
        of_classes = partial(focal.softmax_focal_loss, target=hot, gamma=2.0, alpha=alpha)
        of_one = partial(focal.sigmoid_focal_loss, target=one.double(), gamma=2.0, alpha=alpha)
        check(Focal(2.0, alpha), X, Y, lambda x, y, found=of_classes: found(x).mean())
        check(Focal(2.0, alpha), normal(2, 1, 7), one, lambda x, y, found=of_one: found(x).mean())
    theirs = losses.TverskyLoss(softmax=True, to_onehot_y=True, alpha=0.3, beta=0.7, batch=True)
    check(Tversky(0.3, 0.7), X, Y, lambda x, y: theirs(x, y[:, None]))
    theirs = losses.TverskyLoss(sigmoid=True, alpha=0.3, beta=0.7, batch=True)
    check(Tversky(0.3, 0.7), normal(2, 1, 7), one, lambda x, y: theirs(x, y.double()))


NUMBERS: dict[str, tuple[Loss, Truth]] = {
    "mse": (MSE("w"), F.mse_loss), "l1": (L1("w"), F.l1_loss), "huber": (Huber(1.0, "w"), F.huber_loss),
    "bce": (BCE(sample_weights="w"), bce),
    "focal": (Focal(use_softmax=False, sample_weights="w"),
              lambda x, y, reduction: sigmoid_focal(x, y, 2.0, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("shape", [(2,), (2, 3, 8)])
def test_sample_weights_multiply_and_do_not_divide(name: str, shape: tuple[int, ...]) -> None:
    """As Keras's sample_weight: the mean of the weighted losses of all elements."""
    spec, each = NUMBERS[name]

    def truth(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (each(x, y, reduction="none") * w.reshape(*w.shape, *(1,) * (3 - w.dim()))).mean()

    check(spec, normal(2, 3, 8), EXACT, truth, positive(*shape))


@pytest.mark.parametrize("shape", [(2,), (2, 5), (2, 1, 5)])
def test_sample_weights_of_cross_entropy_leave_its_denominator(shape: tuple[int, ...]) -> None:
    y = labels(4, 2, 5)
    y[1, 2:] = 255

    def truth(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        each = F.cross_entropy(x, y, WEIGHTS, ignore_index=255, reduction="none", label_smoothing=0.2)
        number = torch.where(y == 255, 0, WEIGHTS[torch.where(y == 255, 0, y)]).sum()
        return (each * w.reshape(2, -1)).sum() / number

    check(CrossEntropy(255, VECTOR, 0.2, "w"), normal(2, 4, 5), y, truth, positive(*shape))


@pytest.mark.parametrize("classes", [4, 1])
def test_sample_weights_of_dice_ce_weigh_cross_entropy(classes: int) -> None:
    def truth(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        if classes == 1:
            return dice(x, y) + bce(x, y[:, None].to(x.dtype), weight=w[:, None, None])
        return dice(x, y) + (F.cross_entropy(x, y, reduction="none") * w[:, None]).mean()

    spec = DiceCE(cross_entropy=CrossEntropy(sample_weights="w"))
    check(spec, normal(2, classes, 5), labels(max(classes, 2), 2, 5), truth, positive(2))
    assert further_arrays(spec, ["w"]) == {"sample_weights": "w"}


@pytest.mark.parametrize("spec", [CrossEntropy(), Focal()], ids=["cross-entropy", "focal"])
def test_a_label_outside_the_classes_gives_nan(spec: Loss) -> None:
    build = Builder(RULES)
    x, y = build.value("x", (2, 3), "float64", Role.INPUT), build.value("y", (2,), "int64", Role.TARGET)
    build.outputs = [add_loss(build, spec, x, y)]
    graph = canonicalize(build.graph(), RULES)
    ran = run_graph(graph, RULES, {"x": normal(2, 3).numpy(), "y": np.array([0, 3])})
    assert np.isnan(ran.outputs[graph.outputs[0]])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_several_heads_are_weighted_in_the_dtype_of_the_first(dtype: str) -> None:
    build = Builder(RULES)
    a, b = build.value("a", (2, 3), dtype, Role.INPUT), build.value("b", (2, 3), "float64", Role.INPUT)
    t = build.value("t", (2, 3), "float64", Role.TARGET)
    total, parts = add_losses(build, {"a": Head(MSE(), a, t, 0.5), "b": Head(L1(), b, t, 2.0)})
    x, y, z = normal(2, 3).to(getattr(torch, dtype)), normal(2, 3) * 2, normal(2, 3) + 1
    found = evaluate(build.graph(), {"a": x, "b": y, "t": z})
    first = F.mse_loss(x, z.to(x.dtype))
    torch.testing.assert_close(found[parts["a"]], first)
    torch.testing.assert_close(found[total], 0.5 * first + 2 * F.l1_loss(y, z).to(x.dtype))


# --- what is known, and refused --------------------------------------------------------------


def test_names_are_the_public_ones() -> None:
    assert list(LOSSES) == [
        "cross_entropy", "dice", "dice_ce", "focal", "tversky", "bce", "mse", "l1", "huber", "ctc",
        "deep_supervision",
    ]  # fmt: skip
    assert LOSSES["dice_ce"] == DiceCE()


def test_the_class_axis_is_one_where_it_can_be() -> None:
    assert class_axis((2, 3, 4), (2, 4)) == 1
    assert class_axis((2, 5, 7), (2, 5)) == 2
    assert class_axis((2, 5, 5), (2, 5)) == 1
    assert class_axis((2, 3, 4, 4), (2, 1, 4, 4)) == 1
    assert class_axis((2, 3), (2, 4)) is None
    assert class_axis((1, 3, 4), (1, 3, 4)) is None and class_axis((1,), (1,)) is None  # never the samples


def test_what_reads_labels_says_which() -> None:
    assert reads_labels(Focal()) and not reads_labels(Focal(use_softmax=False))
    for spec in (Focal(), Tversky()):
        found, one = (labels_of(spec, (2, n, 8), (2, 8)) for n in (3, 1))
        assert found is not None and found.classes == 3 and found.ignore_index is None
        assert one is not None and one.classes == 2
    assert labels_of(Focal(use_softmax=False), (2, 3, 8), (2, 3, 8)) is None


def added(spec: Loss, x: Any, y: Any, *dtypes: str, weights: Any = None) -> None:
    """Add a loss of logits and a target of these shapes and dtypes."""
    build, (dtype, kind) = Builder(RULES), dtypes or ("float64", "int64")
    logits, target = build.value("x", x, dtype, Role.INPUT), build.value("y", y, kind, Role.TARGET)
    further = {"sample_weights": build.value("w", weights, "float64", Role.TARGET)} if weights else {}
    add_loss(build, spec, logits, target, further)


SHAPES = (2, 3, 4), (2, 4)
SINGLE = (2, 1, 4), (2, 4)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: added(Dice(class_weights=(1.0, 2.0)), *SHAPES), "2 class weights, but output 'x' has 3 classes"),
    (lambda: added(Dice(class_weights=(1.0,)), *SINGLE), "do not apply to output 'x', which has one class"),
    (lambda: added(DiceCE(cross_entropy=CrossEntropy(class_weights=(2.0,))), *SINGLE),
     "do not apply to output 'x'"),
    (lambda: added(DiceCE(cross_entropy=CrossEntropy(label_smoothing=0.1)), *SINGLE),
     "label smoothing do not apply to output 'x'"),
    (lambda: added(DiceCE(Dice(ignore_index=255)), *SHAPES),
     "ignores the label 255 in dice, but -100 in cross_entropy"),
    *((lambda bad=bad: added(CrossEntropy(class_weights=(1.0, bad, 1.0)), *SHAPES),
       "finite, at least 0, and not all 0") for bad in (-1.0, float("nan"))),
    (lambda: added(CrossEntropy(), (2, 3), (4,)), "class axis"),
    (lambda: added(CrossEntropy(), (2, 3), (2,), "float32", "float32"), "whole numbers"),
    (lambda: added(CrossEntropy(), (2, 3), (2,), "int64", "int64"), "floating"),
    (lambda: added(CrossEntropy(class_weights=(1.0,)), (2, 3), (2,)), "class weights"),
    (lambda: added(MSE(), (2, 3), (3, 2), "float32", "float32"), "shape"),
    (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing must be from 0 to 1, not 1.5"),
    (lambda: Huber(0.0), "delta of huber must be positive"),
    (lambda: Focal(gamma=-1.0), "gamma of focal"),
    (lambda: Focal(alpha=2.0), "alpha from 0 to 1"),
    (lambda: DeepSupervision(weight_mode="linear"), "exp, two, same, not 'linear'"),
    (lambda: DeepSupervision(weights=(0.0, 1.0)), "the first not 0"),
    (lambda: DeepSupervision(weights=(1.0, 1.0)).of_outputs(3), "has 2 weights for 3 outputs"),
    (lambda: DeepSupervision(DeepSupervision()), "not another deep supervision"),
    (lambda: added(DeepSupervision(), (2, 3), (2,)), "all outputs together"),
    (lambda: added(BCE((1.0, 2.0)), (2, 3), (2, 3), "float64", "float64"), "pos_weight has 2 numbers"),
    (lambda: added(BCE(-1.0), (2, 3), (2, 3), "float64", "float64"), "not negative, got -1.0"),
    (lambda: added(MSE("w"), (2, 3), (2, 3), "float64", "float64", weights=(3,)),
     r"weights 'w' have shape \[3\]; they need \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


# --- outputs of several sizes ----------------------------------------------------------------


def test_weights_of_outputs_are_nnunets_and_monais() -> None:
    assert DeepSupervision().of_outputs(1) == (1.0,)
    halves = np.array([1, 0.5, 0.25, 0.125, 0])
    np.testing.assert_array_equal(DeepSupervision().of_outputs(5), halves / halves.sum())
    assert DeepSupervision(weight_mode="two").of_outputs(3) == (1.0, 0.5, 0.5)
    assert DeepSupervision(weight_mode="same").of_outputs(2) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((2, 8, 12, 6), (4, 3, 6)), ((2, 9, 6, 10), (3, 2, 2)), ((2, 7, 5, 11), (4, 3, 6)),
     ((2, 1, 13, 9, 4), (5, 7, 3))],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["int64", "float64"])
def test_labels_are_made_smaller_as_nnunet_does(shape: Any, sizes: Any, kind: str) -> None:
    values = np.random.default_rng(0).integers(1000, size=shape).astype(kind)
    build = Builder(RULES)
    y = build.value("y", shape, kind, Role.TARGET)
    x = build.value("x", (shape[0], 3, *sizes), "float64", Role.INPUT)
    build.outputs = [build("Identity", resized_target(build, y, x, "float64"))]
    tensor = torch.as_tensor(values).double().reshape(shape[0], 1, *shape[-3:])
    wanted = F.interpolate(tensor, size=sizes, mode="nearest-exact").numpy()
    graph = canonicalize(build.graph(), RULES)
    given = {"y": values, "x": np.zeros((shape[0], 3, *sizes))}
    for pieces in (1, 2):
        ran = run_graph(graph, RULES, given, cuts=dict.fromkeys(range(9), pieces))
        found = ran.outputs[graph.outputs[0]]
        assert found.dtype == kind
        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)


def test_an_output_larger_than_its_labels_is_refused() -> None:
    build = Builder(RULES)
    y, x = build.value("y", (2, 4), "int64", Role.TARGET), build.value("x", (2, 3, 8), "float64", Role.INPUT)
    with pytest.raises(InputError, match="from the largest to the smallest"):
        resized_target(build, y, x, "float64")


# --- losses of one's own ---------------------------------------------------------------------


def huber(build: Builder, prediction: str, target: str) -> str:
    error = build("Abs", build("Sub", prediction, aligned(build, prediction, target)))
    small = build("Min", error, build.like(1.0, error))
    square = build("Mul", build("Mul", small, small), build.like(0.5, small))
    return mean(build, build("Add", square, build("Sub", error, small)))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Loss:
    """The loss "mine", registered for one test."""
    monkeypatch.setattr("oocdl.ops.loss_functions.LOSSES", known := dict(LOSSES))
    assert register("mine")(huber) is huber
    return known["mine"]


def test_a_registered_loss_has_the_gradient_of_its_nodes(own: Loss) -> None:
    check(own, normal(4, 3), normal(3, 4).T, F.huber_loss)


def test_a_registered_loss_that_is_missing_or_another_is_refused(own: Loss) -> None:
    assert isinstance(own, OwnLoss)
    for spec, why in ((OwnLoss("other", own.digest), "not known"), (OwnLoss("mine", "0"), "another")):
        with pytest.raises(InputError, match=f"{why}.*register"):
            added(spec, (2, 3), (2, 3), "float64", "float64")


def test_a_name_that_is_taken_and_a_loss_that_is_no_number_are_refused(own: Loss) -> None:
    with pytest.raises(InputError, match="'mse' already"):
        register("mse")(huber)
    register("wide")(lambda build, prediction, target: build("Sub", prediction, target))
    with pytest.raises(InputError, match=r"'wide' gave a value of shape \[2, 3\]"):
        added(loss_functions.LOSSES["wide"], (2, 3), (2, 3), "float64", "float64")


@pytest.mark.parametrize("of", ["target", "constant"])
def test_a_loss_that_no_weight_changes_is_refused(own: Loss, tmp_path: Path, of: str) -> None:
    def formula(build: Builder, prediction: str, target: str) -> str:
        return mean(build, target) if of == "target" else build("Identity", build.constant(1.0, "float32"))

    register(of)(formula)
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors() | {"y": nets.vectors()["x"][:, :3]})
    loss = loss_functions.LOSSES[of]
    with pytest.raises(InputError, match="the loss depends on no weight"):
        oocdl.plan(nets.write_mlp(tmp_path / "net.onnx"), data, inputs={"x": "x"}, loss=loss)
