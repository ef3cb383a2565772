"""Checks what was read of a dataset before it is used: labels are classes, ids rows, numbers finite."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from oocdl.errors import DatasetError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import Labels


def check_labels(label: str, labels: Labels, values: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values`` that is no class and is not to be ignored.

    ``region`` is where in the array named ``label`` they were read, samples first.
    """
    if int(values.max()) < labels.classes and (values.dtype.kind in "ub" or int(values.min()) >= 0):
        return
    wrong = values >= labels.classes if labels.padded else (values < 0) | (values >= labels.classes)
    if labels.ignore_index is not None:
        wrong &= values != labels.ignore_index
    if wrong.any():
        ignored = "" if labels.ignore_index is None else f", and {labels.ignore_index} is ignored"
        way_out = (
            f"classes are 0 to {labels.classes - 1}{ignored}; mend the labels, or have the loss ignore them "
            "(ignore_index)"
        )
        if labels.padded or labels.what != "label":
            padding = ", and padding is negative" if labels.padded else ""
            way_out = f"{labels.what}s are 0 to {labels.classes - 1} here{padding}; mend the array"
        _refuse(label, labels.what, values, wrong, region, way_out)


def check_ids(label: str, rows: Rows, values: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values`` that is no row of the table it is looked up in.

    ``region`` is where in the array named ``label`` they were read, samples first.
    """
    low = -rows.rows if rows.negative else 0
    if int(values.max()) < rows.rows and (values.dtype.kind in "ub" or int(values.min()) >= low):
        return
    ends = f", or {low} to -1 from its end" if rows.negative else ""
    _refuse(
        label,
        "id",
        values,
        (values < low) | (values >= rows.rows),
        region,
        f"table {rows.table!r} has rows 0 to {rows.rows - 1}{ends}; mend the ids, or use a larger table",
    )


def check_finite(label: str, values: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values``, in the dtype they are used in, that is not finite."""
    with np.errstate(invalid="ignore"):
        ends = np.array([values.min(), values.max()])  # NaN if there is one: faster than a mask
    if not np.isfinite(ends).all():
        wrong = ~np.isfinite(values)
        if wrong.any():
            _refuse(
                label,
                "the number",
                values,
                wrong,
                region,
                f"inputs and targets have to be finite in {values.dtype}; mend the sample, or leave it out",
            )


def _refuse(label: str, what: str, values: Array, wrong: Any, region: Region, way_out: str) -> NoReturn:
    place = tuple(int(at) for at in np.unravel_index(int(np.argmax(wrong)), values.shape))
    sample, *index = (at + low for at, (low, _) in zip(place, region, strict=True))
    where = f"sample {sample}" + (f" at {index}" if index else "")
    raise DatasetError(f"{label} has {what} {values[place]} in {where}; {way_out}")
