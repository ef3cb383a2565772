"""``evaluate``: mean losses and metrics over a dataset, and a table of them by sample."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oocdl.config import make_settings
from oocdl.config.options import Metrics
from oocdl.errors import InputError, StoreError
from oocdl.host.optional import needed
from oocdl.host.paths import path_of
from oocdl.host.plain_json import json_text
from oocdl.ops.metric_functions import Metric, Surface
from oocdl.storage.cache.spill_store import SpillStore
from oocdl.storage.files import write_text
from oocdl.training.metric_values import Measured, PassSums, mean_losses, metric_values
from oocdl.training.prediction.inference import Inference
from oocdl.training.prediction.outputs import LABELS, write_labels_of
from oocdl.training.prediction.surfaces import distances, spacings_of

Row = dict[str, Any]
Distances = Mapping[int, PassSums]


def library_of(metrics: Metrics) -> Any:
    """Import what surface metrics need, if there are any, before memory is planned; InputError without it."""
    checked = make_settings(metrics=metrics).metrics
    names = [one.name for one in checked if isinstance(one, Surface)]
    return needed("scipy.spatial", f"'{names[0]}'", "surface") if names else None


def table_path(given: str | Path | None) -> Path | None:
    """Check the path of a table with a row for each sample, of CSV or JSON. Raises InputError for others."""
    if given is None:
        return None
    path = path_of("per_sample", given)
    if path.suffix not in (".csv", ".json"):
        raise InputError(f"per_sample takes a path that ends in .csv or .json, not '{path}'")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StoreError(f"cannot write {path}: it is a folder, or nothing may be written beside it")
    return path


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    if path.suffix == ".json":
        text.write(json_text(rows) + "\n")
    else:
        writer = csv.DictWriter(text, dict.fromkeys(n for row in rows for n in row), lineterminator="\n")
        writer.writeheader()
        # NaN alone is not equal to itself
        writer.writerows({name: v if v == v else "" for name, v in row.items()} for row in rows)
    write_text(path, text.getvalue())


def evaluated(inference: Inference, library: Any, table: Path | None) -> dict[str, Any]:
    """Return mean losses and metrics, and write their table; ``library`` is of ``library_of``."""
    metrics = inference.settings.metrics
    columns = [one for one in metrics if one.name != "confusion"]
    if table is not None and not columns and inference.settings.batch_size > 1:
        text = "per_sample has losses with batch_size=1 only, and metrics= names none for its columns"
        raise InputError(text)
    by_row: Distances = {}
    if library is None:
        passes = inference.run()
    else:
        spacings = spacings_of(inference)
        with SpillStore(inference.spill()) as spill:
            made, passes = write_labels_of(inference, spill.folder / LABELS)
            by_row = distances(inference, library, made, spacings)
    if table is not None:
        _write_table(table, _rows(inference, columns, passes, by_row))
    found = {**mean_losses(passes), **metric_values(metrics, [one.sums for one in passes])}
    return found | metric_values(metrics, [by_row[row] for row in sorted(by_row)])


def _rows(
    inference: Inference, metrics: Sequence[Metric], passes: Iterable[Measured], distances: Distances
) -> list[Row]:
    names, found = list(inference.samples), dict[int, Row]()
    for one in passes:
        losses = one.losses if inference.settings.batch_size == 1 else {}
        for place, row in enumerate(one.rows):
            own = {o: {n: v[place : place + 1] for n, v in sums.items()} for o, sums in one.sums.items()}
            found[row] = {"sample": names[row] if names else row, **losses}
            for sums in (own, distances.get(row, {})):
                found[row] |= metric_values(metrics, [sums], of_sample=True)
    return [found[row] for row in sorted(found)]
