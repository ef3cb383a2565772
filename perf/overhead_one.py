"""Train in this process and tell where a step's time goes beside arithmetic; print one line of JSON.

    python perf/overhead_one.py '{"model": "unet.onnx", "dataset": "data.zarr", "how": "serial", "steps": 4}'

``how``: ``serial``, one thread and a clock around everything; ``own``, oocdl's scheduler as it is;
``dask``, Dask's threaded one. The other words are of ``fit``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import dask.threaded
from one_run import train

from oocdl.events import Event, RunStarted, StepDone
from oocdl.runtime import execute, session
from oocdl.runtime.scheduler import get

TASKS = ("run_unit", "run_combine", "pick")
CLOCKS = {"_gathered": "gather", "combined": "kernels", **dict.fromkeys(TASKS, "task")}
"""Functions of ``runtime.execute``, and as what their seconds count; a task's are those within it, too."""


class Clock:
    """Seconds by kind, of one step after the other. Of one thread."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.steps: list[dict[str, float]] = []

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its seconds counted."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            begun = perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.now[kind] += perf_counter() - begun  # type: ignore[assignment]
                self.now[f"{kind} calls"] += 1

        return timed

    def listen(self, event: Event) -> None:
        """A step is over."""
        if isinstance(event, RunStarted):
            self.now.clear()
        if isinstance(event, StepDone):
            self.steps.append({**self.now, "step": event.row["seconds"]})
            self.now.clear()


class Timed:
    """An engine whose programs are timed."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self.engine, self.clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def compile(self, program: Any) -> Callable[..., Any]:
        """As the engine does."""
        return self.clock.around("kernels", self.engine.compile(program))


def serial(model: Path, dataset: Path, **options: Any) -> dict[str, Any]:
    """One thread, everything timed."""
    clock, true_engine = Clock(), session.get_engine
    for name, kind in CLOCKS.items():
        setattr(execute, name, clock.around(kind, getattr(execute, name)))

    def timed(name: str) -> Timed:
        return Timed(true_engine(name), clock)

    setattr(session, "get_engine", timed)  # noqa: B010
    scheduler = clock.around("get", partial(get, workers=1))
    found = train(model, dataset, scheduler=scheduler, listeners=[clock.listen], **options)
    return {**found, "clock": clock.steps}


def main() -> None:
    """Parse, train, print."""
    words = json.loads(sys.argv[1])
    model, dataset = Path(words.pop("model")), Path(words.pop("dataset"))
    how = words.pop("how")
    if how == "serial":
        found = serial(model, dataset, **words)
    else:
        found = train(model, dataset, **({"scheduler": dask.threaded.get} if how == "dask" else {}), **words)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
