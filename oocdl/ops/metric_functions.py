"""Metrics: sums of each sample, which are nodes, so that every axis may be cut, and numbers made of these.

Counts are whole numbers, and so exact; errors are summed in the widest dtype of the engine. The numbers are
those of the functions of MONAI and torchmetrics that each class names, on the same predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from oocdl.errors import InputError
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC
from oocdl.ops.loss_functions import ClassLoss, Head, Loss, labels_of
from oocdl.ops.losses.class_losses import CrossEntropy, along, is_label, labels_on_axis
from oocdl.ops.losses.number_losses import BCE
from oocdl.ops.own_loss import aligned

Numbers = npt.NDArray[np.float64]
Sums = Mapping[str, Numbers]
"""Name -> sums of each sample, of shape (samples, classes) or (samples, 1)."""
CLASS_SUMS = frozenset({"both", "predicted", "labelled", "counted", "exclusive"})
"""Names of the sums that only a loss of classes has."""
MOST_CLASSES = 32
"""Classes beyond which only the mean over all of them is told."""


@dataclass(frozen=True)
class Metric(ABC):
    """A number that tells how good predictions are; ``needs`` names the sums that it is made of."""

    needs: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name in the history, after ``val_``, and in what ``evaluate`` returns."""
        return type(self).__name__.lower().removesuffix("metric")

    @property
    def of_classes(self) -> bool:
        """Whether it is made of counts of classes; else it is made of errors."""
        return not CLASS_SUMS.isdisjoint(self.needs)

    @abstractmethod
    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the metric over all samples, and of each class as ``name/class``."""


@dataclass(frozen=True)
class Overlap(Metric):
    """A score of each class and sample; the metric is its mean over classes, then over samples.

    ``include_background``: whether class 0 counts. ``ignore_empty``: whether samples whose labels lack a
    class are left out of its mean; else they score 1 where it is not predicted either, and 0 where it is.
    """

    include_background: bool = True
    ignore_empty: bool = True
    needs = ("both", "predicted", "labelled")
    above: ClassVar[tuple[int, ...]]
    below: ClassVar[tuple[int, ...]]
    """Factors of the counts that are needed, above and below the line of a score."""

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the mean as in MONAI with ``reduction="mean"``, of classes as with "mean_batch"."""
        first = 0 if self.include_background or sums["both"].shape[1] == 1 else 1
        both, predicted, labelled = (sums[name][:, first:] for name in self.needs)
        counts = both, predicted, labelled
        scores = _ratio(_sum_of(counts, self.above), _sum_of(counts, self.below), 1.0)
        if self.ignore_empty:
            scores = np.where(labelled > 0, scores, np.nan)
        classes = [_mean(column) for column in scores.T]
        samples = np.array([_mean(row) for row in scores])[np.isfinite(scores).any(axis=1)]
        return {self.name: _mean(samples) if len(samples) else 0.0, **_each(self.name, classes, first)}


class DiceMetric(Overlap):
    """``2 |P and L| / (|P| + |L|)``, as MONAI's ``DiceMetric``."""

    above, below = (2, 0, 0), (0, 1, 1)


class IoU(Overlap):
    """``|P and L| / |P or L|``, as MONAI's ``MeanIoU``."""

    above, below = (1, 0, 0), (-1, 1, 1)


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of labels that are predicted, as torchmetrics' with ``average="micro"``.

    Where classes do not exclude each other, and where there is one, their absence counts as well.
    """

    needs = ("both", "predicted", "labelled", "counted", "exclusive")

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the share over all samples."""
        both, predicted, labelled, counted = np.broadcast_arrays(*(sums[name] for name in self.needs[:4]))
        if sums["exclusive"].all():
            right, places = both.sum(), labelled.sum()
        else:
            right, places = (counted - predicted - labelled + 2 * both).sum(), counted.sum()
        return {self.name: float(_ratio(right, places, 0.0))}


@dataclass(frozen=True)
class ByClass(Metric):
    """A ratio of counts over all samples; the metric is its mean over classes, as torchmetrics' ``"macro"``.

    Classes that occur neither in labels nor in predictions are left out.
    """

    needs = ("both", "predicted", "labelled", "counted")
    above: ClassVar[tuple[int, ...]]
    below: ClassVar[tuple[int, ...]]
    """Factors of the counts that are needed, above and below the line of a ratio."""

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the mean over classes, and each class."""
        counts = tuple(sums[name].sum(axis=0) for name in self.needs)
        scores = _ratio(_sum_of(counts, self.above), _sum_of(counts, self.below), 0.0)
        scores = np.where(counts[1] + counts[2] > 0, scores, np.nan)
        return {self.name: _mean(scores), **_each(self.name, list(scores), 0)}


class Sensitivity(ByClass):
    """The share of a class's labels that are predicted, which is its recall."""

    above, below = (1, 0, 0, 0), (0, 0, 1, 0)


