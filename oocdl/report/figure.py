"""Draws a simulated step: memory over time under the budget, when each layer runs, and what the disk does.

Only this needs matplotlib, which may not be installed and takes tens of MiB of memory: it is loaded by
the first picture, and used without its global state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from oocdl.errors import InputError, printable
from oocdl.graph.partition.storage_cut import phase_of
from oocdl.host.optional import needed
from oocdl.planning.simulation.timeline import Moment, Ran, Simulated, Transfer
from oocdl.report.tables import shortened
from oocdl.storage.files import reporting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
INCHES_WIDE, MEMORY_INCHES, DISK_INCHES, MARGIN_INCHES = 11.0, 2.9, 0.55, 1.9
ROW_INCHES, MOST_LAYERS_INCHES, LEAST_LAYERS_INCHES = 0.18, 9.0, 1.6
LABEL_INCHES = 0.15
"""Height of a row's label: where rows are lower, some have none."""
LABEL_LETTERS = 33
MOST_MOMENTS = 1500
"""Moments that are drawn; of those close together, the one with the most memory."""
DOTS_PER_INCH = 110
EDGED_BAR_SHARE = 0.004
"""Only bars that take more than this share of the step have an edge of their own."""
ROW_GAP_SHARE = 0.15
"""Share of a row's height that is left free."""

OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
"""Colours of Okabe and Ito (2008), which people with any kind of colour vision can tell apart."""
BLUE, RED, GREEN, PURPLE, ORANGE, SKY, YELLOW = OKABE_ITO
TERMS = {
    "base process": "#c4c4c4",
    "chunks in the RAM tier": SKY,
    "reserved by units": YELLOW,
    "scratch of programs": PURPLE,
}
"""The terms of memory, with their colours."""
PHASES = {"forward": BLUE, "backward": ORANGE, "update": GREEN}
"""The parts of a pass, with their colours."""


def picture_path(path: str | Path) -> Path:
    """Return the path of a picture, before it is drawn; InputError unless it ends as one."""
    target = Path(path)
    if target.suffix.lower() not in ENDINGS:
        raise InputError(f"a picture is {' or '.join(ENDINGS)}, not '{target.name}'")
    return target


def written(figure: Figure, target: Path) -> Path:
    """Write a figure as PNG or SVG, as the path ends, and return it. Raises StoreError where it cannot."""
    with reporting(target):
        figure.savefig(target, dpi=DOTS_PER_INCH)
    return target


def empty_figure(inches_wide: float, inches_high: float) -> Figure:
    """Make a figure; InputError where matplotlib is missing."""
    module = needed("matplotlib.figure", "a picture", "plot")
    figure: Figure = module.Figure(figsize=(inches_wide, inches_high), layout="constrained")
    return figure


