"""Draw tables of `perf/README.md` as `docs/images/step.png` and `docs/images/networks.png`.

Each picture holds the table that it shows as its description, and `tests/test_docs.py` compares the two.
Needs matplotlib (``pip install '.[plot]'``).
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

IMAGES = Path(__file__).with_name("images")
MEASUREMENTS = Path(__file__).parent.parent / "perf" / "README.md"
HEADS = {"step": "| | s/step | taken MiB |", "networks": "| case | fastest PyTorch s | its MiB |"}
PYTORCH, IN_CORE, QUARTER = "#8c8c8c", "#2b6ca3", "#b8690a"


def table(name: str) -> str:
    """Return the table behind a picture, as it stands in the measurements."""
    text = MEASUREMENTS.read_text()
    return text[text.index(HEADS[name]) :].split("\n\n")[0]


def rows(name: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    return [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in table(name).splitlines()[2:]
    ]


def draw_step(axes: Axes) -> None:
    """Seconds of a step against the memory that it takes; best is the lower left corner."""
    for label, seconds, mib in rows("step"):
        x, y = float(mib), float(seconds.split()[0])
        color = IN_CORE if label.startswith("oocdl") else PYTORCH
        axes.scatter(x, y, color=color, s=60)
        name = label.replace("oocdl, ", "oocdl, budget ").replace("`", "")
        below = "channels last" in name  # other labels stand close above it
        left = below or "one arena" in name
        side = {"xytext": (0, -20 if below else 9), "ha": "right" if left else "left"}
        axes.annotate(name, (x, y), textcoords="offset points", **side)
    axes.set(xlim=(0, 6000), ylim=(0, 19), xlabel="memory taken [MiB]", ylabel="a step [s]")
    axes.set_title("U-Net (base 16) on 128³")


def draw_networks(axes: Axes) -> None:
    """Seconds of the fastest PyTorch over oocdl's, with its memory and with a quarter of the smallest's."""
    shown = rows("networks")[::-1]
    for offset, column, label, color in (
        (0.2, 6, "with the memory of PyTorch in memory", IN_CORE),
        (-0.2, 9, "with a quarter of the least that it needs", QUARTER),
    ):
        places = [place + offset for place in range(len(shown))]
        bars = axes.barh(places, [float(row[column]) for row in shown], 0.38, color=color, label=label)
        axes.bar_label(bars, [row[column] for row in shown], padding=3)
    axes.axvline(1, color=PYTORCH, linestyle="--")
    axes.set_yticks(range(len(shown)), [row[0].split(",")[0] for row in shown])
    axes.set(xlim=(0, 1.6), xlabel="seconds of the fastest PyTorch over oocdl's (higher is better)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), frameon=False)


def main() -> None:
    """Draw both pictures."""
    for name, draw in (("step", draw_step), ("networks", draw_networks)):
        figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        figure.savefig(IMAGES / f"{name}.png", metadata={"Software": None, "Description": table(name)})


if __name__ == "__main__":
    main()
