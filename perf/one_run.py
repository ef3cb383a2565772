"""Plan or train any model on any dataset in this process; print one line of JSON.

    python perf/one_run.py '{"model": "unet.onnx", "dataset": "brain.zarr", "memory": "1GiB", "steps": 2}'

The other words are options of ``fit``. With ``"too_low": 10`` what programs and the process itself take is
planned 10 % too low; with ``"unguarded": true`` the memory guard looks away. With ``"plan": true`` nothing is
trained; with ``"workers": 2`` two processes of one thread each do the work, through a Dask client, with
``"pinned": true`` each on a core of its own, this one without workers. With ``"every": 50`` the sizes of this
process and of all workers are told after every so many steps. What oocdl refuses is no failure here: then the
line is ``{"refused": MESSAGE}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import oocdl
from oocdl.engines.engine import get_engine
from oocdl.errors import OocdlError
from oocdl.events import Event, Listener, RunStarted, StepDone
from oocdl.host.heap import MemoryGuard
from oocdl.host.limits import anonymous_bytes
from oocdl.planning.machine import Machine


def facts(plan: oocdl.Plan) -> dict[str, Any]:
    """What a plan predicts."""
    return {
        "peak": plan.peak_bytes,
        "needed": plan.peak_bytes - plan.kept_bytes,
        "step_seconds": plan.seconds,
        "tasks": plan.tasks,
        "calls": len(plan.compiled.graph.calls),
        "flops": plan.flops,
        "disk": plan.disk_bytes,
        "spill_read": plan.spill_read_bytes,
        "spill_written": plan.spill_written_bytes,
    }


def train(
    model: Path, dataset: Path, listeners: Sequence[Listener] = (), every: int = 0, **options: Any
) -> dict[str, Any]:
    """Seconds and losses of a run, with bytes as planned and as moved, one number a step.

    ``seconds`` is the time from step to step, commits included; ``step_seconds`` is the steps' own;
    ``processor_seconds`` is what all threads took from step to step, whatever else runs on the machine;
    ``sizes`` are bytes of this process and of the workers of a client, after ``every`` so many steps.
    """
    times: list[float] = []
    busy: list[float] = []
    anonymous: list[int] = []
    sizes: list[list[int]] = []
    plans: list[oocdl.Plan] = []

    def listen(event: Event) -> None:
        if isinstance(event, RunStarted | StepDone):
            times.append(time.monotonic())
            busy.append(time.process_time())
        if isinstance(event, RunStarted):
            plans.append(event.plan)
        if isinstance(event, StepDone):
            anonymous.append(anonymous_bytes())
            if every and event.row["step"] % every == 0:
                workers: dict[str, int] = options["client"].run(anonymous_bytes)
                sizes.append([anonymous[-1], *(workers[address] for address in sorted(workers))])

    run = oocdl.fit(model, dataset, callbacks=[listen, *listeners], progress=False, **options)
    rows = run.history
    return {
        "planned": facts(plans[0]),
        "seconds": [after - before for before, after in zip(times[:-1], times[1:], strict=True)],
        "processor_seconds": [after - before for before, after in zip(busy[:-1], busy[1:], strict=True)],
        "step_seconds": [row["seconds"] for row in rows],
        "anonymous": anonymous,
        "sizes": sizes,
        "losses": [row["loss"] for row in rows],
        "spill_read": [row["read_bytes"] for row in rows],
        "spill_written": [row["written_bytes"] for row in rows],
    }


def pin(core: int) -> None:
    """Have all threads of this process, and those that they start, run on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


@contextmanager
def cluster(workers: int, folder: Path, pinned: bool = False) -> Iterator[dict[str, Any]]:
    """The option of ``fit`` that hands the work to so many processes; none if that is 0.

    ``pinned``: each runs on a core of its own, as if it had no more; so does this one where there are none.
    """
    if not workers:
        if pinned:
            pin(min(os.sched_getaffinity(0)))
        yield {}
        return
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"memory_limit": None, "dashboard_address": ":0"}
    with (
        TemporaryDirectory(dir=folder) as place,
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, local_directory=place, **options
        ) as made,
        Client(made) as client,
    ):  # fmt: skip
        if pinned:
            for number, address in enumerate(client.scheduler_info(n_workers=-1)["workers"]):
                client.run(pin, sorted(os.sched_getaffinity(0))[number], workers=[address])
        yield {"client": client}


def plan_too_low(percent: float) -> None:
    """From now on, plan with less than is predicted for programs, and for the process by itself.

    Plans of the cache are none of these, and these are not for others.
    """
    os.environ["OOCDL_PLAN_CACHE"] = "off"
    share, engine = 1 - percent / 100, get_engine("torch")
    scratch_of, room_bytes = engine.scratch_of, Machine.room_bytes

    def less_scratch(program: Any, rules: Any) -> Any:
        found = scratch_of(program, rules)
        return found._replace(scratch_bytes=int(found.scratch_bytes * share))

    def more_room(machine: Machine, *args: Any) -> int:
        return room_bytes(machine, *args) + int(machine.base_bytes * (1 - share))

    engine.scratch_of = less_scratch  # type: ignore[method-assign]
    Machine.room_bytes = more_room  # type: ignore[method-assign]


def main() -> None:
    """Parse, plan or train, print."""
    words = json.loads(sys.argv[1])
    if percent := words.pop("too_low", 0):
        plan_too_low(percent)
    if words.pop("unguarded", False):
        Machine.guard = lambda machine: MemoryGuard(1 << 60)  # type: ignore[method-assign]
    model, dataset = Path(words.pop("model")), Path(words.pop("dataset"))
    try:
        if words.pop("plan", False):
            found: dict[str, Any] = {"planned": facts(oocdl.plan(model, dataset, **words))}
        else:
            with cluster(words.pop("workers", 0), dataset.parent, words.pop("pinned", False)) as options:
                found = train(model, dataset, **options, **words)
    except OocdlError as error:
        found = {"refused": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
