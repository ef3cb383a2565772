"""Going on with a run: what is the same goes on to the same bits, what differs is refused in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import oocdl
from oocdl.errors import BudgetError, CorruptError, InputError, InUseError, StoreError
from oocdl.events import RunFinished, RunStarted, StepDone
from oocdl.losses import CrossEntropy, DiceCE
from oocdl.optim import SGD, Adam, Cosine, Then
from oocdl.storage.cache import direct_io
from oocdl.storage.run.run_store import RunStore
from tests.kit import machine, nets
from tests.kit.machine import Small
from tests.kit.run_dirs import rewrite_meta
from tests.kit.runs import Killed, refused, same
from tests.kit.settings import QUICK

Fit = Callable[..., oocdl.Run]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """``fit`` of a small network: five batches of two an epoch."""
    job = nets.write_job(tmp_path)

    def call(workdir: str = "run", **options: Any) -> oocdl.Run:
        return oocdl.fit(*job, workdir=tmp_path / workdir, **{**QUICK, "batch_size": 2, **options})

    return call


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=np.float32(0.1), momentum=0.9),
        Adam(lr=Cosine(0.1, 10), clip_norm=1.0),
        Adam(lr=lambda step: 0.1 / (step + 1), betas=(np.float64(0.8), 0.9)),
        SGD(lr=[0.1, 0.2, 0.3, 0.1, 0.1, 0.1, 0.1].__getitem__),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_run_goes_on_to_the_same_bits(fit: Fit, optimizer: Any) -> None:
    whole = fit("whole", steps=7, optimizer=optimizer)
    fit(steps=3, optimizer=optimizer)
    same(fit(steps=7, optimizer=optimizer), whole)


def test_a_schedule_is_extended_by_another(fit: Fit) -> None:
    """Steps that are done keep their rates: the run is that of the whole schedule from its beginning."""
    first = Adam(lr=Cosine(0.1))
    both = Adam(lr=Then(Cosine(0.1, 3), 3, Cosine(0.05)))
    whole = fit("whole", steps=7, optimizer=both)
    assert [row["lr"] for row in whole.history[:4]] == [Cosine(0.1, 3)(n) for n in range(3)] + [0.05]
    fit(steps=3, optimizer=first)
    told = r"lr was 0.075 at step 2, is .* pass lr=oocdl.optim.Then\(what it was, 3, another\)"
    refused(InputError, told, lambda: fit(steps=7, optimizer=first))
    run = fit(steps=7, optimizer=both)
    assert nets.files_of(run) == nets.files_of(whole)
    refused(InputError, "at step 4, is 0.09", lambda: fit(steps=9, optimizer=Adam(lr=Then(both.lr, 3, 0.09))))
    assert fit(steps=9, optimizer=Adam(lr=Then(both.lr, 7, 0.01))).history[-1]["lr"] == 0.01


def test_a_finished_run_is_returned(fit: Fit) -> None:
    seen: list[Any] = []
    first = fit(epochs=2)
    before = {path: path.stat().st_mtime_ns for path in (first.path / "weights").rglob("*")}
    run = fit(epochs=2, callbacks=[seen.append])
    assert [type(event) for event in seen] == [RunStarted, RunFinished]
    assert (seen[0].steps, seen[0].done) == (10, 10)
    assert {path: path.stat().st_mtime_ns for path in (run.path / "weights").rglob("*")} == before
    assert run.history == first.history and run.plan is not None
    assert fit(epochs=1).steps == 10  # less than is done already


def test_epochs_and_steps_are_totals(fit: Fit) -> None:
    done: list[int] = []

    def listener(event: Any) -> None:
        if isinstance(event, StepDone):
            done.append(event.row["step"])

    for limit in ({"epochs": 1}, {"epochs": 2}, {"steps": 12}, {"epochs": 3}):
        fit(**limit, callbacks=[listener])
    assert done == list(range(1, 16))
    assert nets.files_of(fit()) == nets.files_of(fit("whole", epochs=3))


def test_a_run_without_a_committed_step_may_begin_anew(fit: Fit) -> None:
    def end(event: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        fit(steps=2, callbacks=[end])
    told = "batch_size was 2, is 5; no step of it is committed, so resume='restart' loses nothing$"
    refused(InputError, told, lambda: fit(steps=2, batch_size=5))
    assert fit(steps=2, batch_size=5, resume="restart").steps == 2


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 5}, "batch_size was 2, is 5; choose another workdir, or resume='restart'"),
    ({"seed": 1, "shuffle": False}, "shuffle was True, is False; seed was 0, is 1"),
    ({"lr": 0.5}, r"optimizer\.lr was 0\.001 at step 1, is 0\.5"),
    ({"optimizer": Adam(lr=lambda step: 0.1)}, r"optimizer\.lr was 0\.001 at step 1, is 0\.1"),
    ({"optimizer": "sgd"}, "optimizer was Adam, is SGD"),
    ({"loss": DiceCE()}, r"loss\.y\.loss was CrossEntropy, is DiceCE"),
    ({"loss": CrossEntropy(class_weights=(1, 2, 3))}, r"class_weights was nothing, is \[1.0, 2.0, 3.0\]"),
    ({"loss": {"y": ("cross_entropy", 2)}}, r"loss\.y\.weight was 1\.0, is 2\.0"),
    ({"accumulate": 2}, "accumulate was 1, is 2"),
    ({"freeze": "w1"}, r"freeze was \[\], is \['w1'\]"),
    ({"scale": {"x": 2}}, r"scale was nothing, is \{'x': 2\.0\}"),
    ({"precision": "float64", "engine": "torch"}, "precision was float32, is float64"),
    ({"engine": "torch"}, "planned differently: engine was onnxruntime, is torch; pass replan=True"),
    ({"parallel": {"batch": 2}, "keep": "h"}, r"was auto, is \{'batch': 2\}; keep was \[\], is \['h'\]"),
]


def test_what_differs_is_listed(fit: Fit) -> None:
    """The run then goes on, also where the same is said in other words."""
    run = fit(steps=1)
    before = nets.files_of(run)
    for change, message in DIFFERENT:
        refused(InputError, message, lambda change=change: fit(steps=2, **change))
    assert nets.files_of(oocdl.open(run.path)) == before
    equal = {"loss": {"y": CrossEntropy()}, "optimizer": Adam(lr=np.float64(0.001)), "inputs": {"x": "x"}}
    equal |= {"targets": {"y": "y"}, "seed": np.int8(0), "batch_size": np.int64(2), "freeze": []}
    assert fit(steps=2, memory=3 << 30, commit_seconds=1, threads=2, **equal).steps == 2


def test_another_model_or_dataset(fit: Fit, tmp_path: Path) -> None:
    fit(steps=1)
    arrays = nets.vectors()
    zarr.open_group(tmp_path / "data.zarr")["x"][7] = 1.0  # one sample of equal shape
    refused(InputError, "array 'x' (stores|has) other (chunks|content) .*samples 7; ", lambda: fit(steps=2))
    nets.write_data(tmp_path / "data.zarr", {name: np.concatenate([a, a[:1]]) for name, a in arrays.items()})
    refused(InputError, "array 'x' had 10 samples, has 11; array 'y' had 10 samples", lambda: fit(steps=2))
    nets.write_data(tmp_path / "data.zarr", {**arrays, "more": arrays["x"]})
    assert fit(steps=2).steps == 2  # an array that is not used does no harm
    nets.write_mlp(tmp_path / "net.onnx", (6, 9, 3))
    refused(InputError, "model was [0-9a-f]+, is [0-9a-f]+", lambda: fit(steps=3))
    run = oocdl.open(tmp_path / "run")
    refused(StoreError, "no longer the file", lambda: run.export(tmp_path / "out.onnx"))


@pytest.fixture
def volume(tmp_path: Path) -> Fit:
    """``fit`` of convolutions of a volume of 32³, which small budgets cut."""
    model = nets.write_conv(tmp_path / "conv.onnx", channels=8, layers=3)
    data = nets.write_data(tmp_path / "volume.zarr", nets.volumes(1, 32))

    def call(workdir: str, **options: Any) -> oocdl.Run:
        small = Small(process_bytes=300 << 20)
        return machine.fit(model, data, machine=small, workdir=tmp_path / workdir, **{**QUICK, **options})

    return call


@pytest.mark.slow
def test_another_budget_makes_the_same_bits(volume: Fit, tmp_path: Path) -> None:
    """The plan is frozen: more memory changes nothing, less nothing as long as a unit fits."""
    refused(BudgetError, "beside the process itself", lambda: volume("none", memory="1MiB"))
    assert not (tmp_path / "none").exists()
    first = volume("run", steps=2, parallel={"space": (4,)})
    plan = (first.path / "plan.json").read_bytes()
    base = first.plan.machine.base_bytes
    need = first.plan.compiled.plan.peak_unit_bytes
    run = volume("run", steps=4, parallel={"space": (4,)}, memory=base + need + need // 4)
    assert (run.path / "plan.json").read_bytes() == plan
    whole = volume("whole", steps=4, parallel={"space": (4,)})
    assert nets.files_of(run) == nets.files_of(whole)
    less = {"parallel": {"space": (4,)}, "memory": base + need // 2}
    refused(BudgetError, "memory|budget", lambda: volume("run", steps=5, **less))
    assert volume("run", steps=5, parallel={"space": (4,)}).steps == 5


def test_a_damaged_byte_of_the_spill_stops_a_run_at_its_last_commit(
    volume: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = volume("first", steps=1, parallel={"space": (4,)})
    need = first.plan.compiled.plan.peak_unit_bytes
    cut = {"parallel": {"space": (4,)}, "memory": first.plan.machine.base_bytes + need + need // 8}
    whole = volume("whole", steps=3, **cut)
    assert volume("run", steps=2, **cut).history[-1]["read_bytes"] > 0  # from the spill
    written: list[Path] = []

    def write_array(path: Path, array: Any, flag: int, outer: int) -> None:
        direct_io.write_array(path, array, flag, outer)
        written.append(path)
        with path.open("r+b") as file:  # the disk has turned a bit
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 4]))

    with monkeypatch.context() as patch:
        patch.setattr("oocdl.storage.cache.spill_store.write_array", write_array)
        said = "of the spilled chunk .* are not what was written"
        refused(CorruptError, said, lambda: volume("run", steps=3, **cut))
    assert written
    assert nets.files_of(volume("run", steps=3, **cut)) == nets.files_of(whole)


@pytest.mark.parametrize("memory", ["100MiB", "220MiB"])
def test_a_budget_too_small_for_the_plan_of_a_run_names_one_that_would_do(
    tmp_path: Path, memory: str
) -> None:
    job = nets.write_conv(tmp_path / "conv.onnx", channels=8), tmp_path / "data.zarr"
    nets.write_data(job[1], nets.volumes(2, 32))
    options = {**QUICK, "machine": Small(process_bytes=200 << 20), "workdir": tmp_path / "run"}
    machine.fit(*job, **options, steps=1)
    with pytest.raises(BudgetError, match="by the plan that is repeated") as caught:
        machine.fit(*job, **{**options, "memory": memory}, steps=2)
    (named,) = re.findall(r"memory='(\d+MiB)' would do", str(caught.value))
    assert machine.fit(*job, **{**options, "memory": named}, steps=2).steps == 2


def test_replan(fit: Fit) -> None:
    fit(steps=1)
    run = fit(steps=2, replan=True, engine="torch", parallel={"batch": 2}, keep="h")
    assert run.steps == 2 and set(run.kept) == {"h"}
    assert fit(steps=3, engine="torch", parallel={"batch": 2}, keep="h").steps == 3
    refused(InputError, "engine was torch, is onnxruntime", lambda: fit(steps=4))


@pytest.mark.parametrize("damage", ["", "[]", '{"plan": {}, "digest": "0"}', "digit", "lost"])
def test_a_corrupt_plan(fit: Fit, damage: str) -> None:
    path = fit(steps=1).path / "plan.json"
    text = path.read_text()
    if damage == "lost":
        path.unlink()
    else:
        path.write_text(text.replace('"main"', '"Main"') if damage == "digit" else damage)
    kind = StoreError if damage == "lost" else CorruptError
    refused(kind, r"plan\.json is (damaged|lost).*replan=True", lambda: fit(steps=2))
    assert fit(steps=2, replan=True).steps == 2
    assert fit(steps=3).steps == 3


def test_a_plan_of_another_machine_warns(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(steps=1)
    monkeypatch.setattr("oocdl.planning.machine.installed_version", lambda package: "0.0")
    monkeypatch.setattr("oocdl.planning.machine.LOOPS_VERSION", "0")
    with pytest.warns(UserWarning, match=r"not equal: onnxruntime was .*, is 0.0; loops was \d+, is 0"):
        assert fit(steps=2).steps == 2


def test_a_damaged_run_is_repaired_and_goes_on_to_the_same_bits(fit: Fit) -> None:
    whole = fit("whole", steps=6)
    for steps in (2, 4):
        run = fit(steps=steps)
    assert oocdl.verify(run.path).sound
    (chunk,) = (run.path / "weights").glob("t00000/e*-v4/c*")
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    refused(CorruptError, "chunk .* of version 4 .*'oocdl repair' goes back", lambda: fit(steps=6))
    refused(CorruptError, "is not what was written", lambda: run.weights["w1"][...])
    assert str(oocdl.verify(run.path)).count("\n") == 1
    done = oocdl.repair(run.path)
    assert done.step == 2 and "steps 3 to 4 are lost: array 'w1' chunk c.0.0 of step 4" in str(done)
    same(fit(steps=6), whole)
    assert oocdl.verify(run.path).sound


def test_settings_and_plan_are_bound_to_the_version(fit: Fit) -> None:
    run, other = fit(steps=1), fit("other", steps=1, parallel={"batch": 2}, scale={"x": 2.0})
    for file in ("plan.json", "run.json"):
        text = (run.path / file).read_text()
        (run.path / file).write_text((other.path / file).read_text())
        said = rf"{file} is damaged \(it is not the one that the last commit was made with\)"
        refused(CorruptError, said, lambda: fit(steps=2))
        (run.path / file).write_text(text)
    assert fit(steps=2).steps == 2


def test_refuse_and_restart(fit: Fit) -> None:
    first = fit(steps=3)
    (first.path / "notes.txt").write_text("mine")
    refused(StoreError, "a run is in .* already", lambda: fit(resume=False))
    refused(InputError, "did you mean 'steps'", lambda: fit(resume="restart", step=3))
    refused(InputError, "batch_size must be", lambda: fit(resume="restart", batch_size=11))
    assert oocdl.open(first.path).steps == 3  # refused before anything was cleared
    run = fit(resume="restart", steps=2, batch_size=5, seed=1)
    assert run.steps == 2 and len(run.history) == 2 and run.kept == {}
    assert nets.files_of(run) == nets.files_of(fit("other", steps=2, batch_size=5, seed=1))
    assert (run.path / "notes.txt").read_text() == "mine"
    (run.path / "CURRENT").write_text("damaged")
    refused(CorruptError, "CURRENT", lambda: fit(steps=3))
    assert fit(resume="restart", steps=1).steps == 1


def test_restart_spares_what_is_no_run(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "run" / "weights").mkdir(parents=True)
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    refused(StoreError, "not empty and not a run", lambda: fit(resume="restart", steps=1))
    assert (tmp_path / "run" / "thesis.tex").read_text() == "precious"


def test_a_run_in_use(fit: Fit, tmp_path: Path) -> None:
    run = fit(steps=1)
    with RunStore.open(run.path, writable=True):
        refused(InUseError, "is in use by pid", lambda: fit(steps=2))
        refused(InUseError, "is in use by pid", lambda: fit(steps=2, resume="restart"))
        assert oocdl.open(run.path).steps == 1  # reading is free
    assert fit(steps=2).steps == 2


def test_open(fit: Fit, tmp_path: Path) -> None:
    refused(StoreError, "is not a run", lambda: oocdl.open(tmp_path))
    refused(StoreError, "is not a run", lambda: oocdl.open(tmp_path / "nothing"))
    run = fit(epochs=2)
    other = oocdl.open(run.path)
    assert other.steps == 10 and other.finished and repr(other) == f"Run('{run.path}', steps=10)"
    assert repr(other.weights) == "<weights: 4 arrays, 83 numbers, 0.0 MiB>"
    rewrite_meta(run.path, lambda meta: {**meta, "format": 99})
    refused(StoreError, "another version of oocdl", lambda: fit(epochs=2))
    rewrite_meta(run.path, lambda meta: {**meta, "settings": {"loss": {"type": "Unheard"}}})
    refused(CorruptError, "has facts that .* cannot read", lambda: oocdl.open(run.path))


def test_reading_while_it_runs(fit: Fit, tmp_path: Path) -> None:
    """Rows of steps that are not committed are not shown: a crash would take them back."""
    seen: list[tuple[int, int]] = []
    readers: list[oocdl.Run] = []

    def listener(event: Any) -> None:
        if isinstance(event, StepDone):
            readers.append(oocdl.open(tmp_path / "run"))
            seen.append((readers[-1].steps, len(readers[-1].history)))

    fit(epochs=2, callbacks=[listener])
    assert seen == [(0, 0)] * 5 + [(5, 5)] * 5
    assert {reader.steps for reader in readers} == {10}  # a reader follows the writer


def test_a_copied_dataset_is_said_to_be_one(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where too much is stored to compare all of it."""
    monkeypatch.setattr("oocdl.storage.dataset.identity.WHOLE_BYTES", 10)
    fit(steps=1)
    for file in (tmp_path / "data.zarr").rglob("*"):
        os.utime(file)
    with pytest.warns(UserWarning, match="goes on: array '.' has other times .* it is taken for a copy"):
        assert fit(steps=2).steps == 2
