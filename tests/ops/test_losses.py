"""Losses: values and gradients against ``torch.nn.functional``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import oocdl
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.losses import BCE, L1, MSE, CrossEntropy, Dice, DiceCE
from oocdl.ops import RULES, loss_functions
from oocdl.ops.loss_functions import LOSSES, Head, Loss, add_loss, add_losses, register
from oocdl.ops.losses.class_losses import class_axis
from oocdl.ops.own_loss import OwnLoss, aligned, mean
from tests.kit import nets
from tests.kit.interpret import evaluate
from tests.kit.loss_check import Truth, check, labels, normal


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


@pytest.mark.parametrize(
    ("loss", "truth"),
    [(L1(), F.l1_loss), (MSE(), F.mse_loss), (BCE(), F.binary_cross_entropy_with_logits)],
    ids=["l1", "mse", "bce"],
)
def test_slopes_at_zero_and_far_from_it_are_pytorchs(loss: Loss, truth: Truth) -> None:
    x = torch.tensor([0.0, 0.0, 1.0, 1.0, -800.0, 800.0], dtype=torch.float64)[:, None]
    check(loss, x, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)[:, None], truth)


def test_cross_entropy_of_classes_without_a_chance() -> None:
    x = torch.tensor([[-999.0, 0.0, 999.0], [999.0, 0.0, -999.0]], dtype=torch.float64)
    check(CrossEntropy(), x, torch.tensor([0, 0]), F.cross_entropy)


def test_cross_entropy_takes_a_kept_axis_and_small_integers() -> None:
    y = labels(3, 2, 1, 4, 4).to(torch.uint8)
    check(CrossEntropy(), normal(2, 3, 4, 4), y, lambda x, y: F.cross_entropy(x, y[:, 0].long()))


def test_cross_entropy_of_a_language_model() -> None:
    check(
        CrossEntropy(), normal(2, 5, 7), labels(7, 2, 5), lambda x, y: F.cross_entropy(x.transpose(1, 2), y)
    )


def test_cross_entropy_of_a_masked_class_is_finite() -> None:
    x = normal(3, 4)
    x[:, 3] = -torch.inf
    check(CrossEntropy(), x, labels(3, 3), F.cross_entropy)


def test_a_label_outside_the_classes_gives_nan() -> None:
    build = Builder(RULES)
    x, y = (build.value("x", (2, 3), "float64", Role.INPUT), build.value("y", (2,), "int64", Role.TARGET))
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
    check(DiceCE(), normal(2, 4, 3, 5), labels(4, 2, 3, 5), lambda x, y: dice(x, y) + F.cross_entropy(x, y))
    check(DiceCE(), normal(2, 1, 9), labels(2, 2, 9), lambda x, y: binary_dice(x, y) + bce(x, y))


def nnunet(x: torch.Tensor, y: torch.Tensor, ignore: int, weight: torch.Tensor | None = None) -> torch.Tensor:
    """nnU-Net's DC_and_CE_loss(ignore_label=...), batch Dice with background; 1 - Dice in place of -Dice."""
    mask = y != ignore
    loss = masked_dice(x, y, ignore)
    if not mask.any():
        return loss
    return loss + F.cross_entropy(x, torch.where(mask, y, -100), weight)


