"""The run on disk: commit, reopen, kill, damage, locks, history, kept values."""

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import zarr

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.index import whole
from oocdl.storage.run import pointer
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore
from tests.kit.run_dirs import SPECS, B, M, W, check, commit, content, two_versions

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run with versions 1 and 2."""
    return two_versions(tmp_path / "a.run")


def folder(path: Path, spec: TensorSpec) -> Path:
    with RunStore.open(path) as store:
        manifest = store.current()
        assert manifest is not None
        return path / manifest.tensors[spec.name].folder


def test_reopening_gives_what_was_committed(path: Path) -> None:
    for writable in (False, True):
        with RunStore.open(path, writable) as store:
            check(store, 2)
            assert store.meta == {"seed": 7}
            manifest = store.current()
            assert manifest is not None
            assert manifest.meta == {"step": 20, "rng": [1, 2]}
            assert manifest.tensors[W.name].spec == W
            part = store.read(W.name, ((1, 5), (2, 4)))
            assert np.array_equal(part, content(W, 2)[1:5, 2:4])
            out = np.zeros((5, 12), np.float32)
            store.read(W.name, whole(W.shape), out[:, ::2])
            assert np.array_equal(out[:, ::2], content(W, 2))


def test_any_zarr_reader_opens_the_run(path: Path) -> None:
    group = zarr.open_group(path, mode="r")
    ident = folder(path, W).relative_to(path)
    array = group[str(ident)]
    assert isinstance(array, zarr.Array)
    assert np.array_equal(array[...], content(W, 2))
    assert array.attrs["name"] == W.name
    assert group[str(ident.parent)].attrs["name"] == W.name
    with RunStore.open(path) as store:
        assert np.array_equal(store.array(M.name)[...], content(M, 2))
        with pytest.raises(ValueError, match="read"):
            store.array(W.name)[0, 0] = 1


def test_names_are_never_paths_and_ids_are_stable(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        before = {n: t.id for n, t in store.current().tensors.items()}  # type: ignore[union-attr]
        new = TensorSpec("new", "weights", (1,), "float32", (1,))
        commit(store, 3, (new, *reversed(SPECS))).finish({"step": 30})
        after = {n: t.id for n, t in store.current().tensors.items()}  # type: ignore[union-attr]
    assert before == {W.name: "t00000", M.name: "t00001", B.name: "t00002"}
    assert after == {**before, "new": "t00003"}
    assert sorted(p.name for p in path.glob("*/t*")) == ["t00000", "t00001", "t00002", "t00003"]


def test_carried_arrays_are_not_written_again(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        for version in (3, 4, 5):
            step = store.begin(version, [M], carry=[W.name])
            step.write(M.name, whole(M.shape), content(M, version))
            step.finish({"step": version * 10})
        assert np.array_equal(store.read(W.name, whole(W.shape)), content(W, 2))
        assert np.array_equal(store.read(M.name, whole(M.shape)), content(M, 5))
        with pytest.raises(StoreError, match="carry"):
            store.begin(6, [], carry=["b"])
    assert sorted(p.name for p in path.glob("weights/*/e*")) == ["e1-v2"]


def test_two_versions_are_kept(path: Path) -> None:
    assert sorted(p.name for p in path.glob("weights/t00000/e*")) == ["e1-v1", "e1-v2"]
    with RunStore.open(path, writable=True) as store:
        assert store.epoch == 2
        commit(store, 3).finish({"step": 30})
    assert sorted(p.name for p in path.glob("weights/t00000/e*")) == ["e1-v2", "e2-v3"]
    assert len(list(path.glob("manifest-*.json"))) == 2


def test_unfinished_versions_are_removed(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        commit(store, 3).abort()
        assert not list(path.glob("weights/*/e2-v3"))
        commit(store, 3)
    assert not list(path.glob("weights/*/e2-v3"))  # closing aborts
    (path / "weights/t00009/e9-v9").mkdir(parents=True)
    (path / "weights/t00000/e1-v2/c.0.0.1.2.partial").write_bytes(b"")
    (path / "manifest-9-e9.json").write_text("{}")
    with RunStore.open(path, writable=True) as store:
        check(store, 2)
    assert not (path / "weights/t00009").exists()
    assert not list(path.rglob("*.partial"))
    assert len(list(path.glob("manifest-*"))) == 2


def test_writes_must_be_whole_complete_and_the_same(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        made = store.begin(3, [W])
        data = content(W, 3)
        for region in (((0, 1), (0, 6)), ((1, 2), (0, 6)), ((0, 6), (0, 6))):
            shape = tuple(b - a for a, b in region)
            with pytest.raises(StoreError, match="whole"):
                made.write(W.name, region, np.zeros(shape, np.float32))
        with pytest.raises(StoreError, match="float64"):
            made.write(W.name, ((0, 2), (0, 3)), np.zeros((2, 3)))
        made.write(W.name, ((0, 4), (0, 6)), data[:4])
        with pytest.raises(StoreError, match="4 of 6 chunks"):
            made.finish({})
        made.write(W.name, ((2, 5), (3, 6)), data[2:, 3:])
        made.write(W.name, ((4, 5), (0, 3)), data[4:, :3])
        with pytest.raises(StoreError, match="deterministic"):
            made.write(W.name, ((4, 5), (0, 3)), data[4:, :3] + 1)
        with pytest.raises(StoreError, match="still being written"):
            store.begin(4, [W])
        made.write(W.name, ((4, 5), (0, 3)), data[4:, :3])
        made.finish({"step": 30})
        with pytest.raises(StoreError, match="finished"):
            made.write(W.name, whole(W.shape), data)
        check(store, 3, (W,))
        with pytest.raises(StoreError, match="not after"):
            store.begin(3, [W])


def test_workers_write_through_a_picklable_writer(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        made = store.begin(3, [W])
        writer = pickle.loads(pickle.dumps(made.writer()))
        for top in (0, 2, 4):
            region = ((top, min(top + 2, 5)), (0, 6))
            made.record(W.name, writer.write(W.name, region, content(W, 3)[top : top + 2]))
        made.finish({"step": 30})
        check(store, 3, (W,))


def test_a_write_that_comes_after_its_crew_was_given_up_harms_no_version(path: Path) -> None:
    """As of a worker that was cut off in a commit; on another processor its bits are close and not equal."""
    with RunStore.open(path, writable=True) as store:
        region = whole(W.shape)
        given_up = store.begin(3, [W])
        late = given_up.writer()
        late.write(W.name, region, content(W, 3))
        given_up.abort()
        store.forget_uncommitted()
        commit(store, 3).finish({"step": 30})
        with pytest.raises(StoreError):
            late.write(W.name, region, content(W, 4))
        check(store, 3)
    with RunStore.open(path, writable=True) as store:
        check(store, 3)


def test_a_chunk_at_the_end_is_written_without_a_copy_of_it(path: Path) -> None:
    """Nor is one that is no run of memory: what is written is counted, a copy of it would not be."""
    spec = TensorSpec("large", "weights", (1024, 1500), "float32", (512, 1024))
    array = np.random.default_rng(0).random(spec.shape, np.float32)
    with RunStore.open(path, writable=True) as store:
        made = store.begin(3, (spec,))
        tracemalloc.start()
        made.write(spec.name, whole(spec.shape), array)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        made.finish({"step": 30})
        assert peak < spec.chunk_bytes / 2
        assert np.array_equal(store.read(spec.name, whole(spec.shape)), array)
    assert np.array_equal(zarr.open_array(folder(path, spec), mode="r")[...], array)


def test_one_writer_at_a_time(path: Path) -> None:
    with RunStore.open(path, writable=True):
        with pytest.raises(StoreError, match=rf"in use by pid {os.getpid()} on "):
            RunStore.open(path, writable=True)
        with RunStore.open(path) as reader:
            check(reader, 2)
            with pytest.raises(StoreError, match="reading only"):
                reader.begin(3, [W])
    code = (
        "import os, sys\n"
        "from oocdl.storage.run.run_store import RunStore\n"
        "store = RunStore.open(sys.argv[1], writable=True)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"pid {other.pid} "):
            RunStore.open(path, writable=True)
        other.kill()
        other.wait(20)
    with RunStore.open(path, writable=True) as store:  # the dead one is taken over
        check(store, 2)


def test_a_run_that_somebody_deletes_while_it_is_written_is_gone_and_not_taken_over(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        shutil.rmtree(path)
        with pytest.raises(StoreError, match=f"the run in {path} is gone: it was deleted or moved"):
            store.append_history([{"step": 3}])


def test_a_reader_sees_new_commits_and_reads_a_manifest_once(path: Path) -> None:
    with RunStore.open(path) as reader, RunStore.open(path, writable=True) as writer:
        assert reader.current() is reader.current()
        commit(writer, 3).finish({"step": 30})
        check(reader, 3)


@pytest.mark.parametrize("step", [None, 20])
def test_a_version_that_is_replaced_while_it_is_read_is_not_called_lost(path: Path, step: int | None) -> None:
    with RunStore.open(path) as current, RunStore.open(path, writable=True) as writer:
        reader = current if step is None else current.at(step)
        for version in (3, 4):
            commit(writer, version).finish({"step": version * 10})
        with pytest.raises(StoreError, match=f"{path} was trained on meanwhile; call again$") as caught:
            reader.read(W.name, whole(W.shape))
        assert not isinstance(caught.value, CorruptError)
        check(current, 4)
    (folder(path, W) / "c.0.0").unlink()
    with RunStore.open(path) as reader, pytest.raises(CorruptError, match="is lost"):
        reader.read(W.name, whole(W.shape))


@pytest.mark.parametrize("restart", [False, True])
def test_a_restart_that_is_killed_when_the_run_is_cleared_leaves_a_folder_to_begin_in(
    path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    with monkeypatch.context() as patch:
        clear = pointer.clear
        patch.setattr(pointer, "clear", lambda root: (clear(root), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            RunStore.create(path, {}, restart=True)
    (path / "spill").mkdir()
    (path / "CURRENT-damaged").touch()
    assert {left.name for left in path.iterdir()} == {"CURRENT-damaged", "LOCK", "epoch-1", "spill"}
    with RunStore.create(path, {"seed": 8}, restart) as store:
        assert store.epoch == 2 and store.current() is None


@pytest.mark.parametrize("name", ["epoch-3/weights.pt", "epoch-3", "epoch-3.ckpt"])
def test_epochs_of_another_program_are_not_taken(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(StoreError, match="not empty and not a run"):
        RunStore.create(tmp_path, {}, restart=True)
    assert (tmp_path / name).read_text() == "precious"


def test_create_refuses_folders_that_are_not_ours(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="a run is in"):
        RunStore.create(path, {})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with pytest.raises(StoreError, match="not empty"):
        RunStore.create(tmp_path / "home", {})
    for writable in (False, True):
        with pytest.raises(StoreError, match="not a run"):
            RunStore.open(tmp_path / "home", writable)
    assert [p.name for p in (tmp_path / "home").iterdir()] == ["thesis.txt"]


def test_an_array_that_was_replaced_is_not_called_damaged(path: Path) -> None:
    with RunStore.open(path) as reader, RunStore.open(path, writable=True) as writer:
        taken = reader.array(W.name)
        commit(writer, 3).finish({"step": 30})
        assert np.array_equal(taken[...], content(W, 2)), "the version before stays"
        commit(writer, 4).finish({"step": 40})
        with pytest.raises(StoreError, match="gone, for the run was trained further"):
            taken[...]


def test_a_long_history_is_not_held_in_memory(path: Path) -> None:
    """As when a run goes on: 20,000 rows took 8 MB by their lines, and 30 MB as rows."""
    with RunStore.open(path, writable=True) as store:
        store.append_history([{"step": n, "epoch": 0, "loss": 1 / n, "lr": 0.1} for n in range(1, 20_001)])
        commit(store, 3).finish({"step": 20_000})
    tracemalloc.start()
    with RunStore.open(path, writable=True) as store:
        assert sum(row["step"] for row in store.history()) == 20_000 * 20_001 // 2
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 3 << 20


def test_history_is_cut_to_the_committed_step(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        store.append_history([{"step": step, "loss": 1 / step} for step in (19, 20)])
        commit(store, 3).finish({"step": 20})
        store.append_history([{"step": 20, "loss": 7.0}, {"step": 21, "loss": 0.5}])  # 20 is there already
        assert [row["step"] for row in store.history()] == [19, 20, 21]
        with pytest.raises(StoreError, match="step"):
            store.append_history([{"loss": 1.0}])
    with (path / "history/steps.jsonl").open("a") as stream:
        stream.write('{"step": 2')
    with RunStore.open(path) as store:
        assert len(list(store.history())) == 2  # row 21 is not committed
    with RunStore.open(path, writable=True) as store:
        assert list(store.history()) == [{"step": 19, "loss": 1 / 19}, {"step": 20, "loss": 1 / 20}]


def test_kept_values(path: Path) -> None:
    with RunStore.open(path, writable=True) as store:
        for step in (19, 20):
            array = store.keep("a/../b", (4, 4), "float32", (2, 4), step)
            array[:1] = -1.0
            array[...] = step * (np.arange(16).reshape(4, 4) > 7)
        assert store.kept() == {}  # not committed yet
        commit(store, 3).finish({"step": 20})
        store.keep("a/../b", (4, 4), "float32", (2, 4), 21)[...] = 0.0
        store.keep("later", (2,), "float32", (2,), 21)
        assert set(store.kept()) == {"a/../b"}
    assert len(list(path.glob("kept/k*-s20/c/*/*"))) == 2  # zeros are stored
    for writable in (False, True):
        with RunStore.open(path, writable) as store:
            kept = store.kept()["a/../b"]
            assert np.array_equal(kept[...], 20.0 * (np.arange(16).reshape(4, 4) > 7))
            assert kept.attrs["name"] == "a/../b"
    assert [found.name[-4:] for found in path.glob("kept/k*")] == ["-s20"]


FORKING = multiprocessing.get_context("forkserver")
"""Its processes begin with all modules imported."""
FORKING.set_forkserver_preload(["__main__", __name__])


def commit_for_ever(root: Path, versions: Connection) -> None:
    """Commit version after version, and tell of each."""
    with RunStore.open(root, writable=True) as store:
        found = store.current()
        version = found.version if found else 0
        while True:
            version += 1
            store.append_history([{"step": version}])
            commit(store, version).finish({"step": version})
            versions.send(version)


def killed(root: Path, after: int, seconds: float) -> list[int]:
    """What a process has told that was killed so long after it told of ``after`` versions."""
    here, there = FORKING.Pipe(duplex=False)
    process = FORKING.Process(target=commit_for_ever, args=(root, there))
    process.start()
    there.close()
    told = [here.recv() for _ in range(after)]
    time.sleep(seconds)
    process.kill()
    process.join()
    with here, contextlib.suppress(EOFError):
        while True:
            told.append(here.recv())
    return told


def test_killed_anywhere_loses_no_committed_version(tmp_path: Path) -> None:
    root = tmp_path / "a.run"
    RunStore.create(root, {}).close()
    rng = random.Random(1)
    acknowledged = 0
    for _ in range(20):
        acknowledged = max([acknowledged, *killed(root, rng.randrange(4), rng.uniform(0, 0.08))])
        with RunStore.open(root, writable=True) as store:
            current = store.current()
            if current is None:
                assert acknowledged == 0
                continue
            assert acknowledged <= current.version <= acknowledged + 1
            check(store, current.version)
            acknowledged = current.version
            assert list(store.history())[-1] == {"step": current.version}
        assert len(list(root.glob("weights/t00000/e*"))) <= 2
    assert acknowledged > 20
