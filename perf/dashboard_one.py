"""One run in which how it is looked at changes every few steps; prints the page's address, then JSON.

    python perf/dashboard_one.py '{"model": "net.onnx", "dataset": "x.zarr", "block": 5, "steps": 60}'

A block of steps is "alone" (nothing is written for a page, and its server is stopped), the next "written"
(the log is written, the server is stopped), the next "shown". The other words are options of ``fit``. Steps
begin when a browser has opened the page: then a line comes on stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import oocdl
from oocdl.dashboard.live_log import LiveLog
from oocdl.events import Event, Notice, RunStarted, StepDone
from oocdl.host.limits import anonymous_bytes_of
from oocdl.training.loop import Trainer

MODES = ("alone", "written", "shown")


class Switch:
    """Changes from mode to mode, and notes what each step took."""

    def __init__(self, block: int) -> None:
        self.block, self.mode = block, "shown"
        self.steps: list[dict[str, Any]] = []
        self.server, self.server_bytes, self.at = 0, 0, 0.0

    def listen(self, event: Event) -> None:
        """A listener of the run."""
        if isinstance(event, Notice) and event.text.startswith("dashboard: "):
            children = Path("/proc/self/task").glob("*/children")
            self.server = next(int(pid) for found in children for pid in found.read_text().split())
            print(event.text.split()[1], flush=True)
        elif isinstance(event, RunStarted):
            sys.stdin.readline()
            self.at = time.monotonic()
        elif isinstance(event, StepDone):
            self.note(event.row["step"])

    def note(self, step: int) -> None:
        """A step is done; the first of a block tells of the change, and is left out later."""
        place, seconds = (step - 1) % self.block, time.monotonic() - self.at
        self.steps.append({"mode": self.mode, "place": place, "seconds": seconds})
        if step % self.block == 0:
            self.mode = MODES[step // self.block % len(MODES)]
            os.kill(self.server, signal.SIGCONT if self.mode == "shown" else signal.SIGSTOP)
        self.server_bytes = max(self.server_bytes, anonymous_bytes_of(self.server))
        self.at = time.monotonic()


def main() -> None:
    """Parse, train, print."""
    words = json.loads(sys.argv[1])
    model, dataset, switch = words.pop("model"), words.pop("dataset"), Switch(words.pop("block"))
    write, look = LiveLog.__call__, Trainer._look

    def written(self: LiveLog, event: Event) -> None:
        if switch.mode != "alone":
            write(self, event)

    def looked(self: Trainer, *arguments: Any, **where: Any) -> None:
        if switch.mode != "alone":
            look(self, *arguments, **where)

    LiveLog.__call__, Trainer._look = written, looked  # type: ignore[method-assign]
    oocdl.fit(model, dataset, dashboard=True, progress=False, callbacks=[switch.listen], **words)
    print(json.dumps({"steps": switch.steps, "server_bytes": switch.server_bytes}))


if __name__ == "__main__":
    main()
