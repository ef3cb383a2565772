"""Metrics: numbers made of sums of each sample, which `metric_sums.py` adds to the graph as nodes.

Counts are whole numbers, and so exact; errors are summed in the widest dtype of the engine. The numbers are
those of the functions of MONAI and torchmetrics that each class names, on the same predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from oocdl.errors import InputError

Numbers = npt.NDArray[np.float64]
Sums = Mapping[str, Numbers]
"""Name -> sums of each sample, of shape (samples, classes) or (samples, 1)."""
EXCLUSIVE_SUMS = frozenset({"ranked", "joint"})
"""Names of the sums that only a loss with one class of several at each place has."""
DISTANCES = frozenset({"hd95", "asd"})
"""Names of what is no sum of a graph: distances of each sample and class, made of labels."""
CLASS_SUMS = EXCLUSIVE_SUMS | DISTANCES | {"both", "predicted", "labelled", "counted", "exclusive"}
"""Names of the sums that only a loss of classes has."""
MOST_CLASSES = 32
"""Classes beyond which only the mean over all of them is told."""


@dataclass(frozen=True)
class Metric(ABC):
    """A number that tells how good predictions are."""

    of_runs: ClassVar[bool] = True
    """Whether validations of a run compute it, too; else only ``evaluate`` does."""

    @property
    def name(self) -> str:
        """The name in the history, after ``val_``, and in what ``evaluate`` returns."""
        return type(self).__name__.lower().removesuffix("metric")

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """Names of the sums that it is made of."""

    @property
    def of_classes(self) -> bool:
        """Whether it is made of counts of classes; else it is made of errors."""
        return not CLASS_SUMS.isdisjoint(self.needs)

    @abstractmethod
    def numbers(self, sums: Sums) -> dict[str, Any]:
        """Return the metric over all samples, and of each class as ``name/class``."""

    def of_sample(self, sums: Sums) -> dict[str, Any]:
        """Return the same of a single sample, NaN where it has nothing to tell."""
        found = self.numbers(sums)
        return found if np.any(sums.get("counted", 1)) else dict.fromkeys(found, float("nan"))


class _Scored(Metric):
    """A score of each class, made of the counts that are needed."""

    above: ClassVar[tuple[int, ...]]
    below: ClassVar[tuple[int, ...]]
    """Factors of the counts above and below the line of a score."""

    def scores(self, counts: Sequence[Numbers], empty: float) -> Numbers:
        """Return the scores; ``empty`` where there is nothing to divide by."""
        sums = [zip(factors, counts, strict=True) for factors in (self.above, self.below)]
        above, below = (sum((factor * count for factor, count in one), np.zeros(())) for one in sums)
        return ratio(above, below, empty)


@dataclass(frozen=True)
class Overlap(_Scored):
    """A score of each class and sample; the metric is its mean over classes, then over samples.

    ``include_background``: whether class 0 counts. ``ignore_empty``: whether samples whose labels lack a
    class are left out of its mean; else they score 1 where it is not predicted either, and 0 where it is.
    """

    include_background: bool = True
    ignore_empty: bool = True
    needs = ("both", "predicted", "labelled")

    def of_sample(self, sums: Sums) -> dict[str, float]:
        """Return the same of a single sample; NaN where it has none of the classes."""
        return self.numbers(sums, float("nan"))

    def numbers(self, sums: Sums, empty: float = 0.0) -> dict[str, float]:
        """Return the mean as in MONAI with ``reduction="mean"``, of classes as with "mean_batch"."""
        first = 0 if self.include_background or sums["both"].shape[1] == 1 else 1
        counts = [sums[name][:, first:] for name in self.needs]
        scores = self.scores(counts, 1.0)
        if self.ignore_empty:
            scores = np.where(counts[2] > 0, scores, np.nan)
        return _of_samples(self.name, scores, first, empty)


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
        both, predicted, labelled, counted = np.broadcast_arrays(*(sums[name] for name in self.needs[:4]))
        if sums["exclusive"].all():
            right, places = both.sum(), labelled.sum()
        else:
            right, places = (counted - predicted - labelled + 2 * both).sum(), counted.sum()
        return {self.name: float(ratio(right, places, 0.0))}


@dataclass(frozen=True)
class ByClass(_Scored):
    """A ratio of counts over all samples; the metric is its mean over classes, as torchmetrics' ``"macro"``.

    Classes that occur neither in labels nor in predictions are left out where classes exclude each other.
    """

    needs = ("both", "predicted", "labelled", "counted", "exclusive")

    def numbers(self, sums: Sums) -> dict[str, float]:
        counts = [sums[name].sum(axis=0) for name in self.needs[:4]]
        is_absent = sums["exclusive"].all() & (counts[1] + counts[2] == 0)
        scores = np.where(is_absent, np.nan, self.scores(counts, 0.0))
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
        return {self.name: float(sums["absolute"].sum() / sums["values"].sum())}


@dataclass(frozen=True)
class RMSE(Metric):
    """The root of the mean of ``(x - y)^2``, as torchmetrics' ``MeanSquaredError(squared=False)``."""

    needs = ("squared", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        return {self.name: float(np.sqrt(sums["squared"].sum() / sums["values"].sum()))}


@dataclass(frozen=True)
class R2(Metric):
    """``1 - sum (x - y)^2 / sum (y - mean y)^2``, as torchmetrics' ``R2Score`` of all values together.

    NaN where all are equal. The spread of a sample is about its own mean: squares in float32 would cancel.
    """

    needs = ("squared", "truth", "spread", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        squared, truth, spread, values = (sums[name] for name in self.needs)
        around = values * (truth / values - truth.sum() / values.sum()) ** 2
        return {self.name: 1 - float(ratio(squared.sum(), spread.sum() + around.sum(), np.nan))}


@dataclass(frozen=True)
class PSNR(Metric):
    """``10 log10(max_val^2 / mean (x - y)^2)`` of each sample, in decibels, and their mean, as MONAI's."""

    max_val: float = 1.0
    needs = ("squared", "values")

    def numbers(self, sums: Sums) -> dict[str, float]:
        with np.errstate(divide="ignore"):
            found = 10 * np.log10(self.max_val**2 / (sums["squared"] / sums["values"]))
        return {self.name: float(found.mean())}


@dataclass(frozen=True)
class TopK(Metric):
    """The share of labels that are among the k largest logits, as torchmetrics' ``Accuracy(top_k=k)``.

    Of equal logits the first is the larger one, as for ``argmax``; the average is "micro".
    """

    k: int = 5
    needs = ("ranked", "counted")

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise InputError(f"k of topk must be a whole number from 1, not {self.k!r}")

    def numbers(self, sums: Sums) -> dict[str, float]:
        places = np.broadcast_to(sums["counted"][:, :1], (len(sums["ranked"]), 1))
        return {self.name: float(ratio(sums["ranked"][:, : self.k].sum(), places.sum(), 0.0))}


@dataclass(frozen=True)
class Confusion(Metric):
    """Counts [C, C] by true (rows) and predicted class (columns), as torchmetrics' ``ConfusionMatrix``."""

    needs = ("joint",)
    of_runs = False

    def numbers(self, sums: Sums) -> dict[str, npt.NDArray[np.int64]]:
        counts = sums["joint"].sum(axis=0).astype(np.int64)
        return {self.name: counts.reshape(2 * (round(len(counts) ** 0.5),))}


@dataclass(frozen=True)
class Surface(Metric):
    """A distance of the surfaces of predicted and true labels, of each sample and class, in millimetres.

    It is made of labels, not of sums in the graph. Samples that have a class neither predicted nor as a
    label are left out of its mean, and where one of both lacks it, the distance is what MONAI has.
    """

    include_background: bool = False
    of_runs = False

    @abstractmethod
    def distance(self, there: Numbers, back: Numbers) -> float:
        """Return the distance, of those of each predicted edge voxel to the true surface, and back."""

    def numbers(self, sums: Sums) -> dict[str, float]:
        first = 0 if self.include_background or sums[self.name].shape[1] == 1 else 1
        return _of_samples(self.name, sums[self.name][:, first:], first, float("nan"))


class HD95(Surface):
    """The larger of the 95th percentiles both ways, as MONAI's ``HausdorffDistanceMetric(percentile=95)``.

    Where only labels or only predictions have a class, it is NaN, and left out of the mean.
    """

    needs = ("hd95",)

    def distance(self, there: Numbers, back: Numbers) -> float:
        if not len(there) or not len(back):
            return float("nan")
        return float(max(np.percentile(there, 95), np.percentile(back, 95)))


class ASD(Surface):
    """The mean distance of all edge voxels, as MONAI's ``SurfaceDistanceMetric(symmetric=True)``.

    Where only labels or only predictions have a class, it is infinite.
    """

    needs = ("asd",)

    def distance(self, there: Numbers, back: Numbers) -> float:
        if not len(there) or not len(back):
            return float("inf") if len(there) + len(back) else float("nan")
        return float((there.sum() + back.sum()) / (len(there) + len(back)))


METRICS: dict[str, Metric] = {
    one.name: one
    for one in (
        DiceMetric(), IoU(), Accuracy(), Sensitivity(), Specificity(), Precision(), F1(), MAE(), RMSE(), R2(),
        PSNR(), TopK(), Confusion(), HD95(), ASD(),
    )
}  # fmt: skip
"""All metrics that there are, by the names that ``fit(metrics=...)`` and ``evaluate`` take."""


def ratio(above: npt.ArrayLike, below: npt.ArrayLike, empty: float) -> Numbers:
    """Divide; return ``empty`` where there is nothing to divide by."""
    there = np.asarray(below) != 0
    return np.where(there, np.asarray(above) / np.where(there, below, 1), empty)


def _mean(values: Numbers) -> float:
    """Return the mean of those that are numbers; NaN if none is."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")


def _of_samples(name: str, scores: Numbers, first: int, empty: float) -> dict[str, float]:
    """Return the mean of scores (samples, classes) over classes, then samples, and that of each class."""
    samples = np.array([_mean(row) for row in scores if not np.isnan(row).all()])
    classes = [_mean(column) for column in scores.T]
    return {name: _mean(samples) if len(samples) else empty, **_each(name, classes, first)}


def _each(name: str, scores: list[float], first: int) -> dict[str, float]:
    """Name the scores of classes, unless there is one, or so many that nobody would read them."""
    if not 1 < len(scores) <= MOST_CLASSES:
        return {}
    return {f"{name}/{first + at}": float(score) for at, score in enumerate(scores)}
