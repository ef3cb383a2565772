"""Draw Dask's task stream of one step of a U-Net at 128³ on two workers, into `docs/images/task-stream.png`.

    python docs/draw_task_stream.py [SIZE]

Each bar is a task of Dask's: a segment, what one worker does of a layer or of several. A line leads from the
task that makes what another worker reads to the task that waits for it. Needs matplotlib.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np
import zarr
from dask.distributed import Client, LocalCluster
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import oocdl
from oocdl.presets.unets import write_unet3d
from oocdl.runtime.cluster import cluster_session
from oocdl.runtime.cluster.pass_tasks import PassTasks

PICTURE = Path(__file__).with_name("images") / "task-stream.png"
SIZE, STEPS = 128, 4
Bar = tuple[int, str, float, float]
"""Worker, name of the task, and the seconds at which it began and ended."""


def train(folder: Path, size: int) -> tuple[PassTasks, list[dict[str, object]]]:
    """Train a few steps on two workers; return the segments of the last ones, and what Dask has recorded."""
    model = write_unet3d(folder / "unet.onnx", base=16, depth=3, classes=2)
    image = np.random.default_rng(0).normal(size=(1, 1, size, size, size)).astype("float32")
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("image", data=image, chunks=image.shape)
    group.create_array("labels", data=(image[:, 0] > 0).astype("uint8"), chunks=(1, size, size, size))
    kinds: list[PassTasks] = []

    class Kept(PassTasks):
        def __post_init__(self) -> None:
            super().__post_init__()
            kinds.append(self)

    cluster_session.PassTasks = Kept  # type: ignore[misc]
    workers = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with workers, Client(workers) as client:
        client.get_task_stream()
        oocdl.fit(
            model, folder / "data.zarr", client=client, workdir=folder / "step.run", loss="dice_ce",
            steps=STEPS, optimizer="sgd", memory="4GiB", threads=1, parallel={"space": (8,)}, progress=False,
        )  # fmt: skip
        return kinds[-1], client.get_task_stream()


def bars_of(tasks: PassTasks, records: list[dict[str, object]]) -> dict[tuple[int, int], Bar]:
    """Return the bar of each segment of the last step, by member and number."""
    spans: dict[tuple[str, int, int], tuple[str, float, float]] = {}
    for record in records:
        key = record["key"]
        if isinstance(key, tuple) and key[2] == "segment":
            (span,) = (one for one in record["startstops"] if one["action"] == "compute")  # type: ignore[attr-defined]
            spans[key[1], int(key[5]), int(key[4])] = key[3], span["start"], span["stop"]
    last = max(spans, key=lambda one: spans[one][1])[0]
    begun = min(start for (name, *_), (_, start, _) in spans.items() if name == last)
    found = {place: spans[last, *place] for place in tasks.keys}
    return {
        (member, number): (member, layers, start - begun, stop - begun)
        for (member, number), (layers, start, stop) in found.items()
    }


def draw(size: int = SIZE, path: Path = PICTURE) -> None:
    """Train, and draw the last step."""
    with tempfile.TemporaryDirectory() as folder:
        tasks, records = train(Path(folder), size)
    bars = bars_of(tasks, records)
    figure = Figure(figsize=(12, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = sorted({number for _, number in bars})
    for (member, number), (_, layers, begun, ended) in bars.items():
        colour = colormaps["tab20"](numbers.index(number) % 20)
        axes.barh(1 - member, ended - begun, 0.6, begun, color=colour, edgecolor="white", linewidth=0.5)
        width = (ended - begun) / max(bar[3] for bar in bars.values())
        if width > 0.025:
            name = "\nto ".join(part if len(part) < 20 else f"{part[:18]}…" for part in layers.split(" to "))
            axes.text(
                (begun + ended) / 2, 1 - member, name, ha="center", va="center", fontsize=6, rotation=90
            )
    for segment in tasks.segments:
        for member, number in segment.after:
            if member != segment.member:
                ends = bars[member, number][3], bars[segment.member, segment.number][2]
                heights = [1 - one + (0.3 if one else -0.3) for one in (member, segment.member)]
                axes.plot(ends, heights, color="black", linewidth=0.6)
    axes.set_yticks([1, 0], ["worker 1", "worker 2"])
    axes.set_xlabel("seconds since the step began")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    draw(*map(int, sys.argv[1:]))
