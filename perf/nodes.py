"""Larger than a node: three hosts, each with less memory and disk than a step takes, together with enough.

Hosts are network namespaces of this machine with a memory cgroup and a disk of their own
(``tests/kit/hosts``); the run directory is on a disk that all of them see. Needs root and ``ip``.

- ``params``: a perceptron of 0.34 G parameters with Adam, 4 GB of weights and state.
- ``volume``: a U-Net whose activations take about 10 GiB in core.

    python perf/nodes.py [params] [volume] [--toy] [--workdir FOLDER]

A row a host: memory that its processes had at most (of its cgroup, without page cache), how many the kernel
has killed, bytes on its disk at most, and what came in by its network, beside what the plan's bundles say.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from typing import Any

from cases import Case, mlp, unet, write_data
from measure import markdown

import oocdl
from oocdl.planning.passes import MAIN

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit import hosts as kit
from tests.kit.placed import host_costs
from tests.kit.plans import exchanged

HOSTS = 3
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Large:
    """A case, and what each host has."""

    case: Case
    budget: str
    host_bytes: int
    disk_mib: int
    steps: int
    options: Mapping[str, Any]


def cases(toy: bool) -> dict[str, Large]:
    """What is to be shown, or the same in small."""
    if toy:
        small = (600 << 20, 256, 2)
        return {
            "params": Large(mlp(3, 512, 8), "520MiB", *small, {"optimizer": "adam"}),
            "volume": Large(unet(4, 32, 1), "520MiB", *small, {"loss": "dice_ce"}),
        }
    return {
        "params": Large(mlp(5, 8192, 64), "900MiB", 1 << 30, 3584, 2, {"optimizer": "adam"}),
        "volume": Large(unet(16, 160), "900MiB", 1 << 30, 640, 2, {"loss": "dice_ce"}),
    }


@contextmanager
def watched(found: kit.Hosts, folder: Path) -> Iterator[list[list[int]]]:
    """Look at all hosts while the block runs: most of memory and of disk."""
    seen = [[0, 0] for _ in range(HOSTS)]
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            for number, row in enumerate(seen):
                stat = (kit.MEMORY / found.names[number] / "memory.stat").read_text().split()
                row[0] = max(row[0], int(stat[stat.index("total_rss") + 1]))
                row[1] = max(row[1], disk_usage(folder / f"disk{number}").used)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def come_in() -> list[int]:
    """Bytes that each host has got so far."""
    # What the bridge sends is what the host gets.
    counters = (Path(f"/sys/class/net/oocdl-h{number}/statistics/tx_bytes") for number in range(HOSTS))
    return [int(counter.read_text()) for counter in counters]


def measure(name: str, large: Large, folder: Path) -> bool:
    """Train for some steps, and print what the hosts took; returns whether nothing was killed."""
    model = large.case.write(folder / "model.onnx")
    data = write_data(large.case, folder / "data.zarr")
    with kit.hosts(folder, HOSTS, large.host_bytes, large.disk_mib) as found:
        time.sleep(5)
        marks: list[list[int]] = []
        with watched(found, folder) as seen:

            def listen(event: object) -> None:
                if isinstance(event, oocdl.events.StepDone):
                    marks.append(come_in())

            begun = time.monotonic()
            run = oocdl.fit(
                model, data, workdir=folder / "run", client=found.cluster.address, memory=large.budget,
                threads=1, steps=large.steps, callbacks=[listen], commit_seconds=1e6, **large.case.options(),
                **large.options,
            )  # fmt: skip
            seconds = time.monotonic() - begun
        killed = [found.killed(number) for number in range(HOSTS)]
    step = run.history[-1]
    print(
        f"\n{name}: {large.case.name}, {seconds:.0f} s in all, last step {step['seconds']:.1f} s, "
        f"loss {step['loss']:.4f}"
    )
    rows = []
    costs = host_costs(exchanged(run.plan.kinds[MAIN], HOSTS), HOSTS)
    for number, (cost, row) in enumerate(zip(costs, seen, strict=True)):
        got, come = marks[-1][number] - marks[-2][number], cost.received_bytes
        cells = (row[0], large.host_bytes, row[1], large.disk_mib << 20, cost.held_bytes, got, come)
        rows.append([str(number), *(f"{cell / 2**20:.0f}" for cell in cells), str(killed[number])])
    heads = ["host", "processes MiB", "of", "disk MiB", "of", "weights, state MiB", "came in a step MiB"]
    heads += ["by the plan", "killed"]
    print(markdown(heads, rows))
    return not any(killed)


def main() -> None:
    """Measure what is asked for."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", help="default: all")
    made.add_argument("--toy", action="store_true", help="small")
    made.add_argument("--workdir", type=Path, help="folder on the disk to be used")
    args = made.parse_args()
    reason = kit.missing()
    if reason is not None:
        sys.exit(reason)
    known, kept = cases(args.toy), True
    for name in args.names or known:
        with TemporaryDirectory(dir=args.workdir) as folder:
            kept &= measure(name, known[name], Path(folder))
    sys.exit(not kept)


if __name__ == "__main__":
    main()
