"""Draw the packages of oocdl as rooms of a house, into `docs/images/house.png`.

A room imports rooms of the floors below its own only; `tests/test_architecture.py` holds the table against
the code, and the picture against the table. Needs matplotlib (``pip install '.[plot]'``).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon

PICTURE = Path(__file__).with_name("images") / "house.png"

PEOPLE, PURE, COMPUTE, BYTES, GROUND = "people", "pure data", "compute", "bytes", "ground"
COLORS = {PEOPLE: "#fbe3c4", PURE: "#cfe3f5", COMPUTE: "#cdebdd", BYTES: "#e6d8ea", GROUND: "#ebebeb"}
EDGES = {PEOPLE: "#b8690a", PURE: "#2b6ca3", COMPUTE: "#1b7f5c", BYTES: "#84528f", GROUND: "#777777"}
LEGEND = {
    PEOPLE: "what people meet",
    PURE: "graphs and plans, as pure data",
    COMPUTE: "what computes",
    BYTES: "what holds bytes",
}


class Room(NamedTuple):
    """One package, or one module at the top of oocdl."""

    name: str
    says: str
    kind: str
    share: float = 1.0
    """Of the width of its floor, beside those of the others."""


FLOORS = (
    (Room("cli", "oocdl fit, plan, predict, …, demo", PEOPLE),),
    (Room("presets", "nnU-Net's way in one word; a U-Net without a framework", PEOPLE),),
    (Room("tuning", "search: many runs, of which the better ones train on", PEOPLE),),
    (Room("training", "fit: epochs and steps; the run that comes out; resuming", PEOPLE),),
    (
        Room("dashboard", "the live page of a run", PEOPLE, 1.2),
        Room("data", "NIfTI, NumPy, … in and out", PEOPLE),
    ),
    (
        Room("report", "plans, progress, pictures", PEOPLE, 2.3),
        Room("testing", "any graph, cut", PEOPLE, 1.5),
        Room("cluster", "Slurm, PBS, …", PEOPLE, 1.45),
        Room("callbacks", "CSV, MLflow, …", PEOPLE, 1.55),
        Room("pytorch", "modules to files", PEOPLE, 1.6),
    ),
    (Room("runtime", "passes: sessions, Dask tasks, our own scheduler", COMPUTE),),
    (Room("planning", "the recipe; units that fit the budget; simulated seconds; tasks in order", PURE),),
    (
        Room("engines", "torch · ort · numpy", COMPUTE, 2.1),
        Room("losses", "Dice, …", PEOPLE),
        Room("metrics", "IoU, F1, …", PEOPLE),
        Room("optim", "Adam, …", PEOPLE),
        Room("transforms", "flips, …", PEOPLE, 1.3),
    ),
    (
        Room("fusion", "chains as one loop", COMPUTE, 1.7),
        Room("config", "settings", PEOPLE),
        Room("space", "LogUniform, …", PEOPLE),
    ),
    (
        Room("ops", "operators: shape, formula, cut, gradient", PURE, 2.4),
        Room("augmentation", "samples, by region", PURE, 1.4),
        Room("storage", "cache · run · dataset", BYTES, 1.5),
    ),
    (
        Room("graph", "ir · onnx · transforms · partition", PURE, 3),
        Room("host", "memory, cores", BYTES, 1.3),
    ),
    (
        Room("errors", "every exception", GROUND),
        Room("events", "what fit tells listeners", GROUND),
    ),
)
"""From the top down. The roof, ``oocdl/__init__.py`` and ``__main__.py``, is above all of them."""

ROOF = Room("__init__", "fit, plan, open", PEOPLE)


def rooms() -> list[list[str]]:
    """Names of rooms, floor by floor, from the roof down."""
    return [[ROOF.name, "__main__"], *([room.name for room in floor] for floor in FLOORS)]


def description() -> str:
    """What the picture shows, as text; the file has it with it, so that a stale picture is found."""
    return "\n".join(
        " | ".join(f"{room.name}: {room.says}" for room in floor) for floor in ((ROOF,), *FLOORS)
    )


def draw(path: Path = PICTURE) -> None:
    """Draw the house, 1600 pixels wide."""
    high, gap, left, right, ink = 0.56, 0.075, 0.72, 7.74, "#222222"
    roof = 0.95
    top = len(FLOORS) * (high + gap)
    figure = Figure(figsize=(8, top + roof + 0.52), dpi=200)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 8), ylim=(-0.45, top + roof + 0.07))
    axes.axis("off")

    eaves = Polygon(
        [(left - 0.22, top + 0.03), ((left + right) / 2, top + roof), (right + 0.22, top + 0.03)],
        facecolor=COLORS[ROOF.kind], edgecolor=EDGES[ROOF.kind], linewidth=1.2, joinstyle="round",
    )  # fmt: skip
    axes.add_patch(eaves)
    middle = (left + right) / 2
    centred = {"ha": "center", "va": "center", "color": ink}
    name = {**centred, "family": "monospace", "weight": "bold", "size": 12}
    says = {**centred, "size": 9.5}
    axes.text(middle, top + 0.46, "oocdl", **name)
    axes.text(middle, top + 0.2, ROOF.says, **says)

    for number, floor in enumerate(FLOORS):
        bottom = top - (number + 1) * (high + gap) + gap / 2
        wide = (right - left - gap * (len(floor) - 1)) / sum(room.share for room in floor)
        x = left
        for room in floor:
            width = wide * room.share
            box = FancyBboxPatch(
                (x, bottom), width, high, boxstyle="round,pad=0,rounding_size=0.07",
                facecolor=COLORS[room.kind], edgecolor=EDGES[room.kind], linewidth=1.2,
            )  # fmt: skip
            axes.add_patch(box)
            at = x + width / 2
            axes.text(at, bottom + 0.37, room.name, **name)
            axes.text(at, bottom + 0.14, room.says, **says)
            x += width + gap

    arrow = FancyArrowPatch(
        (0.4, top - 0.1), (0.4, 0.1), arrowstyle="-|>", mutation_scale=18, linewidth=1.6, color="#555555"
    )
    axes.add_patch(arrow)
    axes.text(0.2, top / 2, "imports go down only", rotation=90, **{**says, "color": "#555555"})

    x = left
    for kind, words in LEGEND.items():
        mark = FancyBboxPatch(
            (x, -0.33), 0.16, 0.16, boxstyle="round,pad=0,rounding_size=0.03",
            facecolor=COLORS[kind], edgecolor=EDGES[kind], linewidth=1,
        )  # fmt: skip
        axes.add_patch(mark)
        text = axes.text(x + 0.23, -0.25, words, size=9, va="center", color=ink)
        extent = text.get_window_extent(canvas.get_renderer())
        x = axes.transData.inverted().transform((extent.x1, 0))[0] + 0.24

    figure.savefig(path, metadata={"Software": None, "Description": description()})


if __name__ == "__main__":
    draw()
