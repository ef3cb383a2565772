"""A search in this process: rungs, table, metrics, going on, failures, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import oocdl
from oocdl.errors import CorruptError, InputError, ModelWarning, ResourceError, StoreError
from oocdl.events import Notice, TrialDone
from oocdl.optim import SGD, Cosine, Then, WarmUp
from oocdl.space import LogUniform
from oocdl.storage.checksums import sealed
from oocdl.storage.files import write_text
from oocdl.storage.run.lock import RunLock
from oocdl.training.prediction.inference import Inference
from oocdl.training.run import Run
from oocdl.tuning import search_study, searching, trial
from oocdl.tuning.search_study import Journal
from tests.kit import nets
from tests.kit.searches import OPTIONS, commit_times, made_of

pytestmark = pytest.mark.usefixtures("planned_once")
Searches = Callable[..., oocdl.Search]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return nets.write_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def search(job: tuple[Path, Path], tmp_path: Path) -> Searches:
    """Four trials of two steps, if nothing else is said."""
    return lambda **given: oocdl.search(*job, **{**OPTIONS, "workdir": tmp_path / "s", **given})


HALVED: dict[str, Any] = {"trials": 5, "rungs": 3, "eta": 2}
GRID: dict[str, Any] = {"sampler": "grid", "trials": None}


@pytest.fixture(scope="module")
def whole(job: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> oocdl.Search:
    """Five trials, of which those go on that are among the best so far."""
    return oocdl.search(*job, **OPTIONS | HALVED, workdir=tmp_path_factory.mktemp("whole") / "s")


def test_a_trial_goes_on_that_is_among_the_best_so_far(whole: oocdl.Search) -> None:
    rows = whole.table
    assert [row["rung"] for row in rows] == sorted((row["rung"] for row in rows), reverse=True)
    assert all(row["steps"] == 2 * 2 ** row["rung"] for row in rows)
    assert {row["state"] for row in rows if row["rung"] < 2} == {"stopped"}
    assert {row["state"] for row in rows if row["rung"] == 2} == {"finished"}
    for row in rows:
        same = [other["metric"] for other in rows if other["rung"] == row["rung"]]
        assert same == sorted(same) and row["seconds"] > 0 and row["peak_bytes"] > 0 and row["error"] is None


def test_a_trial_is_a_run_like_any_other(job: tuple[Path, Path], whole: oocdl.Search, tmp_path: Path) -> None:
    best = whole.best
    assert best is not None and best == whole.table[0]
    options = {name: best[name] for name in ("lr", "batch_size", "optimizer")}
    plain = {name: OPTIONS[name] for name in ("memory", "engine", "threads", "progress")}
    alone = oocdl.fit(*job, **plain, **options, steps=8, workdir=tmp_path / "run")
    assert nets.files_of(whole.best_run) == nets.files_of(alone)
    # The last ten steps, of which there are eight.
    assert best["metric"] == pytest.approx(np.mean([row["loss"] for row in alone.history]), rel=1e-12)
    assert Path(best["run"]).parent == whole.path / "trials"
    assert f"batch_size={best['batch_size']}" in Path(best["run"]).name


def test_the_same_call_repeats_nothing(search: Searches, whole: oocdl.Search) -> None:
    before = commit_times(whole)
    events: list[Any] = []
    again = search(**HALVED, workdir=whole.path, callbacks=[events.append])
    assert again.table == whole.table and commit_times(whole) == before and events == []


def test_more_trials_extend_a_search(search: Searches, whole: oocdl.Search) -> None:
    """The first trials are the same, and so is what comes of it."""
    first = search(**{**HALVED, "trials": 2})
    before = commit_times(first)
    assert len(before) == 2
    found = search(**HALVED)
    assert made_of(found) == made_of(whole) and before.items() <= commit_times(found).items()
    with pytest.raises(InputError, match="has 5 trials; it goes on with as many or more"):
        search(**{**HALVED, "trials": 3})
    with pytest.raises(InputError, match="started differently: rungs was 3, is 4"):
        search(**{**HALVED, "rungs": 4})


@pytest.mark.parametrize(("sampler", "written"), [("random", False), ("optuna", True)])
def test_a_search_that_is_stopped_at_any_moment_goes_on(
    search: Searches, tmp_path: Path, sampler: str, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between what is decided and its being written: the table is that of one that was not stopped."""
    options = {**HALVED, "sampler": sampler, "trials_per_round": 2}
    whole = search(**options, workdir=tmp_path / "whole")
    count = 0

    def write(path: Path, text: str) -> None:
        nonlocal count
        count += 1
        if written or count % 2:
            write_text(path, text)
        if count % 2 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(search_study, "write_text", write)
    stops = 0
    while True:
        try:
            found = search(**options)
            break
        except KeyboardInterrupt:
            stops += 1
            assert stops < 30
            assert stops == 1 or "failed" not in {row["state"] for row in oocdl.Search(tmp_path / "s").table}
    assert stops > 5 and made_of(found) == made_of(whole)


