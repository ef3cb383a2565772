"""Label smoothing, focal, Tversky, Huber, weights: values and gradients, whole and cut, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.losses import BCE, L1, MSE, CrossEntropy, DeepSupervision, DiceCE, Focal, Huber, Tversky
from oocdl.ops import RULES
from oocdl.ops.loss_functions import Loss, add_loss, further_arrays, labels_of, reads_labels
from oocdl.ops.losses.deep_supervision import resized_target
from oocdl.testing import run_graph
from tests.kit import loss_check
from tests.kit.loss_check import Tensor, Truth, labels, normal

check = partial(loss_check.check, pieces=(1, 2, 3))


def positive(*shape: int) -> Tensor:
    return normal(*shape, seed=9).abs()


VECTOR = (0.5, 2.0, 1.0, 0.25)


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize("weights", [None, VECTOR])
@pytest.mark.parametrize("ignore", [-100, 2, 255])
def test_label_smoothing_is_torchs(share: float, weights: tuple[float, ...] | None, ignore: int) -> None:
    y = labels(4, 2, 5, 6)
    y[0, 1:3] = ignore
    vector = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    given = {"weight": vector, "ignore_index": ignore, "label_smoothing": share}
    spec = CrossEntropy(ignore, weights, label_smoothing=share)
    check(spec, normal(2, 4, 5, 6), y, lambda x, y: F.cross_entropy(x, y, **given))


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


@pytest.mark.parametrize(("gamma", "alpha"), [(2.0, None), (2.0, 0.25), (0.0, 0.25), (1.5, None)])
def test_focal_is_monais(gamma: float, alpha: float | None) -> None:
    spec, several = Focal(gamma, alpha), Focal(gamma, alpha, use_softmax=False)
    x, y = normal(2, 4, 3, 5), labels(4, 2, 3, 5)
    check(spec, x, y, lambda x, y: softmax_focal(x, y, gamma, alpha).mean())
    check(spec, normal(2, 1, 7), labels(2, 2, 7), lambda x, y: sigmoid_focal(x, y, gamma, alpha).mean())
    hot = labels(2, 2, 4, 3, 5).double()
    check(several, x, hot, lambda x, y: sigmoid_focal(x, y, gamma, alpha).mean())
    factors = torch.tensor(VECTOR, dtype=torch.float64)[:, None, None]
    weighed = Focal(gamma, alpha, class_weights=VECTOR)
    check(weighed, x, y, lambda x, y: (softmax_focal(x, y, gamma, alpha) * factors).mean())
    weighed = Focal(gamma, alpha, use_softmax=False, class_weights=VECTOR)
    check(weighed, x, hot, lambda x, y: (sigmoid_focal(x, y, gamma, alpha) * factors).mean())


def test_focal_and_tversky_are_monais_own() -> None:
    losses = pytest.importorskip("monai.losses")
    focal = pytest.importorskip("monai.losses.focal_loss")
    x, y, one = normal(2, 4, 3, 5), labels(4, 2, 3, 5), labels(2, 2, 1, 7)
    hot = F.one_hot(y, 4).movedim(-1, 1).double()
    for alpha in (None, 0.25):
        of_classes = partial(focal.softmax_focal_loss, target=hot, gamma=2.0, alpha=alpha)
        of_one = partial(focal.sigmoid_focal_loss, target=one.double(), gamma=2.0, alpha=alpha)
        check(Focal(2.0, alpha), x, y, lambda x, y, found=of_classes: found(x).mean())
        check(Focal(2.0, alpha), normal(2, 1, 7), one, lambda x, y, found=of_one: found(x).mean())
    tversky = losses.TverskyLoss(softmax=True, to_onehot_y=True, alpha=0.3, beta=0.7, batch=True)
    check(Tversky(0.3, 0.7), x, y, lambda x, y: tversky(x, y[:, None]))
    tversky = losses.TverskyLoss(sigmoid=True, alpha=0.3, beta=0.7, batch=True)
    check(Tversky(0.3, 0.7), normal(2, 1, 7), one, lambda x, y: tversky(x, y.double()))


def tversky(x: Tensor, y: Tensor, alpha: float, beta: float, ignore: int | None = None) -> Tensor:
    """MONAI's TverskyLoss(batch=True), of places that are not ignored."""
    counts = torch.ones_like(y, dtype=x.dtype) if ignore is None else (y != ignore).to(x.dtype)
    counts = counts.reshape(x.shape if x.shape[1] == 1 else (x.shape[0], 1, *x.shape[2:]))
    if x.shape[1] == 1:
        p, t = x.sigmoid(), torch.where(counts > 0, y.reshape(x.shape), 0).to(x.dtype)
    else:
        known = torch.where(y == ignore, 0, y) if ignore is not None else y
        p, t = F.softmax(x, 1), F.one_hot(known, x.shape[1]).movedim(-1, 1).to(x.dtype)
    axes = (0, *range(2, x.dim()))
    hit, wrong, missed = ((v * counts).sum(axes) for v in (p * t, p * (1 - t), (1 - p) * t))
    return 1 - ((hit + 1e-5) / (hit + alpha * wrong + beta * missed + 1e-5)).mean()


