"""A listener of one's own: told of every event of a run, it says when the loss has not fallen for a while.

    python examples/own_listener.py

A listener is any callable that takes one event (`docs/reference/events.md` has all of them). Raising an
exception ends the run, with what is done committed: the same ``fit`` without the listener would go on.
"""

from __future__ import annotations

from pathlib import Path

import oocdl
from oocdl.cli.demo import write_volumes
from oocdl.events import Event, StepDone
from oocdl.presets.unets import write_unet3d


class Enough(Exception):
    """Raised where training does not help any more."""


class EarlyStop:
    """Ends a run whose loss has not fallen for ``patience`` steps."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.at = patience, float("inf"), 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            if event.row["loss"] < self.best:
                self.best, self.at = event.row["loss"], event.row["step"]
            elif event.row["step"] - self.at >= self.patience:
                raise Enough(f"the loss has not fallen since step {self.at}")


def main() -> None:
    """Train with a rate that is far too high, until it is enough."""
    folder = Path("listener-example")
    folder.mkdir(exist_ok=True)
    write_volumes(folder / "data.zarr", samples=1, size=16, seed=0)
    model = write_unet3d(folder / "unet.onnx", classes=4, base=2, depth=1)
    options = {"workdir": folder / "unet.run", "lr": 0.5, "steps": 200, "memory": "4GiB", "resume": "restart"}
    try:
        oocdl.fit(model, folder / "data.zarr", loss="dice_ce", callbacks=[EarlyStop(5)], **options)
    except Enough as enough:
        run = oocdl.open(folder / "unet.run")
        best = min(row["loss"] for row in run.history)
        print(f"{enough}: {run.steps} steps are committed, the best loss was {best:.4f}")


if __name__ == "__main__":
    main()
