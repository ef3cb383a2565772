"""Lowers the losses that ONNX has, which files of losses and training graphs hold, to sums over classes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from oocdl.errors import ModelError
from oocdl.graph.onnx.bounds import numbered
from oocdl.graph.onnx.context import Context, Lower, Operand


def _negative_log_likelihood(ctx: Context, chances: str) -> Operand:
    """``-w_y chances_y`` of the label y of each place, or its sum, or its mean over the weights that count.

    As in PyTorch: a place whose label is ``ignore_index`` counts nowhere, a mean over none is NaN. A label
    outside the classes gives NaN.
    """
    build, shape = ctx.build, ctx.build.shape(chances)
    if len(shape) < 2 or ctx.shape(1) != (shape[0], *shape[2:]):
        raise ModelError(f"labels {list(ctx.shape(1))} are not those of scores {list(shape)}")
    labels = ctx.reshape(ctx.value(1), (shape[0], 1, *shape[2:]))
    classes = build.constant(numbered(shape[1]).reshape(-1, *(1,) * (len(shape) - 2)), "int64")
    here, zero = ctx.make("Equal", labels, classes), ctx.number(0.0, chances)

    def at_label(values: str) -> str:  # Where, not Mul: what is not chosen may be infinite
        return ctx.make("ReduceSum", ctx.make("Where", here, values, zero), axes=(1,))

    outside = ctx.make("Less", labels, ctx.number(0, labels))
    outside = ctx.make("Or", outside, ctx.make("Greater", labels, ctx.number(shape[1] - 1, labels)))
    nan = ctx.number(float("nan"), chances)
    loss = ctx.make("Where", outside, nan, ctx.make("Neg", at_label(chances)))
    counts: str | None = None
    if ctx.has(2):
        counts = at_label(ctx.per_channel(ctx.value(2), len(shape)))
        loss = ctx.make("Mul", loss, counts)
    if (ignored := ctx.attr("ignore_index")) is not None:
        skipped = ctx.make("Equal", labels, ctx.number(int(ignored), labels))
        loss = ctx.make("Where", skipped, zero, loss)
        given = ctx.number(1.0, chances) if counts is None else counts
        counts = ctx.make("Where", skipped, zero, given)
    return _reduced(ctx, loss, counts)


def _reduced(ctx: Context, loss: str, counts: str | None) -> str:
    shape, reduction = ctx.build.shape(loss), ctx.attr("reduction", "mean")
    if reduction == "none":
        return ctx.reshape(loss, (shape[0], *shape[2:]))
    if reduction not in ("sum", "mean"):
        raise ModelError(f"reduction '{reduction}' is not none, sum or mean")
    axes = tuple(range(len(shape)))
    total = ctx.make("ReduceSum", loss, axes=axes)
    if reduction == "mean":
        number = ctx.number(float(prod(shape)), total)
        total = ctx.make("Div", total, ctx.make("ReduceSum", counts, axes=axes) if counts else number)
    return ctx.reshape(total, ())


def _nll(ctx: Context) -> Sequence[Operand]:
    return [_negative_log_likelihood(ctx, ctx.value(0))]


def _cross_entropy(ctx: Context) -> Sequence[Operand]:
    """Return the loss, and the logarithms of probabilities that it is of."""
    chances = ctx.make("LogSoftmax", ctx.value(0), axis=1)
    return [_negative_log_likelihood(ctx, chances), chances][: len(ctx.node.outputs)]


LOSSES: dict[str, Lower] = {
    "NegativeLogLikelihoodLoss": _nll,
    "SoftmaxCrossEntropyLoss": _cross_entropy,
}
"""Lowerings of losses."""
