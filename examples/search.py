"""Search for a learning rate and an optimizer: nine short runs, of which the better ones train on.

    python examples/search.py --workers 2

With ``--workers`` two processes of a Dask cluster on this machine train one run at a time each; without, this
process trains one after the other. Stop it at any time, and start it again.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from distributed import Client, LocalCluster

import oocdl
from oocdl.cli.demo import CLASSES, write_volumes
from oocdl.presets.unets import write_unet3d
from oocdl.space import LogUniform


def main() -> None:
    """Make volumes and a small U-Net, search, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("search-example"))
    parser.add_argument("--size", type=int, default=16, help="edge of the volumes")
    parser.add_argument("--steps", type=int, default=4, help="of the first rung")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: this one")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    model, volumes = asked.folder / "unet.onnx", {}
    for part, seed in (("train", 0), ("valid", 1)):
        volumes[part] = asked.folder / f"{part}.zarr"
        if not volumes[part].exists():
            write_volumes(volumes[part], samples=3, size=asked.size, seed=seed)
    if not model.exists():
        write_unet3d(model, base=4, depth=1, classes=len(CLASSES))
    with ExitStack() as stack:
        client = None
        if asked.workers:
            cluster = stack.enter_context(LocalCluster(n_workers=asked.workers, threads_per_worker=1))
            client = stack.enter_context(Client(cluster))
        found = oocdl.search(
            model,
            volumes["train"],
            space={"lr": LogUniform(1e-4, 1e-1), "optimizer": ["sgd", "adam"]},
            loss="dice_ce",
            trials=asked.trials,
            steps=asked.steps,
            rungs=3,
            validation=volumes["valid"],
            memory="1GiB",
            threads=1,
            client=client,
        )
    print(found)
    print(f"{found.best_run} is the best: {found.best_run.export(asked.folder / 'best.onnx')}")


if __name__ == "__main__":
    main()
