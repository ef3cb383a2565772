"""What a trace of a step tells, without a browser: seconds by thread and by layer, and a picture.

    oocdl fit unet.onnx brain.zarr --memory 420MiB --trace step.json
    python perf/read_trace.py step.json --plot step.png       # --plot needs oocdl[plot]

The trace itself opens in ui.perfetto.dev. See docs/how-to/debugging-a-slow-step.md.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import markdown

PHASES = ("wait for memory", "read inputs", "wait for a permit", "run", "write results")
"""Of a unit, as ``oocdl.runtime.trace`` names them."""
COMBINE = "read and combine"
"""Of a task that adds up what units have made."""
COLORS = {
    "wait for memory": "#d62728", "read inputs": "#e8a33d", "wait for a permit": "#9aa0a6",
    "run": "#4c86c6", COMBINE: "#7a5fa8", "write results": "#2f4b6e",
    "spill write": "#2a9d6f", "spill read": "#5b3a1e",
}  # fmt: skip
LAYERS = 10
"""Rows of the table of layers."""
INCHES, DOTS_PER_INCH = (10.0, 4.6), 110
Event = dict[str, Any]
Track = tuple[int, int]
"""Process and thread."""


def end(event: Event) -> float:
    """When it was over, in microseconds."""
    return float(event["ts"] + event["dur"])


def by_thread(spans: Sequence[Event], names: dict[Track, str]) -> list[list[str]]:
    """For each thread seconds of each phase, of the spill (also within phases), and of nothing."""
    length, rows = max(map(end, spans)), []
    for track, name in names.items():
        own = [span for span in spans if (span["pid"], span["tid"]) == track]
        seconds = [sum(s["dur"] for s in own if s["name"] == phase) for phase in (*PHASES, COMBINE)]
        spill = sum(s["dur"] for s in own if s["cat"] == "spill")
        busy = sum(s["dur"] for s in own if s["cat"] in ("unit", "combine", "strip"))
        rows.append([name, *(f"{s / 1e6:.2f}" for s in (*seconds, spill, length - (busy or spill)))])
    return rows


def by_layer(spans: Sequence[Event]) -> list[list[str]]:
    """The layers that take the most time of threads, with seconds of each phase."""
    units: dict[Track, list[Event]] = defaultdict(list)
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for span in spans:  # in order of time: a unit stands before its phases
        track = (span["pid"], span["tid"])
        if span["cat"] in ("unit", "combine", "strip"):
            units[track].append(span)
        elif span["cat"] == "phase" and units[track][-1]["cat"] == "unit":
            found[units[track][-1]["name"]][span["name"]] += span["dur"] / 1e6
    ranked = sorted(found.items(), key=lambda item: -sum(item[1].values()))
    return [[name, *(f"{value:.2f}" for value in phases.values())] for name, phases in ranked[:LAYERS]]


def draw(events: Sequence[Event], spans: Sequence[Event], names: dict[Track, str], path: Path) -> None:
    """Tracks of threads above, memory of the tier (of the first process) below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (tracks, memory) = pyplot.subplots(
        2, 1, sharex=True, figsize=INCHES, height_ratios=(3, 1), layout="constrained"
    )
    shown: set[str] = set()
    for row, track in enumerate(names):
        for name, color in COLORS.items():
            inner = name.startswith("spill")
            bars = [
                (s["ts"] / 1e6, s["dur"] / 1e6)
                for s in spans
                if (s["pid"], s["tid"]) == track and s["name"] == name
            ]
            if bars:
                place = (row + 0.1, 0.4) if inner else (row - 0.4, 0.8)
                tracks.broken_barh(bars, place, color=color, label=None if name in shown else name)
                shown.add(name)
    tracks.set_yticks(range(len(names)), list(names.values()))
    tracks.invert_yaxis()
    tracks.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncol=4, frameon=False, fontsize="small")
    counts = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    times = [e["ts"] / 1e6 for e in counts]
    stacked = [[e["args"][name] / 2**20 for e in counts] for name in ("resident", "reserved")]
    memory.stackplot(
        times, *stacked, labels=("chunks", "reserved"), colors=("#c9d9ea", "#8fb0d3"), step="post"
    )
    memory.set_xlabel("seconds")
    memory.set_ylabel("tier, MiB")
    memory.legend(loc="lower left", ncol=2, fontsize="small")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def main() -> None:
    """Parse, read, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="what fit(trace=...) has written")
    parser.add_argument("--plot", type=Path, help="also draw it")
    args = parser.parse_args()
    events: list[Event] = json.loads(args.trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    print(markdown(["thread, seconds", *PHASES, COMBINE, "spill", "idle"], by_thread(spans, names)))
    print()
    print(markdown(["layer, seconds", *PHASES], by_layer(spans)))
    if args.plot:
        draw(events, spans, names, args.plot)


if __name__ == "__main__":
    main()