def test_tversky_is_monais() -> None:
    x, y = normal(2, 4, 3, 5), labels(4, 2, 3, 5)
    check(Tversky(), x, y, lambda x, y: tversky(x, y, 0.5, 0.5))
    check(Tversky(0.2, 0.9), x, y, lambda x, y: tversky(x, y, 0.2, 0.9))
    check(Tversky(0.2, 0.9), normal(2, 1, 7), labels(2, 2, 7), lambda x, y: tversky(x, y, 0.2, 0.9))
    y[0, 1:] = 255
    check(Tversky(0.2, 0.9, ignore_index=255), x, y, lambda x, y: tversky(x, y, 0.2, 0.9, 255))


@pytest.mark.parametrize("delta", [0.5, 1.0, 4.0])
def test_huber_is_torchs(delta: float) -> None:
    x, y = normal(2, 3, 8), normal(2, 3, 8, seed=5)
    x[0, 0, :3] = y[0, 0, :3] + torch.tensor([delta, -delta, 0.0])  # where its slope bends
    check(Huber(delta), x, y, lambda x, y: F.huber_loss(x, y, delta=delta))


@pytest.mark.parametrize("weight", [3.0, (0.5, 2.0, 8.0)])
def test_pos_weight_is_torchs(weight: Any) -> None:
    x, y = normal(2, 3, 8) * 10, labels(2, 2, 3, 8).double()
    x[0, 0, :2] = 0.0
    vector = torch.tensor(weight, dtype=torch.float64)
    vector = vector[:, None] if vector.dim() else vector
    truth = lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=vector)  # noqa: E731
    check(BCE(weight), x, y, truth)


