"""Draws a simulated step: memory over time under the budget, and when each layer runs.

Only this needs matplotlib, which may not be installed and takes tens of MiB of memory: it is loaded by
the first picture, and used without its global state.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oocdl.errors import InputError
from oocdl.planning.simulation.timeline import Moment, Ran, Simulated
from oocdl.storage.files import reporting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
INCHES_WIDE, MEMORY_INCHES, MARGIN_INCHES = 11.0, 3.0, 1.5
ROW_INCHES, MOST_LAYERS_INCHES, LEAST_LAYERS_INCHES = 0.18, 9.0, 1.6
LABEL_INCHES = 0.15
"""Height of a row's label: where rows are lower, some have none."""
LABEL_LETTERS = 34
MOST_MOMENTS = 1500
"""Moments that are drawn; of those close together, the one with the most memory."""
DOTS_PER_INCH = 110
MOST_NAMED_WORKERS = 6
"""More workers than these share one entry of the legend."""
EDGED_BAR_SHARE = 0.004
"""Only bars that take more than this share of the step have an edge of their own."""
MOST_EDGED_BANDS = 4
"""In a row of more bands than these, edges would hide the bars."""
ROW_GAP_SHARE = 0.15
"""Share of a row's height that is left free."""

BASE_COLOR, TIER_COLOR, RESERVED_COLOR, SCRATCH_COLOR = "#b8bec6", "#4c86c6", "#f2b84b", "#6aa56e"
BUDGET_COLOR = "#d62728"


@dataclass(frozen=True)
class Scene:
    """What a picture shows: the simulated passes of a step, and memory in bytes."""

    title: str
    passes: tuple[Simulated, ...]
    """The passes of one step, in order."""
    base_bytes: int
    peak_bytes: int
    """Predicted peak of the process."""
    budget_bytes: int


def draw(scene: Scene, path: str | Path) -> Path:
    """Write the picture as PNG or SVG, as the path ends, and return its path.

    Raises InputError for another ending and where matplotlib is missing, StoreError if the file
    cannot be written.
    """
    target = picture_path(path)
    return written(figure_of(scene), target)


def picture_path(path: str | Path) -> Path:
    """The path of a picture; InputError unless it ends as one."""
    target = Path(path)
    if target.suffix.lower() not in ENDINGS:
        raise InputError(f"a picture of a plan is {' or '.join(ENDINGS)}, not '{target.name}'")
    return target


def written(figure: Figure, target: Path) -> Path:
    """Write a figure; returns its path. Raises StoreError if it cannot be written."""
    with reporting(target):
        figure.savefig(target, dpi=DOTS_PER_INCH)
    return target


