"""Whoever runs what, and whenever what comes, the bits are those of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oocdl.augmentation.preparation import Preparation
from oocdl.config import make_settings
from oocdl.planning.hosts import exchange, relays, segments
from oocdl.planning.passes import MAIN
from oocdl.planning.task_key import TaskKey
from oocdl.presets.unets import write_unet3d
from oocdl.runtime import weight_io
from oocdl.runtime.cluster import transfers, worker_tasks
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.session import Session
from oocdl.training.job import Job, job_of
from tests.kit import crew, nets

OPTIONS: dict[str, Any] = {"memory": "4GiB", "engine": "torch", "seed": 7, "steps": 2}
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"parallel": {"batch": 2, "channels": 4}, "batch_size": 8, "threads": 1},
    "unet": {"parallel": {"batch": 2, "space": (2, 2)}, "batch_size": 2, "threads": 2, "accumulate": 2},
}


def job(folder: Path, name: str) -> Job:
    """A model with its data, to be cut in two kinds of classes."""
    options = {**OPTIONS, **CASES[name]}
    if name == "mixed":
        model, data = nets.write_conv_and_dense(folder, samples=16, size=16, width=64)
        return job_of(model, data, make_settings(**options, loss="cross_entropy", optimizer="adam"))
    model = write_unet3d(folder / "unet.onnx", base=2, depth=1, classes=2)
    data = nets.write_data(folder / "data.zarr", nets.volumes(7, 8))
    return job_of(model, data, make_settings(**options, loss="dice_ce"))


def alone(folder: Path, one: Job, kinds: Any) -> tuple[dict[TaskKey, Any], list[Any]]:
    """What one process holds at the end, and its losses."""
    passes = [found for step in one.course.steps_from(0) for found in one.course.passes_of(step)]
    with Session(kinds, one.dataset, Preparation(), one.machine, folder) as session:
        session.load(MAIN, weight_io.initial(kinds[MAIN]))
        told = [session.run_pass(*found) for found in passes]
        return {key: chunk.copy() for key, chunk in session.held.items()}, told


async def in_crew(members: crew.InProcess, one: Job) -> list[Any]:
    """The losses that a crew tells."""
    found = []
    for step in one.course.steps_from(0):
        for number, (plan_id, info) in enumerate(one.course.passes_of(step)):
            going = members.run_pass(f"pass {info.number}", plan_id, info, not number)
            found.append(await asyncio.wait_for(going, 60))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", pytest.param("mixed", marks=pytest.mark.slow)])
def test_any_order_makes_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Members that ask for one bundle after another, or for many; with relays, and layers in groups."""
    one = job(tmp_path, name)
    kinds = one.plan().kinds
    held, told = alone(tmp_path / "spill", one, kinds)
    for count, most_asked, groups, fan, handover in (
        (1, 64, 1024, 4, 1),
        (3, 1, 2, 1, 1e-9),
        (4, 64, 1024, 4, 1e-9),
        (8, 64, 1024, 4, 1e-5),
        (8, 64, 1024, 1, 1e-9),
    ):
        monkeypatch.setattr(segments, "HANDOVER_SECONDS", handover)
        monkeypatch.setattr(transfers, "MOST_ASKED", most_asked)
        monkeypatch.setattr(exchange, "MOST_GROUPS", groups)
        monkeypatch.setattr(relays, "FAN", fan)
        with crew.crew(tmp_path, one, kinds, count, seed=count) as members:
            assert asyncio.run(in_crew(members, one)) == told
            there = members.held()
        assert there.keys() == held.keys()
        assert all(np.array_equal(there[key], held[key]) for key in held), count


def test_a_pass_that_begins_twice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time after its end: what the step began with is still what a member goes back to."""
    tasks = SimpleNamespace(call_soon=lambda *_: None)
    monkeypatch.setattr(worker_tasks, "get_worker", lambda: SimpleNamespace(_ongoing_background_tasks=tasks))
    one = job(tmp_path, "unet")
    kinds = one.plan().kinds
    passes = one.course.passes_of(next(one.course.steps_from(0)))

    async def late(members: crew.InProcess) -> bool:
        for number, (plan_id, info) in enumerate(passes):
            await members.run_pass(f"pass {info.number}", plan_id, info, not number)
        plan_id, info = passes[0]
        run_id = members.members[0].setup.run_id
        with pytest.raises(Superseded):
            begin = worker_tasks.Begin(f"pass {info.number}", plan_id, info, True)
            await worker_tasks.run_segment(run_id, 0, begin, False)
        return await members.roll_back(info.number)

    with crew.crew(tmp_path, one, kinds, 2, seed=1) as members:
        before = members.held()
        assert asyncio.run(late(members))
        after = members.held()
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "share", [0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 1.0, 2.0))]
)
def test_a_step_that_is_broken_off_leaves_what_it_began_with(tmp_path: Path, share: float) -> None:
    """Whatever part of it has run, on whomever: a commit that follows is of one step."""
    one = job(tmp_path, "unet")
    kinds = one.plan().kinds

    async def broken_off(
        members: crew.InProcess,
    ) -> tuple[bool, bool, dict[TaskKey, Any], dict[TaskKey, Any]]:
        first, second = ([*one.course.passes_of(step)] for step in one.course.steps_from(0))

        async def run(passes: Any) -> None:
            for number, (plan_id, info) in enumerate(passes):
                await members.run_pass(f"pass {info.number}", plan_id, info, not number)

        await run(first)
        before, sent = members.held(), members.messages
        going = asyncio.create_task(run(second))
        while members.messages < (1 + share) * sent and not going.done():
            await asyncio.sleep(0)
        early = not going.done()
        complete = await members.roll_back(second[0][1].number)
        await asyncio.gather(going, return_exceptions=True)
        return early, complete, before, members.held()

    with crew.crew(tmp_path, one, kinds, 4, seed=int(10 * share)) as members:
        early, complete, before, after = asyncio.run(broken_off(members))
    assert complete and early == (share < 2) and before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) for key in before)
