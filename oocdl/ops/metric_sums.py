"""Sums of each sample that metrics are made of: nodes, so that every axis may be cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC
from oocdl.ops.expression import Lifted, apply, equal, lift, where
from oocdl.ops.loss_functions import ClassLoss, Head, Loss, labels_of
from oocdl.ops.losses.class_losses import CrossEntropy, along_classes, class_axis, classes_of, labels_on_axis
from oocdl.ops.losses.number_losses import BCE
from oocdl.ops.metric_functions import CLASS_SUMS, DISTANCES, EXCLUSIVE_SUMS, METRICS, Metric, TopK
from oocdl.ops.own_loss import OwnMetric, truth_of


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
        if not any(suits(metric, output, head.spec) for output, head in heads.items()):
            if isinstance(metric, OwnMetric):
                its = f"'{metric.name}' is of output '{metric.output}'"
                raise InputError(f"{its}; those with a loss: {', '.join(heads)}")
            losses = ", ".join(dict.fromkeys(type(head.spec).__name__ for head in heads.values()))
            alike = (one for one in METRICS.values() if one.of_classes == metric.of_classes)
            told = ", ".join(one.name for one in alike if not isinstance(one, OwnMetric))
            rule = "only a loss of classes has" if metric.of_classes else "only a loss without classes has"
            raise InputError(f"'{metric.name}' does not go with the loss {losses}: {rule} {told}")
    apart = {name: [one for one in metrics if suits(one, name, head.spec)] for name, head in heads.items()}
    return {name: _head_sums(build, apart[name], head, dtype) for name, head in heads.items()}


def suits(metric: Metric, output: str, spec: Loss) -> bool:
    """Whether an output with a loss has a metric."""
    if isinstance(metric, OwnMetric):
        return metric.output in (None, output)
    has_classes = isinstance(spec, ClassLoss | BCE)
    return has_classes == metric.of_classes and not isinstance(spec, CTC)


def _head_sums(build: Builder, metrics: Iterable[Metric], head: Head, dtype: str) -> HeadSums:
    wanted = dict.fromkeys(name for one in metrics if not isinstance(one, OwnMetric) for name in one.needs)
    if not DISTANCES.isdisjoint(wanted):
        _check_places(build, head, next(name for name in wanted if name in DISTANCES))
    x = lift(build, head.logits)
    sums: dict[str, Any] = {
        name: _class_sum(x, head, name) if name in CLASS_SUMS else _error_sum(x, head, name, dtype)
        for name in wanted
        if name not in DISTANCES
    }
    for one in metrics:
        if isinstance(one, OwnMetric):
            sums |= _own_sums(x, one, head, dtype)
        elif isinstance(one, TopK) and one.k >= (classes := sums["ranked"].shape[1]):
            its = f"'topk' of k={one.k} is 1 for any predictions of {classes} classes"
            raise InputError(f"{its}; pass oocdl.metrics.TopK of a smaller k, or leave it out")
    return HeadSums(
        {name: value.name for name, value in sums.items() if isinstance(value, Lifted)},
        {name: value for name, value in sums.items() if isinstance(value, float)},
    )


def _check_places(build: Builder, head: Head, name: str) -> None:
    """Raise InputError unless each place in space has one class: of several channels, or as the only one."""
    logits, labels = build.shape(head.logits), build.shape(head.target)
    known = labels_of(head.spec, logits, labels)
    several = known is not None and logits[1:2] > (1,) and class_axis(logits, labels) == 1
    if len(logits) < 3 or not (several or (logits[1] == 1 and not isinstance(head.spec, CrossEntropy))):
        its = f"{type(head.spec).__name__} of outputs of shape {list(logits)}"
        raise InputError(f"'{name}' takes a loss with one class at each place in space, not {its}")


def _class_sum(x: Lifted, head: Head, name: str) -> Lifted | float:
    """Add a count of each sample and class; equal nodes of several are merged later."""
    if len(x.shape) == 1:  # one number a sample is of one class
        x = apply("Reshape", x, shape=(*x.shape, 1))
    shape, labels = x.shape, x.to(head.target)
    known = labels_of(head.spec, shape, labels.shape)
    is_exclusive = isinstance(head.spec, CrossEntropy) or (known is not None and shape[1] > 1)
    if is_exclusive:
        labels, axis = labels_on_axis(x, head.target)
        predicted, labelled = _is_predicted(x, axis), equal(labels, classes_of(x, axis))
    else:
        axis, predicted, labelled = 1, x > 0.0, truth_of(x, head.target) > 0.5
    if name == "exclusive":
        return float(is_exclusive)
    if name in EXCLUSIVE_SUMS and not is_exclusive:
        metric = next(one.name for one in METRICS.values() if name in one.needs)
        its = f"{type(head.spec).__name__} of {shape[1]} channels"
        raise InputError(f"'{metric}' takes a loss with one class of several at each place, not {its}")
    there = _counted_places(x, head)
    if name == "counted":
        return float(prod(shape[1:]) / shape[axis]) if there is None else _per_class(there, axis)
    if name == "joint":
        return _joint(labelled if there is None else apply("And", labelled, there), predicted, axis)
    if name == "ranked":
        counted = equal(_rank(x, labels, labelled, axis), classes_of(x, axis))
    elif name == "both":
        counted = apply("And", predicted, labelled)
    else:
        counted = predicted if name == "predicted" else labelled
    return _per_class(counted if there is None else apply("And", counted, there), axis)


def _counted_places(x: Lifted, head: Head) -> Lifted | None:
    """Add a value that tells which places have a label that counts, with 1 class; None if each counts."""
    known = labels_of(head.spec, x.shape, x.to(head.target).shape)
    if known is None or known.ignore_index is None:
        return None
    labels, axis = x.to(head.target), 1
    if isinstance(head.spec, CrossEntropy) or x.shape[1] > 1:
        labels, axis = labels_on_axis(x, head.target)
    there = apply("Not", equal(labels, known.ignore_index))
    return apply("Reshape", there, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))


def _is_predicted(x: Lifted, axis: int) -> Lifted:
    """Add a value that tells where the class is predicted: the first of those with the largest logit."""
    marks = along_classes(x, np.arange(x.shape[axis], 0, -1), axis, "marks")
    best = equal(x, apply("ReduceMax", x, axes=(axis,)))
    return equal(marks, apply("ReduceMax", where(best, marks, marks.number(0)), axes=(axis,)))


def _rank(x: Lifted, labels: Lifted, labelled: Lifted, axis: int) -> Lifted:
    """Add the number of classes before the label, by falling logits; the last where a logit is NaN."""
    own = apply("ReduceSum", where(labelled, x, x.number(0.0)), axes=(axis,))
    later = apply("And", equal(x, own), labels < classes_of(x, axis))
    beaten = apply("Or", x < own, later).cast("int64")
    last = labels.number(x.shape[axis] - 1)
    return last - apply("ReduceSum", beaten, axes=(axis,))


def _joint(labelled: Lifted, predicted: Lifted, axis: int) -> Lifted:
    """Count the places of each sample by true and predicted class, as products along the last axis."""
    shape, rows, columns = labelled.shape, labelled.cast("float32"), predicted.cast("float32")
    if len(shape) == 2:
        shape = (*shape, 1)
        rows, columns = (apply("Reshape", one, shape=shape) for one in (rows, columns))
    left = "abcdefgh"[: len(shape)]
    outer = left.replace(left[axis], "")[:-1]
    equation = f"{left},{left.replace(left[axis], 'z')}->{outer}{left[axis]}z"
    counts: Lifted = apply("Einsum", rows, columns, equation=equation)
    counts = counts.cast("int64").summed(tuple(range(1, len(outer))))
    return apply("Reshape", counts, shape=(shape[0], shape[axis] ** 2))


def _per_class(there: Lifted, axis: int) -> Lifted:
    """Count the places of each sample and class: along the last axis in float32, then as whole numbers."""
    others = tuple(place for place in range(1, len(there.shape)) if place != axis)
    counts = there.cast("float32").summed(others[-1:]).cast("int64").summed(others[:-1])
    return apply("Reshape", counts, shape=(there.shape[0], there.shape[axis]))


def _error_sum(x: Lifted, head: Head, name: str, dtype: str) -> Lifted | float:
    """Add a sum of each sample over its errors, or over its target."""
    if name == "values":
        return float(prod(x.shape[1:]))
    y = apply("Cast", truth_of(x, head.target), to=dtype)
    if name in ("absolute", "squared"):
        y = apply("Cast", x, to=dtype) - y
    if name == "spread":
        axes = tuple(range(1, len(y.shape)))
        y = y - (y.summed(axes) / float(prod(y.shape[1:])) if axes else y)
    if name == "absolute":
        y = apply("Abs", y)
    elif name != "truth":
        y = y * y
    return _per_sample(y)


def _per_sample(y: Lifted) -> Lifted:
    return apply("Reshape", y.summed(tuple(range(1, len(y.shape)))), shape=(y.shape[0], 1))


def _own_sums(x: Lifted, metric: OwnMetric, head: Head, dtype: str) -> dict[str, Lifted | float]:
    """Add the sums of a metric of the user's; InputError if it gives no values of samples.

    A single value that has the places of labels counts where these do.
    """
    made: Any = metric.formula()(x.build, x.name, head.target)
    names = made if isinstance(made, tuple) else (made,)
    shapes = [list(x.build.shape(name)) if name in x.build.values else None for name in names]
    if len(names) not in (1, 2) or any(shape is None or shape[:1] != [x.shape[0]] for shape in shapes):
        wanted = f"it has to give one, or two, with the samples, {x.shape[0]} here, on axis 0"
        raise InputError(f"the metric '{metric.title}' gave values of shapes {shapes}; {wanted}")
    y, *weights = (apply("Cast", x.to(name), to=dtype) for name in names)
    sums: list[Lifted | float] = [_per_sample(one) for one in weights]
    there = None if weights or len(x.shape) == 1 else _counted_places(x, head)
    if there is not None and y.shape == x.to(head.target).shape:
        there = apply("Reshape", there, shape=y.shape)
    if there is not None and y.shape in (there.shape, x.shape):
        y = where(there, y, y.number(0.0))
        sums = [_per_sample(apply("Cast", there, to=dtype)) * (prod(y.shape) / prod(there.shape))]
    return dict(zip(metric.needs, [_per_sample(y), *sums, float(prod(y.shape[1:]))], strict=False))