class Precision(ByClass):
    """The share of a class's predictions that are labels."""

    above, below = (1, 0, 0, 0), (0, 1, 0, 0)


class Specificity(ByClass):
    """The share of what is not of a class that is not predicted as such."""

    above, below = (1, -1, -1, 1), (0, 0, -1, 1)


class F1(ByClass):
    """The harmonic mean of precision and sensitivity."""

    above, below = (2, 0, 0, 0), (0, 1, 1, 0)


@dataclass(frozen=True)
class MAE(Metric):
    """The mean of ``|x - y|``, as torchmetrics' ``MeanAbsoluteError``."""

    needs = ("absolute", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the mean over all values."""
        return {self.name: float(sums["absolute"].sum() / sums["values"].sum())}


@dataclass(frozen=True)
class RMSE(Metric):
    """The root of the mean of ``(x - y)^2``, as torchmetrics' ``MeanSquaredError(squared=False)``."""

    needs = ("squared", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the root over all values."""
        return {self.name: float(np.sqrt(sums["squared"].sum() / sums["values"].sum()))}


@dataclass(frozen=True)
class R2(Metric):
    """``1 - sum (x - y)^2 / sum (y - mean y)^2``, as torchmetrics' ``R2Score`` of all values together."""

    needs = ("squared", "truth", "truth_squared", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the coefficient over all values; NaN where all are equal."""
        squared, truth, truth_squared, values = (sums[name].sum() for name in self.needs)
        return {self.name: 1 - float(_ratio(squared, truth_squared - truth * truth / values, np.nan))}


@dataclass(frozen=True)
class PSNR(Metric):
    """``10 log10(max_val^2 / mean (x - y)^2)`` of each sample, and their mean, as MONAI's ``PSNRMetric``."""

    max_val: float = 1.0
    needs = ("squared", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        """Return the mean over samples, in decibels."""
        with np.errstate(divide="ignore"):
            found = 10 * np.log10(self.max_val**2 / (sums["squared"] / sums["values"]))
        return {self.name: float(found.mean())}


METRICS: Mapping[str, Metric] = {
    one.name: one
    for one in (
        DiceMetric(), IoU(), Accuracy(), Sensitivity(), Specificity(), Precision(), F1(), MAE(), RMSE(), R2(),
        PSNR(),
    )
}  # fmt: skip
"""All metrics that there are, by the names that ``fit(metrics=...)`` takes."""


def _sum_of(counts: Sequence[Numbers], factors: Sequence[int]) -> Numbers:
    """Return the sum of counts, each times its factor."""
    return sum((factor * count for factor, count in zip(factors, counts, strict=True)), np.zeros(()))


def _ratio(above: Numbers, below: Numbers, empty: float) -> Numbers:
    """Divide; ``empty`` where there is nothing to divide by."""
    there = np.asarray(below) != 0
    return np.where(there, np.asarray(above) / np.where(there, below, 1), empty)


def _mean(values: Numbers) -> float:
    """Return the mean of those that are numbers; NaN if none is."""
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else float("nan")


def _each(name: str, scores: list[float], first: int) -> dict[str, float]:
    """Name the scores of classes, unless there is one, or so many that nobody would read them."""
    if not 1 < len(scores) <= MOST_CLASSES:
        return {}
    return {f"{name}/{first + at}": float(score) for at, score in enumerate(scores)}


@dataclass(frozen=True)
class HeadSums:
    """The sums of a head that its metrics are made of."""

    values: Mapping[str, str]
    """Name of a sum -> its value in the graph, of shape (batch, classes) or (batch, 1)."""
    known: Mapping[str, float]
    """Name of a sum that does not depend on data -> its value for each sample."""


def add_metric_sums(
    build: Builder, metrics: Iterable[Metric], heads: Mapping[str, Head], dtype: str
) -> dict[str, HeadSums]:
    """Append the sums of each head that metrics need; those of errors are of ``dtype``.

    A metric is one of the heads whose losses have classes, or of the others. Raises InputError if there are
    no such heads.
    """
    metrics = tuple(metrics)
    for metric in metrics:
        if not any(suits(metric, head.spec) for head in heads.values()):
            losses = ", ".join(dict.fromkeys(type(head.spec).__name__ for head in heads.values()))
            told = ", ".join(name for name, one in METRICS.items() if one.of_classes == metric.of_classes)
            rule = "only a loss of classes has" if metric.of_classes else "only a loss without classes has"
            raise InputError(f"'{metric.name}' does not go with the loss {losses}: {rule} {told}")
    return {name: _head_sums(build, metrics, head, dtype) for name, head in heads.items()}


def suits(metric: Metric, spec: Loss) -> bool:
    """Whether a metric goes with a loss."""
    has_classes = isinstance(spec, ClassLoss | BCE)
    return has_classes == metric.of_classes and not isinstance(spec, CTC)


def _head_sums(build: Builder, metrics: Iterable[Metric], head: Head, dtype: str) -> HeadSums:
    wanted = dict.fromkeys(name for one in metrics if suits(one, head.spec) for name in one.needs)
    found = {
        name: _class_sum(build, head, name) if name in CLASS_SUMS else _error_sum(build, head, name, dtype)
        for name in wanted
    }
    return HeadSums(
        {name: value for name, value in found.items() if isinstance(value, str)},
        {name: value for name, value in found.items() if isinstance(value, float)},
    )


def _class_sum(build: Builder, head: Head, name: str) -> str | float:
    """Add a count of each sample and class; equal nodes of several are merged later."""
    logits, shape = head.logits, build.shape(head.logits)
    known = labels_of(head.spec, shape, build.shape(head.target))
    is_exclusive = isinstance(head.spec, CrossEntropy) or (known is not None and shape[1] > 1)
    if not is_exclusive:
        axis, labels, zero = 1, head.target, build.like(0.0, logits)
        predicted = build("Greater", logits, zero)
        labelled = build("Greater", aligned(build, logits, labels), build.like(0.5, logits))
    else:
        labels, axis = labels_on_axis(build, logits, head.target)
        predicted, labelled = _is_predicted(build, logits, axis), is_label(build, labels, logits, axis)
    if name == "exclusive":
        return float(is_exclusive)
    there = None
    if known is not None and known.ignore_index is not None:
        there = build("Not", build("Equal", labels, build.constant(known.ignore_index, build.dtype(labels))))
        there = build("Reshape", there, shape=(*shape[:axis], 1, *shape[axis + 1 :]))
    if name == "counted":
        return float(prod(shape[1:]) / shape[axis]) if there is None else _per_class(build, there, axis)
    where = {"predicted": predicted, "labelled": labelled}.get(name) or build("And", predicted, labelled)
    return _per_class(build, where if there is None else build("And", where, there), axis)


def _is_predicted(build: Builder, logits: str, axis: int) -> str:
    """Add a value that tells where the class is predicted: the first of those with the largest logit."""
    shape = build.shape(logits)
    marks = build.constant(along(np.arange(shape[axis], 0, -1), axis, len(shape)), "int64", stem="marks")
    best = build("Equal", logits, build("ReduceMax", logits, axes=(axis,)))
    found = build("Where", best, marks, build.constant(0, "int64"))
    return build("Equal", marks, build("ReduceMax", found, axes=(axis,)))


def _per_class(build: Builder, where: str, axis: int) -> str:
    """Count the places of each sample and class: along the last axis in float32, then as whole numbers."""
    shape = build.shape(where)
    others = [place for place in range(1, len(shape)) if place != axis]
    counts = build("Cast", where, to="float32")
    if others:
        counts = build("ReduceSum", counts, axes=(others[-1],))
    counts = build("Cast", counts, to="int64")
    if others[:-1]:
        counts = build("ReduceSum", counts, axes=tuple(others[:-1]))
    return build("Reshape", counts, shape=(shape[0], shape[axis]))


def _error_sum(build: Builder, head: Head, name: str, dtype: str) -> str | float:
    """Add a sum of each sample over its errors, or over its target."""
    shape = build.shape(head.logits)
    if name == "values":
        return float(prod(shape[1:]))
    y = build("Cast", aligned(build, head.logits, head.target), to=dtype)
    if name in ("absolute", "squared"):
        y = build("Sub", build("Cast", head.logits, to=dtype), y)
    if name == "absolute":
        y = build("Abs", y)
    elif name != "truth":
        y = build("Mul", y, y)
    axes = tuple(range(1, len(shape)))
    return build("Reshape", build("ReduceSum", y, axes=axes) if axes else y, shape=(shape[0], 1))