NUMBERS: Mapping[str, tuple[Loss, Truth]] = {
    "mse": (MSE("w"), F.mse_loss),
    "l1": (L1("w"), F.l1_loss),
    "huber": (Huber(1.0, "w"), F.huber_loss),
    "bce": (BCE(sample_weights="w"), F.binary_cross_entropy_with_logits),
    "focal": (
        Focal(use_softmax=False, sample_weights="w"),
        lambda x, y, reduction: sigmoid_focal(x, y, 2.0, None),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("shape", [(2,), (2, 3, 8)])
def test_sample_weights_multiply_and_do_not_divide(name: str, shape: tuple[int, ...]) -> None:
    """As Keras's sample_weight: the mean of the weighted losses of all elements."""
    spec, each = NUMBERS[name]
    check(
        spec,
        normal(2, 3, 8),
        labels(2, 2, 3, 8).double(),
        lambda x, y, w: (each(x, y, reduction="none") * w.reshape(*w.shape, *(1,) * (3 - w.dim()))).mean(),
        positive(*shape),
    )


def test_sample_weights_of_bce_are_torchs() -> None:
    check(
        BCE(sample_weights="w"),
        normal(2, 3, 8),
        labels(2, 2, 3, 8).double(),
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, weight=w),
        positive(2, 3, 8),
    )


@pytest.mark.parametrize("shape", [(2,), (2, 5), (2, 1, 5)])
def test_sample_weights_of_cross_entropy_leave_its_denominator(shape: tuple[int, ...]) -> None:
    y = labels(4, 2, 5)
    y[1, 2:] = 255
    vector = torch.tensor(VECTOR, dtype=torch.float64)

    def truth(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        each = F.cross_entropy(x, y, vector, ignore_index=255, reduction="none", label_smoothing=0.2)
        number = torch.where(y == 255, 0, vector[torch.where(y == 255, 0, y)]).sum()
        return (each * w.reshape(2, -1)).sum() / number

    check(CrossEntropy(255, VECTOR, 0.2, "w"), normal(2, 4, 5), y, truth, positive(*shape))


@pytest.mark.parametrize("classes", [4, 1])
def test_sample_weights_of_dice_ce_weigh_cross_entropy(classes: int) -> None:
    y = labels(max(classes, 2), 2, 5)

    def truth(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        t = y[:, None].to(x.dtype) if classes == 1 else F.one_hot(y, classes).movedim(-1, 1).to(x.dtype)
        p = x.sigmoid() if classes == 1 else F.softmax(x, 1)
        dice = 1 - ((2 * (p * t).sum((0, 2)) + 1e-5) / ((p + t).sum((0, 2)) + 1e-5)).mean()
        if classes == 1:
            return dice + F.binary_cross_entropy_with_logits(x, t, weight=w[:, None, None])
        return dice + (F.cross_entropy(x, y, reduction="none") * w[:, None]).mean()

    spec = DiceCE(cross_entropy=CrossEntropy(sample_weights="w"))
    check(spec, normal(2, classes, 5), y, truth, positive(2))
    assert further_arrays(spec, ["w"]) == {"sample_weights": "w"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing must be from 0 to 1, not 1.5"),
        (lambda: Huber(0.0), "delta of huber must be positive"),
        (lambda: Focal(gamma=-1.0), "gamma of focal"),
        (lambda: Focal(alpha=2.0), "alpha from 0 to 1"),
        (lambda: DeepSupervision(weight_mode="linear"), "exp, two, same, not 'linear'"),
        (lambda: DeepSupervision(weights=(0.0, 1.0)), "the first not 0"),
        (lambda: DeepSupervision(weights=(1.0, 1.0)).of_outputs(3), "has 2 weights for 3 outputs"),
        (lambda: DeepSupervision(DeepSupervision()), "not another deep supervision"),
        (lambda: check(DeepSupervision(), normal(2, 3), labels(3, 2), F.mse_loss), "all outputs together"),
        (lambda: check(BCE((1.0, 2.0)), normal(2, 3), normal(2, 3), F.mse_loss), "pos_weight has 2 numbers"),
        (lambda: check(BCE(-1.0), normal(2, 3), normal(2, 3), F.mse_loss), "not negative, got -1.0"),
        (
            lambda: check(
                DiceCE(cross_entropy=CrossEntropy(label_smoothing=0.1)),
                normal(2, 1, 3),
                labels(2, 2, 3),
                F.mse_loss,
            ),
            "label smoothing do not apply to output 'x'",
        ),
        (
            lambda: check(MSE("w"), normal(2, 3), normal(2, 3), F.mse_loss, positive(3)),
            r"weights 'w' have shape \[3\]; they need \[2\]",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_what_reads_labels_says_which() -> None:
    assert reads_labels(Focal()) and not reads_labels(Focal(use_softmax=False))
    for spec in (Focal(), Tversky()):
        found, one = (labels_of(spec, (2, n, 8), (2, 8)) for n in (3, 1))
        assert found is not None and found.classes == 3 and found.ignore_index is None
        assert one is not None and one.classes == 2
    assert labels_of(Focal(use_softmax=False), (2, 3, 8), (2, 3, 8)) is None


def test_a_label_outside_the_classes_makes_focal_nan() -> None:
    build = Builder(RULES)
    x, y = build.value("x", (2, 3), "float64", Role.INPUT), build.value("y", (2,), "int64", Role.TARGET)
    build.outputs = [add_loss(build, Focal(), x, y)]
    graph = canonicalize(build.graph(), RULES)
    ran = run_graph(graph, RULES, {"x": normal(2, 3).numpy(), "y": np.array([0, 3])})
    assert np.isnan(ran.outputs[graph.outputs[0]])


def test_focal_of_certain_places_has_slope_zero() -> None:
    """MONAI's is NaN there, of a gamma below 1."""
    x = torch.zeros(2, 3, 4, dtype=torch.float64)
    x[:, 0] = 1000.0
    check(Focal(0.5), x, torch.zeros(2, 4, dtype=torch.int64), lambda x, y: x.sum() * 0)


def test_weights_of_outputs_are_nnunets_and_monais() -> None:
    assert DeepSupervision().of_outputs(1) == (1.0,)
    halves = np.array([1, 0.5, 0.25, 0.125, 0])
    np.testing.assert_array_equal(DeepSupervision().of_outputs(5), halves / halves.sum())
    assert DeepSupervision(weight_mode="two").of_outputs(3) == (1.0, 0.5, 0.5)
    assert DeepSupervision(weight_mode="same").of_outputs(2) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 8, 12, 6), (4, 3, 6)),
        ((2, 9, 6, 10), (3, 2, 2)),
        ((2, 7, 5, 11), (4, 3, 6)),
        ((2, 1, 13, 9, 4), (5, 7, 3)),
    ],
)
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