def empty_figure(inches_wide: float, inches_high: float) -> Figure:
    """Make a figure; InputError where matplotlib is missing."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise InputError(
            "a picture of a plan needs matplotlib, which is not installed; pip install 'oocdl[plot]'"
        ) from error
    figure: Figure = module.Figure(figsize=(inches_wide, inches_high), layout="constrained")
    return figure


def figure_of(scene: Scene) -> Figure:
    """Make the picture as a matplotlib figure: memory above, layers below, one axis of time."""
    moments, units, ends = _joined(scene.passes)
    rows = list(dict.fromkeys(ran.key.layer for ran in sorted(units, key=lambda ran: ran.position)))
    layers_inches = min(max(len(rows) * ROW_INCHES, LEAST_LAYERS_INCHES), MOST_LAYERS_INCHES)
    figure = empty_figure(INCHES_WIDE, MEMORY_INCHES + layers_inches + MARGIN_INCHES)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(MEMORY_INCHES, layers_inches))
    unit, name = _time_unit(ends[-1])
    _draw_memory(above, scene, moments, ends[-1], unit)
    _draw_layers(below, rows, units, unit, layers_inches)
    for axes in (above, below):
        for end in ends[:-1]:
            axes.axvline(end / unit, color="black", linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
    below.set_xlim(0, ends[-1] / unit)
    below.set_xlabel(f"predicted time in the step [{name}]" + (", passes dotted" if len(ends) > 1 else ""))
    figure.suptitle(scene.title, fontsize=12)
    return figure


def _joined(passes: Sequence[Simulated]) -> tuple[list[Moment], list[Ran], list[float]]:
    """Put the moments and units of all passes on one clock; returns them, and when each pass ends.

    Positions are counted on from pass to pass, too.
    """
    moments: list[Moment] = []
    units: list[Ran] = []
    ends: list[float] = []
    for one in passes:
        start = ends[-1] if ends else 0.0
        first = max((ran.position for ran in units), default=-1) + 1
        moments += [moment._replace(seconds=moment.seconds + start) for moment in one.moments]
        units += [
            ran._replace(
                position=ran.position + first,
                begun=ran.begun + start,
                computing=ran.computing + start,
                done=ran.done + start,
            )
            for ran in one.units
        ]
        ends.append(start + one.seconds)
    return moments, units, ends


def _time_unit(seconds: float) -> tuple[float, str]:
    """Return a unit in which so long a time is easily read: its seconds, and its name."""
    if seconds < 1:
        return 1e-3, "ms"
    return (1.0, "s") if seconds < 600 else (60.0, "min")


def highest(moments: Iterable[Moment], seconds: float, columns: int = MOST_MOMENTS) -> list[Moment]:
    """Divide the time into ``columns`` equal parts; return the moment with the most memory of each."""
    found: dict[int, Moment] = {}
    for moment in moments:
        column = min(int(moment.seconds / seconds * columns), columns - 1)
        if column not in found or _counted(moment) >= _counted(found[column]):
            found[column] = moment
    return [found[column] for column in sorted(found)]


def _counted(moment: Moment) -> int:
    return moment.resident_bytes + moment.reserved_bytes


def _draw_memory(axes: Axes, scene: Scene, moments: Iterable[Moment], end: float, unit: float) -> None:
    shown = highest(moments, end)
    shown = [shown[0]._replace(seconds=0.0), *shown[1:], shown[-1]._replace(seconds=end)]
    giga = scene.budget_bytes >= 4 << 30
    size, name = (2**30, "GiB") if giga else (2**20, "MiB")
    terms: tuple[tuple[str, str, list[float]], ...] = (
        ("base process", BASE_COLOR, [scene.base_bytes / size] * len(shown)),
        ("chunks in the RAM tier", TIER_COLOR, [one.resident_bytes / size for one in shown]),
        ("reserved by units", RESERVED_COLOR, [(m.reserved_bytes - m.scratch_bytes) / size for m in shown]),
        ("scratch of programs", SCRATCH_COLOR, [one.scratch_bytes / size for one in shown]),
    )
    axes.stackplot(
        [one.seconds / unit for one in shown],
        *(values for _, _, values in terms),
        labels=[label for label, _, _ in terms],
        colors=[color for _, color, _ in terms],
        step="post",
        linewidth=0,
    )
    budget, peak = scene.budget_bytes / size, scene.peak_bytes / size
    peak_label, budget_label = (
        f"{what}, {number:.{2 if giga else 0}f} {name}"
        for what, number in (("predicted peak", peak), ("budget", budget))
    )
    axes.axhline(peak, color="black", linewidth=1, linestyle="--", label=peak_label, zorder=3)
    axes.axhline(budget, color=BUDGET_COLOR, linewidth=1.8, label=budget_label)
    axes.set_ylim(0, 1.05 * max(budget, peak))
    axes.set_ylabel(f"memory [{name}]")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(  # from top to bottom as the areas and lines are
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False
    )


def _draw_layers(axes: Axes, rows: Sequence[str], units: Sequence[Ran], unit: float, inches: float) -> None:
    workers = sorted({ran.worker for ran in units})
    shade = {worker: f"C{index % 10}" for index, worker in enumerate(workers)}
    short = EDGED_BAR_SHARE * max(ran.done for ran in units)
    of_layer: dict[str, list[Ran]] = {name: [] for name in rows}
    for ran in units:
        of_layer[ran.key.layer].append(ran)
    for row, name in enumerate(rows):
        bands = _bands(of_layer[name])
        height = (1 - ROW_GAP_SHARE) / len(bands)
        for number, band in enumerate(bands):
            place = (row - 0.5 + ROW_GAP_SHARE / 2 + number * height, height)
            colors = [shade[ran.worker] for ran in band]
            waits = [(ran.begun / unit, (ran.computing - ran.begun) / unit) for ran in band]
            works = [(ran.computing / unit, (ran.done - ran.computing) / unit) for ran in band]
            # An edge tells wide bars from each other, and keeps the shortest from vanishing.
            wide = (len(bands) <= MOST_EDGED_BANDS and ran.done - ran.computing > short for ran in band)
            edges = ["white" if w else color for w, color in zip(wide, colors, strict=True)]
            axes.broken_barh(waits, place, facecolors=colors, alpha=0.3, linewidth=0)
            axes.broken_barh(works, place, facecolors=colors, edgecolors=edges, linewidth=0.5)
    for row in range(1, len(rows), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="black", alpha=0.04, linewidth=0)
    _label_rows(axes, rows, inches)
    _name_colors(axes, shade)


def _bands(units: Iterable[Ran]) -> list[list[Ran]]:
    """Divide the units of a layer into bands of its row, so that those which overlap in time do not meet."""
    bands: list[list[Ran]] = []
    for ran in sorted(units, key=lambda ran: ran.begun):
        band = next((band for band in bands if band[-1].done <= ran.begun), None)
        if band is None:
            bands.append([ran])
        else:
            band.append(ran)
    return bands


def _name_colors(axes: Axes, shade: Mapping[int, str]) -> None:
    """Add the legend."""
    if len(shade) <= MOST_NAMED_WORKERS:
        for number, color in enumerate(shade.values(), 1):
            axes.barh([0], [0], color=color, label=f"worker {number}")
    else:
        axes.barh([0], [0], color="C0", label=f"computing (colors are those\nof {len(shade)} workers)")
    axes.barh([0], [0], color="gray", alpha=0.3, label="paler: waits for memory,\ndisk or a thread")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)


def _label_rows(axes: Axes, rows: Sequence[str], inches: float) -> None:
    """Label the rows, the first layer on top, with as many names as can be read."""
    every = -(-int(LABEL_INCHES * len(rows) / inches * 100) // 100)
    shown = range(0, len(rows), max(every, 1))
    axes.set_yticks(list(shown), [_short(rows[row]) for row in shown], fontsize=8, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel("layer" if every <= 1 else f"layer (of {len(rows)}, every {every}. is named)")


def _short(name: str) -> str:
    """Shorten a name to ``LABEL_LETTERS``, and replace characters that cannot be drawn."""
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    half = (LABEL_LETTERS - 1) // 2
    return name if len(name) <= LABEL_LETTERS else f"{name[:half]}…{name[-half:]}"
