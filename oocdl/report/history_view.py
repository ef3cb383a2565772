"""The history of a run for people: in a few lines, as a table of pandas, and as a picture of its losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.errors import InputError
from oocdl.events import VALIDATION_PREFIX
from oocdl.host.optional import needed
from oocdl.report.figure import OKABE_ITO, empty_figure, picture_path, written
from oocdl.report.tables import sparkline
from oocdl.report.units import duration, size_text

SMOOTH_SHARE = 0.02
"""A smoothed curve is a mean that forgets by this share of all steps, at least ``SMOOTH_STEPS``."""
SMOOTH_STEPS = 5

FEW = 12
"""Maximum number of curves of single classes in a picture."""
SPARKS = 40
"""Characters of a line of losses."""

Rows = Sequence[Mapping[str, Any]]


def told_of(rows: Rows) -> list[tuple[str, str]]:
    """Tell losses at a glance, epoch, learning rate, time and memory by their names; nothing of no rows."""
    if not rows:
        return []
    curves = {name: [row[name] for row in rows if name in row] for name in curve_names(rows)}
    return [
        *((name, f"{sparkline(of, SPARKS)}  {of[0]:.4g} → {of[-1]:.4g}") for name, of in curves.items()),
        ("epoch", f"{rows[-1]['epoch'] + 1}"),
        ("learning rate", f"{rows[-1]['lr']:.4g} at the last step"),
        ("time", duration(sum(row["seconds"] for row in rows))),
        ("peak memory", size_text(max(row["process_bytes"] for row in rows))),
    ]


def loss_names(rows: Rows) -> list[str]:
    """Return the names of all losses in rows, those of validations last, in the order of their first rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    losses = [name for name in names if name.removeprefix(VALIDATION_PREFIX).split("/")[0] == "loss"]
    return sorted(losses, key=lambda name: name.startswith(VALIDATION_PREFIX))


def curve_names(rows: Rows) -> list[str]:
    """Return the names of all losses in rows, and of the results of validations."""
    return list(dict.fromkeys([*loss_names(rows), *metric_names(rows)]))


def metric_names(rows: Rows) -> list[str]:
    """Return the names of the results of validations, but for single classes and seconds."""
    seconds = f"{VALIDATION_PREFIX}seconds"
    return [name for name in _validated(rows) if name != seconds and not _is_of_class(name)]


def _validated(rows: Rows) -> dict[str, None]:
    return dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION_PREFIX))


def _is_of_class(name: str) -> bool:
    return name.rpartition("/")[2].isdigit()


def frame(rows: Rows) -> Any:
    """Return the rows as a ``pandas.DataFrame`` by step. Raises InputError where pandas is missing."""
    pandas = needed("pandas", "run.frame()", "pandas")
    return pandas.DataFrame(rows, columns=None if rows else ["step", "epoch", "loss"]).set_index("step")


def plot(rows: Rows, title: str, path: str | Path) -> Path:
    """Draw losses, metrics of validations, rate and seconds of each step, as PNG or SVG; returns the path.

    Raises InputError where there is no step yet, for another ending, and where matplotlib is missing.
    """
    target = picture_path(path)
    if not rows:
        raise InputError("there is nothing to draw: the run has no committed step yet")
    names = loss_names(rows)
    metrics = _metric_curves(rows)
    heights = (4, 3, 1, 1) if metrics else (4, 1, 1)
    figure = empty_figure(9.0, 9.0 if metrics else 6.5)
    above, *metric_axes, middle, below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    steps = [row["step"] for row in rows]
    keep = 1 - 1 / max(SMOOTH_STEPS, SMOOTH_SHARE * len(rows))
    for name, color in zip(names, OKABE_ITO * len(names), strict=False):
        if name.startswith(VALIDATION_PREFIX):
            points = [(row["step"], row[name]) for row in rows if name in row]
            above.plot(*zip(*points, strict=True), color=color, linewidth=1.2, marker="o", label=name)
            continue
        losses = np.array([row.get(name, np.nan) for row in rows], float)
        above.plot(steps, losses, color=color, linewidth=0.8, alpha=0.35, marker="." if len(rows) < 2 else "")
        bold = np.where(np.isnan(losses), np.nan, smoothed(losses, keep))
        above.plot(steps, bold, color=color, linewidth=2, label=name)
    for axes in metric_axes:
        for (name, points), color in zip(metrics.items(), OKABE_ITO * len(metrics), strict=False):
            thin = {"linewidth": 0.8, "marker": "."}
            style = thin if _is_of_class(name) else {"linewidth": 2.0, "marker": "o"}
            axes.plot(*zip(*points, strict=True), color=color, label=name, **style)
        axes.set_ylabel("metrics")
        axes.legend(frameon=False, ncols=2, fontsize="small")
    for axes, name, label in ((middle, "lr", "learning rate"), (below, "seconds", "s a step")):
        axes.plot(steps, [row[name] for row in rows], color="#444444", linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label)
    above.set_ylabel("loss: each step pale,\nsmoothed bold")
    if len(names) > 1:
        above.legend(frameon=False)
    below.set_xlabel("step")
    for axes in (above, *metric_axes, middle, below):
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.suptitle(title, fontsize=12, parse_math=False)
    return written(figure, target)


def _metric_curves(rows: Rows) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of the metrics of validations; those of classes too, if they are few."""
    losses, classes = loss_names(rows), [name for name in _validated(rows) if _is_of_class(name)]
    wanted = [name for name in metric_names(rows) if name not in losses]
    wanted += classes if len(classes) <= FEW else []
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in wanted}


def smoothed(values: npt.NDArray[np.float64], weight: float) -> npt.NDArray[np.float64]:
    """An exponential moving average, without the bias to zero of its first values.

    ``weight`` in [0, 1) is that of the past. NaN counts as nothing. The correction is that of Adam (Kingma
    and Ba, 2015, section 3).
    """
    if weight == 0 or not values.size:
        return values.copy()
    out, total, share = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        if value == value:
            total = weight * total + (1 - weight) * value
            share = weight * share + (1 - weight)
        out[index] = total / share if share else np.nan
    return out