def figure_of(
    title: str,
    passes: Sequence[Simulated],
    *,
    base_bytes: int,
    peak_bytes: int,
    budget_bytes: int,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    """Draw the passes of a step: memory, layers and the disk, on one axis of time.

    ``labels``: layer -> what it is called in the picture, where that is another name. Raises InputError where
    matplotlib is missing.
    """
    seconds = sum(one.seconds for one in passes)
    unit, name = (1e-3, "ms") if seconds < 1 else (1.0, "s") if seconds < 600 else (60.0, "min")
    step, ends = _joined(passes, unit), [end / unit for end in accumulate(one.seconds for one in passes)]
    rows = list(dict.fromkeys(ran.key.layer for ran in step.units))
    layers_inches = min(max(len(rows) * ROW_INCHES, LEAST_LAYERS_INCHES), MOST_LAYERS_INCHES)
    heights = (MEMORY_INCHES, layers_inches, DISK_INCHES)
    figure = empty_figure(INCHES_WIDE, sum(heights) + MARGIN_INCHES)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    _draw_memory(above, step, base_bytes, peak_bytes, budget_bytes)
    _draw_layers(middle, rows, step.units)
    _label_rows(middle, [labels.get(row, row) for row in rows], layers_inches)
    _draw_disk(below, step.transfers)
    for axes in (above, middle, below):
        for end in ends[:-1]:
            axes.axvline(end, color="black", linewidth=0.8, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
    below.set_xlim(0, step.seconds)
    below.set_xlabel(f"predicted time in the step [{name}]" + (", passes dotted" if len(ends) > 1 else ""))
    figure.suptitle(title, fontsize=12, parse_math=False)
    return figure


def _joined(passes: Sequence[Simulated], unit: float) -> Simulated:
    """Put passes on one clock of units of time, as if they were one, with tasks in their order."""
    start = 0.0
    moments: list[Moment] = []
    units: list[Ran] = []
    transfers: list[Transfer] = []

    def moved(at: Any, *names: str) -> Any:
        return at._replace(**{name: (getattr(at, name) + start) / unit for name in names})

    for one in passes:
        moments += [moved(at, "seconds") for at in one.moments]
        ordered = sorted(one.units, key=lambda ran: ran.position)
        units += [moved(ran, "begun", "computing", "done") for ran in ordered]
        transfers += [moved(at, "begun", "done") for at in one.transfers]
        start += one.seconds
    step = replace(passes[-1], moments=tuple(moments), units=tuple(units), transfers=tuple(transfers))
    return replace(step, seconds=start / unit)


def highest(moments: Iterable[Moment], seconds: float, columns: int = MOST_MOMENTS) -> list[Moment]:
    """Divide the time into ``columns`` equal parts; return the moment with the most memory of each."""
    best: dict[int, Moment] = {}
    for at in moments:
        column = min(int(at.seconds / seconds * columns), columns - 1)
        best[column] = max(at, best.get(column, at), key=lambda m: m.resident_bytes + m.reserved_bytes)
    return [best[column] for column in sorted(best)]


def _draw_memory(axes: Axes, step: Simulated, *sizes_bytes: int) -> None:
    """Draw memory over time; ``sizes_bytes``: of the base process, of the predicted peak, of the budget."""
    shown = highest(step.moments, step.seconds)
    shown = [shown[0]._replace(seconds=0.0), *shown[1:], shown[-1]._replace(seconds=step.seconds)]
    size, name, digits = (2**30, "GiB", 2) if sizes_bytes[-1] >= 4 << 30 else (2**20, "MiB", 0)
    base, peak, budget = (nbytes / size for nbytes in sizes_bytes)
    axes.stackplot(
        [at.seconds for at in shown],
        [base] * len(shown),
        [at.resident_bytes / size for at in shown],
        [(at.reserved_bytes - at.scratch_bytes) / size for at in shown],
        [at.scratch_bytes / size for at in shown],
        labels=TERMS,
        colors=list(TERMS.values()),
        step="post",
        linewidth=0,
    )
    peak_label = f"predicted peak, {peak:.{digits}f} {name}"
    axes.axhline(peak, color="black", linewidth=1, linestyle="--", label=peak_label, zorder=3)
    axes.axhline(budget, color=RED, linewidth=1.8, label=f"budget, {budget:.{digits}f} {name}")
    axes.set(ylim=(0, 1.05 * max(budget, peak)), ylabel=f"memory [{name}]")
    handles, labels = axes.get_legend_handles_labels()
    _legend(axes, handles[::-1], labels[::-1])  # from top to bottom as the areas and lines are


def _legend(axes: Axes, *entries: Any) -> None:
    axes.legend(*entries, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)


def _draw_disk(axes: Axes, transfers: Sequence[Transfer]) -> None:
    for name, color, low, moved in (
        ("reads", SKY, 0.1, [one for one in transfers if one.read_bytes]),
        ("writes", PURPLE, -0.9, [one for one in transfers if one.written_bytes]),
    ):
        label = f"{name}, {sum(one.read_bytes + one.written_bytes for one in moved) / 2**20:.0f} MiB"
        spans = [(one.begun, one.done - one.begun) for one in moved]
        axes.broken_barh(spans, (low, 0.8), facecolors=color, linewidth=0, label=label)
    axes.set(ylim=(-1.05, 1.05), ylabel="disk")
    axes.set_yticks([0.5, -0.5], ["read", "write"], fontsize=8)
    if transfers:
        _legend(axes)
    else:
        middle: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "nothing is spilled", fontsize=9, **middle)


def _draw_layers(axes: Axes, rows: Sequence[str], units: Sequence[Ran]) -> None:
    short = EDGED_BAR_SHARE * max(ran.done for ran in units)
    of_layer: dict[str, list[Ran]] = {name: [] for name in rows}
    for ran in units:
        of_layer[ran.key.layer].append(ran)
    for row, name in enumerate(rows):
        bands, color = _bands(of_layer[name]), PHASES[phase_of(name)]
        axes.axhspan(row - 0.5, row + 0.5, color=color, alpha=0.10 if row % 2 else 0.05, linewidth=0)
        height = (1 - ROW_GAP_SHARE) / len(bands)
        for number, band in enumerate(bands):
            place = (row - 0.5 + ROW_GAP_SHARE / 2 + number * height, height)
            # An edge tells wide bars from each other, and keeps the shortest from vanishing.
            edges = ["white" if ran.done - ran.computing > short else color for ran in band]
            waits = [(ran.begun, ran.computing - ran.begun) for ran in band]
            works = [(ran.computing, ran.done - ran.computing) for ran in band]
            axes.broken_barh(waits, place, facecolors=color, alpha=0.35, linewidth=0)
            axes.broken_barh(works, place, facecolors=color, edgecolors=edges, linewidth=0.3)
    shown = {phase_of(name) for name in rows}
    for phase in PHASES:
        if phase in shown:
            axes.barh([0], [0], color=PHASES[phase], label=phase)
    axes.barh([0], [0], color="gray", alpha=0.35, label="paler: waits for memory,\ndisk or a thread")
    _legend(axes)


def _bands(units: Iterable[Ran]) -> list[list[Ran]]:
    """Divide the units of a layer into bands of its row, so that those which overlap in time do not meet."""
    bands: list[list[Ran]] = []
    for ran in sorted(units, key=lambda ran: ran.begun):
        band = next((band for band in bands if band[-1].done <= ran.begun), None)
        if band is None:
            bands.append(band := [])
        band.append(ran)
    return bands


def _label_rows(axes: Axes, rows: Sequence[str], inches: float) -> None:
    """Label the rows, the first layer on top, with as many names as can be read."""
    every = -(-int(LABEL_INCHES * len(rows) / inches * 100) // 100)
    shown = range(0, len(rows), max(every, 1))
    names = [shortened(printable(rows[row]), LABEL_LETTERS) for row in shown]
    axes.set_yticks(list(shown), names, fontsize=8, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_ylabel("layer" if every <= 1 else f"layer (of {len(rows)}, every {every}. is named)")
