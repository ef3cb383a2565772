"""Checks values before they are used: labels are classes, ids rows, numbers of a dataset finite.

An index or divisor that a network computes is checked by the engine; here is what the user is told of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from oocdl.engines.checked_indices import IndexOutside, ZeroDivisor
from oocdl.errors import DatasetError, IndexRangeError, InputError, NonFiniteError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.index import Region
from oocdl.graph.partition.unit import Unit
from oocdl.graph.transforms.factorize import Factored
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import Labels
from oocdl.planning.calls import UnitCall


def check_labels(label: str, labels: Labels, values: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values`` that is no class and is not to be ignored.

    ``region`` is where in the array named ``label`` they were read, samples first.
    """
    wrong = _outside(values, -math.inf if labels.padded else 0, labels.classes)
    if wrong is not None and labels.ignore_index is not None:
        wrong &= values != labels.ignore_index
    if wrong is None or not wrong.any():
        return
    if labels.padded or labels.what != "label":
        padding = ", and padding is negative" if labels.padded else ""
        factor = ", or give its factor in scale=" if labels.what == "target" else ""
        way_out = f"{labels.what}s are 0 to {labels.classes - 1} here{padding}; mend the array{factor}"
    else:
        ignored = "" if labels.ignore_index is None else f", and {labels.ignore_index} is ignored"
        way_out = (
            f"classes are 0 to {labels.classes - 1}{ignored}; mend the labels, or have the loss ignore them "
            "(ignore_index)"
        )
    _refuse(label, labels.what, values, wrong, region, way_out)


def check_ids(label: str, rows: Rows, values: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values`` that is no row of the table it is looked up in.

    ``region`` is where in the array named ``label`` they were read, samples first.
    """
    low = -rows.rows if rows.negative else 0
    wrong = _outside(values, low, rows.rows)
    if wrong is not None:
        ends = f", or {low} to -1 from its end" if rows.negative else ""
        table = f"table {rows.table!r} has rows 0 to {rows.rows - 1}{ends}"
        _refuse(label, "id", values, wrong, region, f"{table}; mend the ids, or use a larger table")


def _outside(values: Array, low: float, high: int) -> Array | None:
    """Return which of ``values`` are not from ``low`` to below ``high``; None if all of them are."""
    if int(values.max()) < high and (values.dtype.kind in "ub" or int(values.min()) >= low):
        return None
    wrong: Array = (values < low) | (values >= high)
    return wrong


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


def check_whole(label: str, values: Array, used: Array, region: Region) -> None:
    """Raise DatasetError for the first of ``values`` that is another number where it is ``used`` as int64."""
    if used.dtype == np.int64 and not np.can_cast(values.dtype, np.int64) and (wrong := values != used).any():
        way_out = "the model takes whole numbers of int64 there; mend the array, or the type of the input"
        _refuse(label, "the number", values, wrong, region, way_out)


def _refuse(label: str, what: str, values: Array, wrong: Any, region: Region, way_out: str) -> NoReturn:
    place = tuple(int(at) for at in np.unravel_index(int(np.argmax(wrong)), values.shape))
    sample, *index = (at + low for at, (low, _) in zip(place, region, strict=True))
    where = f"sample {sample}" + (f" at {index}" if index else "")
    raise DatasetError(f"{label} has {what} {values[place]} in {where}; {way_out}")


def number_error(
    error: IndexOutside | ZeroDivisor, call: UnitCall, factored: Factored, samples: Sequence[int]
) -> InputError:
    """Return the error that names node, number and the rows of the dataset in the batch."""
    node = _node_of(call.unit, factored, error.slot)
    where = f"node '{node}'" if node else f"layer '{call.key.layer}'"
    if isinstance(error, ZeroDivisor):
        return InputError(
            f"{where} divides whole numbers by 0 (dataset rows {list(samples)}); keep divisors from 0 in the "
            "model, or mend the data they are computed of"
        )
    return IndexRangeError(
        f"{where} is given index {error.index} for an axis of {error.rows} (dataset rows {list(samples)}); "
        f"indices that a network computes have to be {-error.rows} to {error.rows - 1}: clip them in the "
        "model, or mend the data they are computed of"
    )


def _node_of(unit: Unit, factored: Factored, slot: int) -> str:
    """Return the name of the node that makes a slot of a unit's program; "" where that is not plain.

    Programs have no names, as equal ones are shared. A unit computes the nodes between what it reads and
    what it makes, in the order of the graph.
    """
    read, wanted = {name for name, _ in unit.reads}, {name for name, _ in unit.makes}
    cells = []
    for cell in reversed(factored.cells):
        if any(view.value in wanted - read for view in cell.outputs):
            cells.append(cell)
            wanted |= {view.value for view in cell.inputs}
    cells.reverse()
    items = unit.program.instructions
    if [cell.node.op for cell in cells] != [item.op for item in items]:
        return ""  # a shard at a border may need less
    return next((c.node.name for c, i in zip(cells, items, strict=True) if slot in i.outputs), "")


def check_loss(loss: float, step: int, rows: Sequence[int]) -> None:
    """Raise NonFiniteError, which names the rows of the dataset, if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"the loss of step {step + 1} is {loss} (dataset rows {list(rows)}); the run "
            "stays at its last commit; lower the learning rate, or look in these rows for extreme numbers "
            "and for samples all of whose labels are ignored"
        )