def test_events_tell_trials(whole: oocdl.Search, search: Searches) -> None:
    events: list[Any] = []
    search(**HALVED, callbacks=[events.append])
    trials = [event for event in events if isinstance(event, TrialDone)]
    assert len(trials) == sum(row["rung"] + 1 for row in whole.table)
    assert [event.row["trial"] for event in trials] == sorted(event.row["trial"] for event in trials)
    assert (trials[-1].done, trials[-1].of) == (5, 5) and trials[0].row["state"] == "going on"
    assert all(event.row["metric"] is not None for event in trials)


def test_validation_is_what_trials_are_compared_by(search: Searches, tmp_path: Path) -> None:
    held_out = nets.write_data(tmp_path / "held.zarr", nets.vectors(6, seed=9))
    found = search(validation=held_out)
    for row in found.table:
        assert Run(Path(row["run"])).evaluate(held_out, memory="2GiB")["loss"] == pytest.approx(row["metric"])
    nets.write_data(held_out, nets.vectors(6, seed=10))
    with pytest.raises(InputError, match="started differently: validation: array 'x'"):
        search(validation=held_out)


def test_a_batch_larger_than_the_validation_dataset_is_cut_to_it(
    search: Searches, job: tuple[Path, Path], tmp_path: Path
) -> None:
    held_out = nets.write_data(tmp_path / "held.zarr", nets.vectors(3, seed=9))
    found = search(**GRID, space={"batch_size": [2, 5]}, validation=held_out)
    for row in found.table:
        size = row["batch_size"]
        alone = {name: OPTIONS[name] for name in ("memory", "engine", "threads", "progress", "steps")}
        run = oocdl.fit(*job, **alone, batch_size=size, validation=held_out, workdir=tmp_path / f"{size}")
        assert row["metric"] == pytest.approx(run.history[-1]["val_loss"], rel=1e-6), row["error"]


