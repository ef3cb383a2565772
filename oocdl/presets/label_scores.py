"""Scores of predicted volumes of labels, as nnU-Net's ``summary.json`` has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.data.cases import values
from oocdl.data.nifti import read_header

Counts = npt.NDArray[np.int64]  # voxels by true and predicted class


def summary(pairs: Sequence[tuple[Path, Path]], classes: int) -> dict[str, Any]:
    """Compare pairs of true and predicted volumes in NIfTI; a voxel whose true class is higher is ignored.

    Means are over the volumes in which a class is, or is predicted.
    """
    rows = [
        {
            "reference_file": str(truth),
            "prediction_file": str(predicted),
            "metrics": {str(number): metrics(counts, number) for number in range(1, classes)},
        }
        for truth, predicted in pairs
        for counts in [count(truth, predicted, classes)]
    ]
    each: list[Any] = [row["metrics"] for row in rows]
    mean = {number: _means([one[number] for one in each]) for number in each[0]}
    return {"foreground_mean": _means([*mean.values()]), "mean": mean, "metric_per_case": rows}


def count(truth: Path, predicted: Path, classes: int) -> Counts:
    """Count the voxels of two volumes by true and predicted class, plane by plane."""
    counts = np.zeros((classes, classes), np.int64)
    for true, guess in zip(_planes(truth), _planes(predicted), strict=True):
        known = true < classes
        both = np.bincount(true[known] * classes + guess[known], minlength=classes**2)
        counts += both.reshape(classes, classes)
    return counts


def _planes(path: Path) -> Iterator[npt.NDArray[Any]]:
    for piece in values(read_header(path), np.dtype(np.int64)):
        yield from piece


def metrics(counts: Counts, number: int) -> dict[str, float]:
    """Return nnU-Net's numbers of a class; NaN where neither volume has it."""
    found, truth = int(counts[:, number].sum()), int(counts[number].sum())
    both = int(counts[number, number])
    either = found + truth - both
    return {
        "Dice": 2 * both / (found + truth) if either else float("nan"),
        "IoU": both / either if either else float("nan"),
        "FN": truth - both,
        "FP": found - both,
        "TP": both,
        "TN": int(counts.sum()) - either,
        "n_pred": found,
        "n_ref": truth,
    }


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: _mean(row[name] for row in rows) for name in rows[0]}


def _mean(numbers: Iterable[float]) -> float:
    known = [number for number in numbers if number == number]  # NaN alone is not equal to itself
    return float(np.mean(known)) if known else float("nan")