def masked_dice(
    x: torch.Tensor, y: torch.Tensor, ignore: int, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """MemoryEfficientSoftDiceLoss(x, y, loss_mask), and MONAI's class weights."""
    p, mask = F.softmax(x, 1), y != ignore
    t = F.one_hot(torch.where(mask, y, 0), x.shape[1]).movedim(-1, 1).to(x.dtype)
    axes, m = (0, *range(2, x.dim())), mask[:, None].to(x.dtype)
    both, sums = (p * t * m).sum(axes), (t * m).sum(axes) + (p * m).sum(axes)
    lost = 1 - (2 * both + 1e-5) / torch.clip(sums + 1e-5, 1e-8)
    return (lost if weight is None else lost * weight).mean()


def masked_binary(x: torch.Tensor, y: torch.Tensor, ignore: int) -> torch.Tensor:
    """Binary Dice and nnU-Net's DC_and_BCE_loss of one region with a mask."""
    mask = (y != ignore).reshape(x.shape)
    t, m, p = torch.where(mask, y.reshape(x.shape), 0).to(x.dtype), mask.to(x.dtype), x.sigmoid()
    dice = (2 * (p * t * m).sum() + 1e-5) / ((p * m).sum() + (t * m).sum() + 1e-5)
    surprise = F.binary_cross_entropy_with_logits(x, t, reduction="none")
    return 1 - dice + (surprise * m).sum() / torch.clip(m.sum(), min=1e-8)


def some_ignored(y: torch.Tensor, ignore: int) -> torch.Tensor:
    y[0, 1:] = ignore
    return y


@pytest.mark.parametrize("ignore", [-100, 255, 0, 2])
def test_dice_leaves_out_what_is_ignored(ignore: int) -> None:
    y = some_ignored(labels(4, 2, 3, 5), ignore)
    check(Dice(ignore_index=ignore), normal(2, 4, 3, 5), y, lambda x, y: masked_dice(x, y, ignore))
    spec = DiceCE(cross_entropy=CrossEntropy(ignore))
    check(spec, normal(2, 4, 3, 5), y, lambda x, y: nnunet(x, y, ignore))
    one = some_ignored(labels(2, 2, 3, 5), ignore)
    check(spec, normal(2, 1, 3, 5), one, lambda x, y: masked_binary(x, y, ignore))


def test_dice_ce_of_ignored_labels_only_is_nothing() -> None:
    y = torch.full((2, 3), -100)
    check(DiceCE(), normal(2, 4, 3), y, lambda x, y: nnunet(x, y, -100) + 0 * x.sum())
    check(DiceCE(), normal(2, 1, 3), y, lambda x, y: masked_binary(x, y, -100) + 0 * x.sum())


def test_dice_weighs_classes() -> None:
    weights, y = (0.5, 2.0, 0.0, 0.25), some_ignored(labels(4, 2, 3, 5), 255)
    vector = torch.tensor(weights, dtype=torch.float64)
    spec = Dice(ignore_index=255, class_weights=weights)
    check(spec, normal(2, 4, 3, 5), y, lambda x, y: masked_dice(x, y, 255, vector))
    both = DiceCE(Dice(class_weights=weights), CrossEntropy(255, weights))
    check(
        both,
        normal(2, 4, 3, 5),
        y,
        lambda x, y: masked_dice(x, y, 255, vector) + F.cross_entropy(x, y, vector, ignore_index=255),
    )
    check(
        DiceCE(cross_entropy=CrossEntropy(255, weights)),
        normal(2, 4, 3, 5),
        y,
        lambda x, y: nnunet(x, y, 255, vector),
    )


@pytest.mark.parametrize(
    ("spec", "classes", "words"),
    [
        (Dice(class_weights=(1.0, 2.0)), 3, "2 class weights, but output 'x' has 3 classes"),
        (Dice(class_weights=(1.0,)), 1, "do not apply to output 'x', which has one class"),
        (DiceCE(cross_entropy=CrossEntropy(class_weights=(2.0,))), 1, "do not apply to output 'x'"),
        (DiceCE(Dice(ignore_index=255)), 3, "ignores the label 255 in dice, but -100 in cross_entropy"),
        (CrossEntropy(class_weights=(1.0, -1.0, 1.0)), 3, "finite, at least 0, and not all 0"),
        (CrossEntropy(class_weights=(1.0, float("nan"), 1.0)), 3, "finite, at least 0, and not all 0"),
    ],
)
def test_settings_that_do_not_apply_are_refused(spec: Loss, classes: int, words: str) -> None:
    build = Builder(RULES)
    x = build.value("x", (2, classes, 4), "float64", Role.INPUT)
    y = build.value("y", (2, 4), "int64", Role.TARGET)
    with pytest.raises(InputError, match=words):
        add_loss(build, spec, x, y)


@pytest.mark.parametrize(("classes", "truth"), [(3, nnunet), (1, masked_binary)])
def test_dice_ce_is_the_same_however_it_is_cut(classes: int, truth: Any) -> None:
    y = some_ignored(labels(max(classes, 2), 2, 6, 5), 255)
    spec = DiceCE(cross_entropy=CrossEntropy(255))
    check(spec, normal(2, classes, 6, 5), y, lambda x, y: truth(x, y, 255), pieces=(2, 3))


def test_bce() -> None:
    x = normal(2, 3, 4) * 10
    x[0, 0, :2] = 0.0  # where a kink of max(x, 0) or |x| would show
    check(BCE(), x, labels(2, 2, 3, 4).double(), bce)
    check(BCE(), normal(2, 1, 4), labels(2, 2, 4), bce)


def test_regression() -> None:
    check(MSE(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.mse_loss)
    check(L1(), normal(2, 3, 4), normal(2, 3, 4) + 1, F.l1_loss)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_several_heads_are_weighted_in_the_dtype_of_the_first(dtype: str) -> None:
    build = Builder(RULES)
    a, b = build.value("a", (2, 3), dtype, Role.INPUT), build.value("b", (2, 3), "float64", Role.INPUT)
    t = build.value("t", (2, 3), "float64", Role.TARGET)
    total, parts = add_losses(build, {"a": Head(MSE(), a, t, 0.5), "b": Head(L1(), b, t, 2.0)})
    x, y, z = normal(2, 3).to(getattr(torch, dtype)), normal(2, 3) * 2, normal(2, 3) + 1
    found = evaluate(build.graph(), {"a": x, "b": y, "t": z})
    torch.testing.assert_close(found[parts["a"]], F.mse_loss(x, z.to(x.dtype)))
    torch.testing.assert_close(
        found[total], 0.5 * F.mse_loss(x, z.to(x.dtype)) + 2 * F.l1_loss(y, z).to(x.dtype)
    )


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
    check(own, normal(4, 3), normal(3, 4).T, torch.nn.functional.huber_loss)


def test_a_registered_loss_that_is_missing_or_another_is_refused(own: Loss) -> None:
    assert isinstance(own, OwnLoss)
    for spec, why in ((OwnLoss("other", own.digest), "not known"), (OwnLoss("mine", "0"), "another")):
        with pytest.raises(InputError, match=f"{why}.*register"):
            check(spec, normal(2, 3), normal(2, 3), lambda x, y: x.sum())


def test_a_name_that_is_taken_and_a_loss_that_is_no_number_are_refused(own: Loss) -> None:
    with pytest.raises(InputError, match="'mse' already"):
        register("mse")(huber)
    register("wide")(lambda build, prediction, target: build("Sub", prediction, target))
    build = Builder(RULES)
    x, y = (build.value(name, (2, 3), "float64", Role.INPUT) for name in "xy")
    with pytest.raises(InputError, match=r"'wide' gave a value of shape \[2, 3\]"):
        add_loss(build, loss_functions.LOSSES["wide"], x, y)


@pytest.mark.parametrize("of", ["target", "constant"])
def test_a_loss_that_no_weight_changes_is_refused(own: Loss, tmp_path: Path, of: str) -> None:
    def formula(build: Builder, prediction: str, target: str) -> str:
        return mean(build, target) if of == "target" else build("Identity", build.constant(1.0, "float32"))

    register(of)(formula)
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors() | {"y": nets.vectors()["x"][:, :3]})
    with pytest.raises(InputError, match="the loss depends on no weight"):
        oocdl.plan(
            nets.write_mlp(tmp_path / "net.onnx"), data, inputs={"x": "x"}, loss=loss_functions.LOSSES[of]
        )
