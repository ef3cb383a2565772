"""The trace of a step: what it tells, that it is of the format, and that it changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.errors import InputError, StoreError
from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.task_key import TaskKind
from oocdl.presets.unets import write_unet3d
from oocdl.runtime.trace import COMBINE_PHASES, UNIT_PHASES
from tests.kit import nets, settings
from tests.kit.machine import Small, fit, plan
from tests.kit.runs import same
from tests.kit.searches import workers_in

pytestmark = pytest.mark.usefixtures("planned_once")

Event = dict[str, Any]
Traced = tuple[oocdl.Run, Path]
Job = tuple[Path, Path]
QUICK = {**settings.QUICK, "threads": 2, "steps": 4, "loss": "dice_ce", "seed": 5}
QUICK |= {"parallel": {"space": (2,)}}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    model = write_unet3d(folder / "unet.onnx", base=2, depth=1, classes=2)
    return model, nets.write_data(folder / "data.zarr", nets.volumes(3, 16))


@pytest.fixture(scope="module")
def traced(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("traced")
    run = oocdl.fit(*job, workdir=folder / "run", trace=folder / "step.json", **QUICK)
    return run, folder / "step.json"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def spans(path: Path, *kinds: str) -> list[Event]:
    return [e for e in read(path)["traceEvents"] if e["ph"] == "X" and (not kinds or e["cat"] in kinds)]


def nest(path: Path) -> None:
    """Of each thread, spans lie inside each other or side by side."""
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in spans(path):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        assert [e["ts"] for e in track] == sorted(e["ts"] for e in track)
        ends: list[float] = []
        for event in track:
            begun, ended = event["ts"], round(event["ts"] + event["dur"], 3)
            while ends and ends[-1] <= begun:
                ends.pop()
            assert not ends or ended <= ends[-1], event
            ends.append(ended)


def tasks_of(run: oocdl.Run, *plan_ids: str) -> Counter[tuple[object, ...]]:
    """(plan, layer, task, values, shard) of all that run, but pieces that are only picked."""
    found: Counter[tuple[object, ...]] = Counter()
    for plan_id in plan_ids:
        for call in run.plan.kinds[plan_id].graph.calls:
            if isinstance(call, UnitCall | CombineCall):
                values, key = ", ".join(call.values), call.key
                found[plan_id, run.plan.layer_names[key.layer], key.kind, values, key.number] += 1
    return found


def ran(path: Path) -> Counter[tuple[object, ...]]:
    found = (event["args"] for event in spans(path, "unit", "combine"))
    return Counter(
        tuple(args[word] for word in ("plan", "layer", "task", "values", "shard")) for args in found
    )


def test_every_task_of_the_third_step_is_there_once(traced: Traced) -> None:
    run, path = traced
    assert ran(path) == tasks_of(run, "main")
    assert {event["args"]["pass"] for event in spans(path, "unit")} == {2}
    assert read(path)["otherData"] == run.history[2]


def test_phases_make_up_their_task(traced: Traced) -> None:
    _, path = traced
    nest(path)
    found = spans(path, "phase")
    for kind, phases in (("unit", UNIT_PHASES), ("combine", COMBINE_PHASES)):
        tasks = spans(path, kind)
        assert tasks
        for task in tasks:
            end = task["ts"] + task["dur"] + 1e-3
            mine = [e for e in found if e["tid"] == task["tid"]]
            inside = [e for e in mine if task["ts"] <= e["ts"] and e["ts"] + e["dur"] <= end]
            assert sorted(e["name"] for e in inside) == sorted(phases)
            assert sum(e["dur"] for e in inside) == pytest.approx(task["dur"], abs=0.01)


def test_bytes_are_those_of_the_history(traced: Traced) -> None:
    run, path = traced
    units, row = spans(path, "unit"), run.history[2]
    assert sum(unit["args"]["read_bytes"] for unit in units) == row["unit_read_bytes"]
    assert sum(unit["args"]["made_bytes"] for unit in units) == row["unit_written_bytes"]
    read_of = Counter(event["name"] for event in spans(path, "dataset"))
    assert read_of["dataset: image"] >= 2 and read_of["dataset: target/logits"] >= 2


def test_it_is_of_the_format(traced: Traced) -> None:
    events = read(traced[1])["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    for event in events:
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in names
            assert isinstance(event["name"], str) and isinstance(event["cat"], str)
    assert {name for (_, tid), name in names.items() if tid} <= {"oocdl_0", "oocdl_1", "oocdl_2"}
    assert min(event["ts"] for event in events if event["ph"] != "M") == 0
    counted = [event["args"] for event in events if event["ph"] == "C"]
    peak = max(one["resident"] + one["reserved"] for one in counted)
    assert 0 < peak < 4 << 30 and all(min(one.values()) >= 0 for one in counted)


def test_results_are_the_same_without(job: Job, traced: Traced, tmp_path: Path) -> None:
    same(oocdl.fit(*job, workdir=tmp_path / "run", **QUICK), traced[0])


def test_of_two_steps_the_last_and_all_its_passes(job: Job, tmp_path: Path) -> None:
    options = QUICK | {"steps": 1, "accumulate": 2}
    run = oocdl.fit(*job, workdir=tmp_path / "run", trace=tmp_path / "step.json", **options)
    assert ran(tmp_path / "step.json") == tasks_of(run, "first", "main")
    nest(tmp_path / "step.json")


@pytest.mark.slow
def test_the_spill_has_tracks_of_its_own(tmp_path: Path) -> None:
    """In memory for two units most of a step is spilled."""
    model = write_unet3d(tmp_path / "unet.onnx", base=8, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(1, 32))
    options = QUICK | {"threads": 1, "steps": 3, "parallel": {"space": (16,)}}
    options["machine"] = Small(process_bytes=300 << 20)
    roomy = plan(model, data, **options)
    options["memory"] = roomy.machine.base_bytes + 2 * roomy.compiled.plan.peak_unit_bytes
    path = tmp_path / "step.json"
    run = fit(model, data, workdir=tmp_path / "run", trace=path, **options)
    nest(path)
    names = {e["tid"]: e["args"]["name"] for e in read(path)["traceEvents"] if e["name"] == "thread_name"}
    written = [event for event in spans(path, "spill") if event["name"] == "spill write"]
    assert {names[event["tid"]] for event in written} <= {"tier-io_0", "tier-io_1"}
    assert sum(event["args"]["bytes"] for event in written) > 0
    # Tasks read what they need themselves, while they wait or gather.
    found = [event for event in spans(path, "spill") if event["name"] == "spill read"]
    assert sum(event["args"]["bytes"] for event in found) == run.history[2]["read_bytes"] > 0
    assert {names[event["tid"]] for event in found} <= {"oocdl_0", "oocdl_1"}


def test_where_nothing_can_be_written_is_told_before_the_run(job: Job, tmp_path: Path) -> None:
    for path, error in ((tmp_path, InputError), (3, InputError), (tmp_path / "none/step.json", StoreError)):
        with pytest.raises(error):
            oocdl.fit(*job, workdir=tmp_path / "run", trace=path, **QUICK)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_a_run_without_a_step_to_trace_is_refused(job: Job, traced: Traced, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all 4 steps are done"):
        oocdl.fit(*job, workdir=traced[0].path, trace=tmp_path / "step.json", **QUICK)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_each_worker_of_a_client_is_a_process(job: Job, tmp_path: Path) -> None:
    options = QUICK | {"threads": 1, "steps": 2, "trace": tmp_path / "step.json"}
    with workers_in(tmp_path / "workers", memory_limit=None) as client:
        run = oocdl.fit(*job, workdir=tmp_path / "run", client=client, **options)
    found, wanted = ran(tmp_path / "step.json"), tasks_of(run, "main")
    assert not wanted - found
    assert {key[2] for key in found - wanted} == {TaskKind.COMBINE}  # small sums, by each for itself
    nest(tmp_path / "step.json")
    assert {event["pid"] for event in spans(tmp_path / "step.json", "unit")} == {1, 2}
    assert spans(tmp_path / "step.json", "strip")
    events = read(tmp_path / "step.json")["traceEvents"]
    assert len({e["args"]["name"] for e in events if e["name"] == "process_name"}) == 2
    # One clock: what both did lies within the time that the step took.
    length = max(e["ts"] + e["dur"] for e in spans(tmp_path / "step.json")) / 1e6
    assert length < run.history[-1]["seconds"] + 0.1
