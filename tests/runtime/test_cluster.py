"""The same steps over two processes of a Dask client: equal bits; only strips cross between neighbours."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.threaded
import numpy as np
import onnx
import pytest
from distributed import Client

import oocdl
from oocdl.errors import InputError
from oocdl.events import Event, Notice, StepDone
from oocdl.graph.ir.index import Region
from oocdl.host.limits import anonymous_bytes
from oocdl.losses import CrossEntropy
from oocdl.optim import Adam
from oocdl.planning.calls import UnitCall
from oocdl.planning.hosts import segments
from oocdl.planning.hosts.placement import place
from oocdl.planning.machine import FILE_BYTES, KERNEL_BYTES
from oocdl.planning.task_key import TaskKey
from oocdl.presets.unets import write_unet3d
from oocdl.runtime import execute
from oocdl.runtime.cluster import dask_records, member
from oocdl.storage.cache import chunk
from oocdl.storage.cache.memory_tier import Tier
from tests.kit import nets, settings
from tests.kit.placed import calls_of, strips_of, worker_of
from tests.kit.runs import same
from tests.kit.searches import workers_in

pytestmark = pytest.mark.usefixtures("planned_once")

Fit = Callable[..., oocdl.Run]
CUTS: dict[str, Any] = {"parallel": {"space": (4,)}}
QUICK: dict[str, Any] = {**settings.QUICK, "memory": "3GiB", "steps": 3, "loss": "dice_ce", "seed": 11}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two workers, a process and a thread each."""
    with workers_in(tmp_path_factory.mktemp("workers"), memory_limit=None) as client:
        yield client


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A U-Net with pooling, and three volumes of 16³."""
    folder = tmp_path_factory.mktemp("job")
    model = write_unet3d(folder / "unet.onnx", base=2, depth=1, classes=2)
    return model, nets.write_data(folder / "data.zarr", nets.volumes(3, 16))


@pytest.fixture
def fit(client: Client, job: tuple[Path, Path], tmp_path: Path) -> Fit:
    """``fit`` of the job in a folder, by the workers or in this process."""

    def trained(name: str = "run", here: bool = False, **options: Any) -> oocdl.Run:
        how = {**CUTS, **QUICK, "workdir": tmp_path / name, "client": None if here else client, **options}
        return oocdl.fit(*job, **how)

    return trained


@pytest.fixture(scope="module")
def local(job: tuple[Path, Path]) -> oocdl.Run:
    """The run in this process, by our own ``get``."""
    return oocdl.fit(*job, **CUTS, **QUICK)


def test_two_processes_make_the_same_bits(fit: Fit, local: oocdl.Run, tmp_path: Path) -> None:
    """And find the same in a validation, on a dataset of its own, whose arrays each worker opens."""
    other = nets.write_data(tmp_path / "other.zarr", nets.volumes(2, 16, seed=8))
    options: dict[str, Any] = {"validation": other, "validation_steps": 2, "metrics": "dice"}
    here, there = fit("here", here=True, **options), fit("there", **options)
    same(there, local)
    # What units read and made is the plan's doing, wherever they ran.
    found = ("val_loss", "val_dice", "val_dice/1")
    for name in (*found, "unit_read_bytes", "unit_written_bytes"):
        assert [row.get(name) for row in there.history] == [row.get(name) for row in here.history]
    first, *others = ([row.get(name) for name in found] for row in there.history)
    assert first == [None] * 3 and all(a != b for a, b in zip(*others, strict=True))
    assert "measured" in str(there.report())


def test_a_run_may_move_between_process_and_client(fit: Fit, local: oocdl.Run) -> None:
    for steps, here in ((1, True), (2, False), (3, True)):
        run = fit(here=here, steps=steps)
    assert nets.files_of(run) == nets.files_of(local)


@pytest.mark.slow
def test_accumulating_makes_the_same_bits(fit: Fit) -> None:
    """Three passes are a step, whose sums of gradients stay on the workers."""
    options = {"accumulate": 3, "optimizer": Adam(clip_norm=0.5)}
    same(fit("there", **options), fit("here", here=True, **options))


def test_dask_threaded_makes_the_same_bits(fit: Fit, local: oocdl.Run) -> None:
    same(fit(here=True, threads=2, scheduler=dask.threaded.get), local)


@pytest.mark.parametrize("workers", [2, 4])
def test_only_strips_cross_between_neighbours(local: oocdl.Run, workers: int) -> None:
    """Whatever a unit reads of another worker is a strip of just that, or a chunk that it needs whole."""
    graph = local.plan.compiled.graph
    placed = place(graph, workers)
    regions: dict[TaskKey, Region] = {
        key: region for pieces in graph.pieces.values() for region, key in pieces
    }
    strips, maker = {strip.key: strip for strip in strips_of(placed)}, worker_of(placed)
    assert strips and {maker[key] for key in strips} == set(range(workers))
    assert all(strip.region != regions[strip.source] for strip in strips.values())
    crossing = {"strip": 0, "whole": 0}
    for _, call in calls_of(placed):
        if not isinstance(call, UnitCall):
            continue
        mine = maker[call.key]
        for read in call.reads:
            for number, part in read.chunks:
                source = call.arguments[number]
                if maker.get(source, mine) == mine:
                    continue
                whole = strips[source].region if source in strips else regions[source]
                assert part == whole, (call.key, source, part, whole)
                crossing["strip" if source in strips else "whole"] += 1
    assert crossing["strip"] > 0
    halo = sum(np.prod([b - a for a, b in strip.region]) for strip in strips.values())
    full = sum(np.prod([b - a for a, b in regions[strip.source]]) for strip in strips.values())
    assert halo < full / 2  # slabs of four planes, halos of one or two


def test_what_a_pass_made_leaves_with_it_not_with_the_collector(client: Client, fit: Fit) -> None:
    found: list[dict[str, int]] = []

    def resident_bytes() -> int:
        tier = chunk.home()
        assert isinstance(tier, Tier)
        return tier.stats.resident_bytes

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            found.append(client.run(resident_bytes))

    client.run(gc.disable)
    try:
        fit(steps=6, callbacks=[listen])
    finally:
        client.run(gc.enable)
    assert max(found[-1].values()) > 0
    for worker, nbytes in found[-1].items():  # weights and state of two steps, whatever came before
        assert nbytes <= 1.2 * found[1][worker]


@pytest.mark.parametrize("here", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_nodes_and_values_may_have_any_name(
    request: pytest.FixtureRequest, job: tuple[Path, Path], local: oocdl.Run, tmp_path: Path, here: bool
) -> None:
    model, data = job
    odd_model = tmp_path / "odd.onnx"
    names = nets.write_with_odd_names(model, odd_model)
    options = {**CUTS, **QUICK, "client": None if here else request.getfixturevalue("client")}
    odd = oocdl.fit(odd_model, data, workdir=tmp_path / "odd", **options)
    assert names and set(names.values()) == set(odd.weights)
    for name, other in names.items():
        assert local.weights[name][...].tobytes() == odd.weights[other][...].tobytes(), (name, other)
    assert [row["loss"] for row in local.history] == [row["loss"] for row in odd.history]


def books(client: Client) -> dict[str, Any]:
    """How many records Dask has."""

    def of_scheduler(dask_scheduler: Any) -> dict[str, Any]:
        spans = dask_scheduler.extensions["spans"].spans.values()
        return {
            "prefixes": frozenset(dask_scheduler.task_prefixes),
            "groups": frozenset(dask_scheduler.task_groups),
            "spans": (len(spans), sum(len(span.groups) for span in spans)),
            "tasks": len(dask_scheduler.tasks),
        }

    def of_worker(dask_worker: Any) -> tuple[Any, ...]:
        seen = dask_worker.state.task_counter.cumulative_elapsed()
        return {prefix for prefix, _ in seen}, len(dask_worker.state.tasks)

    seen, counts = zip(*client.run(of_worker).values(), strict=True)
    of_workers = {"worker prefixes": frozenset().union(*seen), "worker tasks": sum(counts)}
    return {**client.run_on_scheduler(of_scheduler), **of_workers}


@pytest.mark.slow
def test_records_of_the_cluster_do_not_grow_with_steps(
    client: Client, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_records, "TASKS_BETWEEN_FORGETTING", 1)
    monkeypatch.setattr(segments, "HANDOVER_SECONDS", 1e-9)
    found: list[dict[str, Any]] = []

    def lengths(dask_worker: Any) -> set[Any]:
        return {getattr(dask_worker, name).maxlen for name in dask_records.OF_WORKER}

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            found.append(books(client))
            assert all(kept == {dask_records.LOG_LENGTH} for kept in client.run(lengths).values())

    run = fit(steps=12, callbacks=[listen])
    assert all(
        kept == {dask.config.get("distributed.admin.low-level-log-length")}
        for kept in client.run(lengths).values()
    )
    layers = {call.key.layer for call in run.plan.compiled.graph.calls}
    early, late = found[2], found[-1]  # the third pass is cut by measured seconds
    assert len(layers & late["groups"]) > len(layers) / 2 and late["groups"] <= late["prefixes"]
    for name in ("prefixes", "groups", "spans", "worker prefixes"):
        assert early[name] == late[name], name
    calls = len(run.plan.compiled.graph.calls)  # all tasks of a step are known for a while after it
    assert max(one[name] for one in found for name in ("tasks", "worker tasks")) < 4 * calls


def test_errors_on_workers_are_ours(client: Client, fit: Fit, job: tuple[Path, Path], tmp_path: Path) -> None:
    labels = nets.volumes(3, 16)
    labels["y"][1] = 9
    bad = nets.write_data(tmp_path / "bad.zarr", labels)
    with pytest.raises(oocdl.errors.DatasetError, match=r"array 'y' of .* has label 9 in sample 1 at \["):
        how = {**QUICK, "loss": CrossEntropy(), "batch_size": 2}
        oocdl.fit(job[0], bad, workdir=tmp_path / "bad", client=client, **how)
    with pytest.raises(oocdl.errors.NonFiniteError, match="has become NaN or infinite"):
        fit("wild", optimizer=Adam(lr=3e38), steps=1)
    assert oocdl.open(tmp_path / "wild").steps == 0
    # And the client is as good as before.
    assert fit("good", steps=1).steps == 1


def snake(build: oocdl.ops.Builder, x: str) -> str:
    """x + sin(x)²."""
    wave = build("Sin", x)
    return build("Add", x, build("Mul", wave, wave))


@pytest.mark.usefixtures("own_operators")
def test_an_own_operator_runs_on_workers_that_do_not_know_it(client: Client, tmp_path: Path) -> None:
    oocdl.ops.register("audio::Snake")(snake)
    text = """<ir_version: 8, opset_import: ["" : 18, "audio" : 1]>
        g (float[N,4] x) => (float[N,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}>
        { a = audio.Snake(x)  y = MatMul(a, w) }"""
    onnx.save(onnx.parser.parse_model(text), str(tmp_path / "own.onnx"))
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(8, 4)).astype("f4"), "y": random.normal(size=(8, 3)).astype("f4")}
    data = nets.write_data(tmp_path / "data.zarr", arrays)
    options = {**QUICK, "loss": "mse", "batch_size": 4, "parallel": {"batch": 2}}
    runs = [
        oocdl.fit(tmp_path / "own.onnx", data, workdir=tmp_path / name, client=found, **options)
        for name, found in (("here", None), ("there", client))
    ]
    assert nets.files_of(runs[0]) == nets.files_of(runs[1])


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A U-Net whose layers are worth cutting for threads, and a volume of 64³."""
    folder = tmp_path_factory.mktemp("larger")
    model = write_unet3d(folder / "unet.onnx", base=4, depth=1, classes=2)
    return model, nets.write_data(folder / "data.zarr", nets.volumes(1, 64))


def test_a_plan_has_work_for_every_worker(client: Client, larger: tuple[Path, Path], tmp_path: Path) -> None:
    """Where cuts are asked for; else one worker does what two would hardly do faster."""
    options = {**QUICK, "steps": 1, "parallel": {"space": (2,)}}
    run = oocdl.fit(*larger, workdir=tmp_path / "run", client=client, **options)
    assert run.plan.machine.workers == 2
    graph = run.plan.compiled.graph
    maker = worker_of(place(graph, 2))
    units = [call for call in graph.calls if isinstance(call, UnitCall)]
    shares = [sum(maker[call.key] == worker for call in units) for worker in (0, 1)]
    assert shares[1] > shares[0] / 2  # layers too small to be cut are all on the first


def test_layers_that_are_swept_backwards_stay_with_their_neighbours(local: oocdl.Run) -> None:
    """Units are numbered there and back again; a worker has the same part of space in all layers."""
    graph = local.plan.compiled.graph
    maker = worker_of(place(graph, 2))
    for call in graph.calls:
        if isinstance(call, UnitCall) and call.unit.shard == (0,) and len(call.unit.makes) == 1:
            assert maker[call.key] == 0


def test_a_worker_that_takes_too_much_is_named_once(
    client: Client, fit: Fit, job: tuple[Path, Path], local: oocdl.Run
) -> None:
    """Its memory is taken by somebody else, between two steps; what the run makes stays as it is."""
    budget = oocdl.plan(*job, **CUTS, **QUICK).machine.base_bytes + (100 << 20)
    hoarder = sorted(client.scheduler_info(n_workers=-1)["workers"])[1]

    def hoard() -> None:
        # Beyond what it may have of its own, and not so much that even one unit finds no room.
        most = budget - KERNEL_BYTES - FILE_BYTES + (4 << 20)
        execute.hoarded = b"x" * (most - anonymous_bytes())  # type: ignore[attr-defined]

    def let_go() -> None:
        del execute.hoarded  # type: ignore[attr-defined]

    def listen(event: Event) -> None:
        if isinstance(event, StepDone) and event.row["step"] == 1:
            client.run(hoard, workers=[hoarder])

    try:
        with pytest.warns(RuntimeWarning, match=rf"^worker {hoarder}: .* more than was predicted") as told:
            run = fit(memory=budget, callbacks=[listen])
    finally:
        client.run(let_go, workers=[hoarder])
    assert len(told) == 1
    assert [row["loss"] for row in run.history] == [row["loss"] for row in local.history]


@pytest.mark.parametrize("spare", [100 << 20, pytest.param(250 << 20, marks=pytest.mark.slow)])
def test_workers_keep_their_budget(
    tmp_path: Path, client: Client, larger: tuple[Path, Path], spare: int
) -> None:
    """Anonymous memory of both, sampled while they work."""
    # Who plans has to fit the budget as well, and after other tests it is large itself.
    budget = oocdl.plan(*larger, **QUICK).machine.base_bytes + spare
    pids, peaks, over = client.run(os.getpid).values(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            for pid in pids:
                resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
                peaks[0] = max(peaks[0], (resident - shared) * resource.getpagesize())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        oocdl.fit(*larger, workdir=tmp_path / "run", client=client, **{**QUICK, "memory": budget})
    finally:
        over.set()
        watcher.join()
    assert 0 < peaks[0] <= budget


@pytest.mark.slow
def test_a_plan_is_repeated_on_any_number_of_workers(
    fit: Fit, job: tuple[Path, Path], local: oocdl.Run, tmp_path: Path
) -> None:
    """The cuts of another run, by its directory or its plan; what they do not belong to is refused."""
    for name, plan in (("run", local.path), ("object", local.plan)):
        assert nets.files_of(fit(name, parallel="auto", plan=plan)) == nets.files_of(local)
    again = {**QUICK, "batch_size": 2}
    with pytest.raises(InputError, match="plan= gives the plan of another model, dataset or options; leave"):
        oocdl.fit(*job, workdir=tmp_path / "other", plan=local.path, **again)
    assert not (tmp_path / "other").exists()
    oocdl.fit(*job, workdir=tmp_path / "whole", **QUICK)
    with pytest.raises(InputError, match="pass replan=True to repeat it"):
        oocdl.fit(*job, workdir=tmp_path / "whole", plan=local.path, **{**QUICK, "steps": 4})


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kept_values_are_those_of_one_process(fit: Fit, job: tuple[Path, Path], accumulate: int) -> None:
    """Whichever worker adds up the partial sums of a gradient; none of these is taken for it."""
    weights = [tensor.name for tensor in onnx.load(job[0]).graph.initializer if len(tensor.dims) > 1]
    keep = ("head", *(f"grad/{name}" for name in weights))
    here, there = (fit(str(here), here=here, keep=keep, accumulate=accumulate) for here in (True, False))
    assert sorted(there.kept) == sorted(here.kept) == sorted(keep)
    for name, array in here.kept.items():
        assert there.kept[name][...].tobytes() == array[...].tobytes(), name


@pytest.mark.parametrize("what", ["mark_of", "may_write"])
def test_workers_that_do_not_see_the_run_are_served(
    client: Client, fit: Fit, local: oocdl.Run, what: str
) -> None:
    """One of two sees another folder there, or may not write; weights go to it and come from it through the
    driver."""
    blind = sorted(client.scheduler_info(n_workers=-1)["workers"])[1]

    def cover(found: str | bool) -> None:
        setattr(member, what, lambda path: found)

    def uncover(real: Any) -> None:
        setattr(member, what, real)

    notices: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    client.run(cover, {"mark_of": "another run", "may_write": False}[what], workers=[blind])
    try:
        run = fit(callbacks=[listen])
    finally:
        client.run(uncover, getattr(member, what), workers=[blind])
    assert nets.files_of(run) == nets.files_of(local)
    assert any(f"1 of 2 workers do not see {run.path}, or may not write there: " in text for text in notices)