def test_validation_has_the_threads_and_the_spill_of_trials(
    search: Searches, job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Watched(Inference):
        def run(self, *arguments: Any) -> Any:
            seen.append((self.machine.threads, self.spill()))
            return super().run(*arguments)

    monkeypatch.setattr(trial, "Inference", Watched, raising=False)
    given = {**GRID, "space": {"lr": [0.1]}, "threads": 3, "spill": tmp_path / "fast"}
    assert search(**given, validation=job[1]).table[0]["metric"] > 0
    assert seen == [(3, tmp_path / "fast")]


def largest_weight(run: Run) -> float:
    """The lower learning rates are, the closer to what it began as."""
    return float(np.abs(run.weights["w1"][...]).max())


def nothing(run: Run) -> float:
    return float("nan")


def test_a_function_of_the_run_may_be_the_metric(search: Searches) -> None:
    found = search(metric=largest_weight, mode="max")
    metrics = [row["metric"] for row in found.table]
    assert metrics == sorted(metrics, reverse=True) and len(set(metrics)) > 1
    with pytest.raises(InputError, match="metric was function largest_weight, is function nothing"):
        search(metric=nothing, mode="max")


def test_equal_trials_keep_their_order(search: Searches) -> None:
    found = search(**GRID, space={"seed": [1, 2, 3]}, metric=lambda run: 1.0)
    assert [row["trial"] for row in found.table] == [0, 1, 2]


def test_a_trial_that_fails_is_a_row(job: tuple[Path, Path], tmp_path: Path) -> None:
    """A rate at which weights leave all bounds; the others go on."""
    options = {**OPTIONS, **GRID, "space": {"lr": [1e30, 0.1, 0.01]}, "steps": 8}
    options |= {"optimizer": "sgd", "loss": "mse", "targets": {"y": "x3"}}
    data = nets.vectors(10)
    folder = nets.write_data(tmp_path / "data.zarr", {"x": data["x"], "x3": data["x"][:, :3]})
    options |= {"rungs": 2, "eta": 3, "workdir": tmp_path / "s"}
    found = oocdl.search(job[0], folder, **options)
    failed = found.table[-1]
    assert (failed["lr"], failed["state"], failed["metric"]) == (1e30, "failed", None)
    assert failed["error"].startswith("NonFiniteError: ")
    assert failed["steps"] == Run(Path(failed["run"])).steps < 8
    assert [row["state"] for row in found.table][::2] == ["finished", "failed"]
    assert f"trial {failed['trial']}: NonFiniteError: the loss of step" in " ".join(str(found).split())
    before, events = commit_times(found), list[Any]()
    again = oocdl.search(job[0], folder, **options, callbacks=[events.append])
    assert commit_times(again) == before and events == []  # it would fail again


def test_a_budget_that_is_too_small_is_tried_again(search: Searches) -> None:
    small = {"memory": "64MiB", "trials": 2, "rungs": 2}
    events: list[Any] = []
    found = search(**small, callbacks=[events.append])
    assert [row["error"].split(":")[0] for row in found.table] == ["BudgetError"] * 2
    assert [(row["steps"], row["rung"], row["seconds"]) for row in found.table] == [(0, None, 0.0)] * 2
    assert found.best is None and [event.done for event in events] == [1, 2]
    with pytest.raises(StoreError, match="no trial of the search in .* has a metric yet"):
        _ = found.best_run
    again = search(**{**small, "memory": "2GiB"})
    assert again.best is not None and {row["error"] for row in again.table} == {None}


def test_what_is_not_the_trials_own_doing_is_tried_again(
    search: Searches, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, calls = trial.fit, []

    def full(*arguments: Any, **options: Any) -> Run:
        calls.append(options["workdir"])
        if len(calls) == 2:
            raise ResourceError("the disk is full")
        return train(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trial, "fit", full)
        found = search()
    assert [row["error"] for row in found.table] == [None] * 3 + ["ResourceError: the disk is full"]
    before = commit_times(found)
    again = search()
    changed = {name for name, when in commit_times(again).items() if before.get(name) != when}
    assert [name[:4] for name in changed] == ["0001"] and all(row["metric"] for row in again.table)


def test_a_trial_that_was_given_up_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken its run over: that is no error of the trial."""

    def taken_over(*_: Any, **__: Any) -> None:
        raise StoreError("another process has taken over the run")

    def check() -> None:
        raise trial.Unwanted

    monkeypatch.setattr(trial, "fit", taken_over)
    measure = trial.Measure("loss", None, 1)
    task = trial.Task(3, 0, 10, tmp_path / "run", tmp_path / "net.onnx", None, {}, measure)
    with pytest.raises(trial.Unwanted):
        trial.run_trial(task, check)


def test_a_metric_that_is_lost_is_not_taken_from_later_weights(search: Searches, tmp_path: Path) -> None:
    """As where the folder of a search is put back to what it was."""
    options: dict[str, Any] = {"rungs": 2, "eta": 2, "trials": 1, "metric": largest_weight}
    search(**options)
    path = tmp_path / "s" / "search.json"
    logs = [log for log in Journal(path).logs if log["op_code"] in (0, 2, 4, 5)]  # of Optuna: without results
    path.write_text(sealed("search", logs))
    again = search(**options)
    row = again.table[0]
    assert "its metric after 2 is lost" in row["error"]
    assert (row["steps"], row["seconds"] > 0, row["peak_bytes"] > 0) == (4, True, True)  # as its run has


def test_a_search_of_an_earlier_version_is_refused(search: Searches, tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text(sealed("search", {"format": 1, "trials": []}))
    for look in (lambda: oocdl.Search(tmp_path), lambda: search(workdir=tmp_path)):
        with pytest.raises(StoreError, match="is of an earlier version of oocdl; choose another workdir"):
            look()


def test_a_damaged_file_is_named(search: Searches, whole: oocdl.Search, tmp_path: Path) -> None:
    text = (whole.path / "search.json").read_text()
    (tmp_path / "search.json").write_text(text.replace("0.", "1.", 1))
    with pytest.raises(CorruptError, match="search.json is damaged"):
        _ = oocdl.Search(tmp_path)
    with pytest.raises(CorruptError, match="search.json is damaged"):
        search(**HALVED, workdir=tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trials": 0}, "trials must be at least 1"),
        ({"rungs": 0}, "rungs must be at least 1"),
        ({"eta": 1}, "eta must be at least 2"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"epochs": 2}, "steps or epochs of the first rung, not both"),
        ({"last_steps": 0}, "last_steps must be at least 1"),
        ({"sampler": "bayes"}, "sampler must be 'random' or 'grid' or 'optuna'"),
        ({"mode": "best"}, "mode must be 'min' or 'max'"),
        ({"metric": 3}, "metric takes 'loss' or a function"),
        ({"metric": nothing, "validation": "v.zarr"}, "evaluate it, and leave validation= out"),
        ({"metric": "dice"}, "no metric 'dice'; there is loss"),
        *(({"validation": given}, "validation takes a dataset in a search") for given in (0.4, "0.4", [1])),
        ({"batch_size": 2}, "'batch_size' is given twice"),
        ({"trace": "x"}, "search takes no 'trace'"),
        ({"client": 3}, "client takes a distributed.Client"),
        ({"space": {"loss": ["dise"]}}, r"space\['loss'\] has 'dise': there is no loss"),
        ({"space": {"lr": ["x"]}}, "lr must be a finite number"),
        ({"wait_seconds": -1}, "wait_seconds must be a number of seconds"),
    ],
)
def test_refused_before_anything_is_made(
    search: Searches, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        search(**changes)
    assert not (tmp_path / "s").exists()


def test_a_schedule_has_to_last_for_the_last_rung(search: Searches) -> None:
    options: dict[str, Any] = {"space": {"optimizer.lr.after.lr": LogUniform(0.01, 1.0)}, "trials": 2}
    options |= {"rungs": 2, "eta": 2}
    with pytest.raises(InputError, match="a Cosine of 2 steps, ends before the last rung at 4 steps"):
        search(**options, optimizer=SGD(WarmUp(Cosine(0.1, 2), 1)))
    found = search(**options, optimizer=SGD(WarmUp(Cosine(0.1, 4), 1)))
    rates = [row["lr"] for row in found.best_run.history]
    assert found.best is not None
    assert rates[0] < found.best["optimizer.lr.after.lr"] == rates[1] / (1 + np.cos(np.pi / 4)) * 2


@pytest.mark.parametrize(
    ("optimizer", "groups", "told"),
    [
        (SGD(WarmUp(Cosine(0.1), 1)), None, "the learning rate lasts as long as a run"),
        (SGD(Then(0.1, 2, Cosine(0.05))), None, "a trial of 3 steps goes on to the last rung at 12; give"),
        (SGD(0.1), [{"params": "b?"}, {"params": "w1", "lr": Cosine(0.1)}], "of group 2 of param_groups"),
    ],
)
def test_a_schedule_that_lasts_as_long_as_a_run_is_refused_with_rungs(
    optimizer: Any, groups: Any, told: str, search: Searches, tmp_path: Path
) -> None:
    options = {"space": {"batch_size": [2, 4]}, "rungs": 3, "eta": 2, "steps": 3, "trials": 2}
    with pytest.raises(InputError, match=told):
        search(**options, optimizer=optimizer, param_groups=groups)
    assert not (tmp_path / "s").exists()


def test_epochs_count_by_the_batch(search: Searches) -> None:
    found = search(**GRID, space={"batch_size": [2, 5]}, steps=None, epochs=1, rungs=2, eta=2)
    by_size = {row["batch_size"]: row["steps"] for row in found.table}
    assert by_size[2] in (5, 10) and by_size[5] in (2, 4) and by_size != {2: 5, 5: 2}


def test_a_folder_of_something_else_is_left_alone(search: Searches, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match="is not empty and no search"):
        search(workdir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="no search is in"):
        oocdl.Search(tmp_path)


def test_a_search_that_is_refused_removes_its_lock_while_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process could have taken it, and a third would then lock another file."""
    there, release, lock = list[bool](), RunLock.release, tmp_path / "s/LOCK"
    monkeypatch.setattr(RunLock, "release", lambda self: (there.append(lock.exists()), release(self)))
    with searching._locked(tmp_path / "s"):
        assert lock.exists()
    assert there == [False] and not (tmp_path / "s").exists()


def test_what_a_search_was_told_outlasts_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle))
    )
    journal = Journal(tmp_path / "search.json")
    journal.append_logs([{"trial": 1}])
    journal.write()
    assert synced[-1] == str(tmp_path) and len(synced) == 2


def test_what_looks_wrong_is_said_once(tmp_path: Path) -> None:
    weights = {"pe": np.ones(6), "w": np.ones((3, 6))}
    nodes = [
        helper.make_node("Add", ["x", "pe"], ["a"], "add"),
        helper.make_node("Gemm", ["a", "w"], ["y"], "head", transB=1),
    ]
    model = nets.save(tmp_path / "net.onnx", nodes, weights, ["batch", 6], {"y": ["batch", 3]})
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors(4))
    events: list[Any] = []
    options = {**OPTIONS, "trials": 2, "callbacks": [events.append]}
    with pytest.warns(ModelWarning, match="may be a buffer") as told:
        oocdl.search(model, data, **options, workdir=tmp_path / "s")
    assert len(told) == 1
    assert sum(isinstance(event, Notice) for event in events) == 1
