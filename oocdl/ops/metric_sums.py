"""Sums of each sample that metrics are made of: nodes, so that every axis may be cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from oocdl.errors import InputError
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.ctc import CTC
from oocdl.ops.loss_functions import ClassLoss, Head, Loss, labels_of
from oocdl.ops.losses.class_losses import CrossEntropy, along, class_axis, is_label, labels_on_axis
from oocdl.ops.losses.number_losses import BCE
from oocdl.ops.metric_functions import CLASS_SUMS, DISTANCES, EXCLUSIVE_SUMS, METRICS, Metric
from oocdl.ops.own_loss import aligned


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
    if not DISTANCES.isdisjoint(wanted):
        _check_places(build, head, next(name for name in wanted if name in DISTANCES))
    wanted = {name: None for name in wanted if name not in DISTANCES}
    found = {
        name: _class_sum(build, head, name) if name in CLASS_SUMS else _error_sum(build, head, name, dtype)
        for name in wanted
    }
    return HeadSums(
        {name: value for name, value in found.items() if isinstance(value, str)},
        {name: value for name, value in found.items() if isinstance(value, float)},
    )


def _check_places(build: Builder, head: Head, name: str) -> None:
    """Raise InputError unless each place in space has one class: of several channels, or as the only one."""
    logits, labels = build.shape(head.logits), build.shape(head.target)
    known = labels_of(head.spec, logits, labels)
    several = known is not None and logits[1:2] > (1,) and class_axis(logits, labels) == 1
    if len(logits) < 3 or not (several or (logits[1] == 1 and not isinstance(head.spec, CrossEntropy))):
        raise InputError(
            f"'{name}' takes a loss with one class at each place in space, not {type(head.spec).__name__} of "
            f"outputs of shape {list(logits)}"
        )


def _class_sum(build: Builder, head: Head, name: str) -> str | float:
    """Add a count of each sample and class; equal nodes of several are merged later."""
    logits, shape = head.logits, build.shape(head.logits)
    if len(shape) == 1:  # one number a sample is of one class
        logits, shape = build("Reshape", logits, shape=(*shape, 1)), (*shape, 1)
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
    if name in EXCLUSIVE_SUMS and not is_exclusive:
        metric = next(one.name for one in METRICS.values() if name in one.needs)
        raise InputError(
            f"'{metric}' takes a loss with one class of several at each place, not "
            f"{type(head.spec).__name__} of {shape[1]} channels"
        )
    there = None
    if known is not None and known.ignore_index is not None:
        there = build("Not", build("Equal", labels, build.constant(known.ignore_index, build.dtype(labels))))
        there = build("Reshape", there, shape=(*shape[:axis], 1, *shape[axis + 1 :]))
    if name == "counted":
        return float(prod(shape[1:]) / shape[axis]) if there is None else _per_class(build, there, axis)
    if name == "joint":
        counted = labelled if there is None else build("And", labelled, there)
        return _joint(build, counted, predicted, axis)
    if name == "ranked":
        where = build("Equal", _rank(build, logits, labels, labelled, axis), _classes(build, logits, axis))
    else:
        where = {"predicted": predicted, "labelled": labelled}.get(name) or build("And", predicted, labelled)
    return _per_class(build, where if there is None else build("And", where, there), axis)


def _is_predicted(build: Builder, logits: str, axis: int) -> str:
    """Add a value that tells where the class is predicted: the first of those with the largest logit."""
    shape = build.shape(logits)
    marks = build.constant(along(np.arange(shape[axis], 0, -1), axis, len(shape)), "int64", stem="marks")
    best = build("Equal", logits, build("ReduceMax", logits, axes=(axis,)))
    found = build("Where", best, marks, build.constant(0, "int64"))
    return build("Equal", marks, build("ReduceMax", found, axes=(axis,)))


def _classes(build: Builder, logits: str, axis: int) -> str:
    """Add the numbers of the classes, along their axis."""
    shape = build.shape(logits)
    return build.constant(along(np.arange(shape[axis]), axis, len(shape)), "int64", stem="classes")


def _rank(build: Builder, logits: str, labels: str, labelled: str, axis: int) -> str:
    """Add the number of classes before the label, by falling logits; the last where a logit is NaN."""
    own = build("ReduceSum", build("Where", labelled, logits, build.like(0.0, logits)), axes=(axis,))
    later = build("And", build("Equal", logits, own), build("Less", labels, _classes(build, logits, axis)))
    beaten = build("Cast", build("Or", build("Less", logits, own), later), to="int64")
    last = build.constant(build.shape(logits)[axis] - 1, "int64")
    return build("Sub", last, build("ReduceSum", beaten, axes=(axis,)))


def _joint(build: Builder, labelled: str, predicted: str, axis: int) -> str:
    """Count the places of each sample by true and predicted class, as products along the last axis."""
    shape = build.shape(labelled)
    rows, columns = (build("Cast", one, to="float32") for one in (labelled, predicted))
    if len(shape) == 2:
        shape = (*shape, 1)
        rows, columns = (build("Reshape", one, shape=shape) for one in (rows, columns))
    letters = [chr(ord("a") + place) for place in range(len(shape))]
    outer = [letter for place, letter in enumerate(letters) if place != axis][:-1]
    left, right = (
        "".join(letters),
        "".join("z" if place == axis else one for place, one in enumerate(letters)),
    )
    equation = f"{left},{right}->{''.join(outer)}{letters[axis]}z"
    counts = build("Cast", build("Einsum", rows, columns, equation=equation), to="int64")
    if outer[1:]:
        counts = build("ReduceSum", counts, axes=tuple(range(1, len(outer))))
    return build("Reshape", counts, shape=(shape[0], shape[axis] ** 2))


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
