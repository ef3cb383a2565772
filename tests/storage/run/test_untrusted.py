"""A run directory from anywhere writes nothing outside itself; a writer that was given up on, nothing."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.run import lock
from oocdl.storage.run.manifest import KeptSeal, Manifest, TensorSpec
from oocdl.storage.run.repair import repair, verify
from oocdl.storage.run.run_store import RunStore
from tests.kit.run_dirs import W, check, commit, rewrite, two_versions


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return two_versions(tmp_path / "runs" / "a.run")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of somebody else, in the shape in which a run would delete and write."""
    folder = tmp_path / "victim"
    for name in ("t00000/e9-v9/c.0", "t00000/e1-v1/c.0.partial", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    return folder


def files(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


def with_tensor(**changes: Any) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        return replace(
            manifest, tensors={**manifest.tensors, W.name: replace(manifest.tensors[W.name], **changes)}
        )

    return change


def of_kind(kind: str) -> TensorSpec:
    """A spec that its own check would refuse."""
    spec = replace(W)
    object.__setattr__(spec, "kind", kind)
    return spec


CRAFTED: dict[str, Callable[[Manifest], Manifest]] = {
    "an id that leaves the run": with_tensor(id="../../victim/t00000"),
    "an absolute id": with_tensor(id="/tmp/t00000"),
    "an id with a line break": with_tensor(id="t00000\n"),
    "a version that is a path": with_tensor(version="1/../../../victim"),
    "an epoch that is a path": with_tensor(epoch="1/../.."),
    "an epoch below zero": with_tensor(epoch=-1),
    "a kind that is a path": with_tensor(spec=of_kind("../victim")),
    "two arrays with one id": with_tensor(id="t00001"),
    "chunks that are missing": with_tensor(records={}),
    "a parent elsewhere": lambda manifest: replace(manifest, parent="../../victim/notes.txt"),
    "a kept value elsewhere": lambda m: replace(m, kept={"a": KeptSeal("../../victim", 20, {})}),
    "a step that is none": lambda manifest: replace(manifest, meta={"step": "20"}),
    "a next id that is none": lambda manifest: replace(manifest, next_id="0/../.."),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_crafted_manifest_is_refused(run: Path, victim: Path, how: str) -> None:
    before = files(victim)
    rewrite(run, CRAFTED[how])
    for call in (lambda: RunStore.open(run), lambda: RunStore.open(run, writable=True)):
        with pytest.raises(CorruptError, match=r"manifest-2-e\d\.json is damaged") as caught:
            call()
        assert str(caught.value).isprintable()
    assert not verify(run).sound
    assert files(victim) == before


@pytest.mark.parametrize("name", ["weights", "weights/t00000", "state", "kept", "history", "spill", "LOCK"])
def test_links_out_of_a_run_are_not_followed(run: Path, victim: Path, name: str) -> None:
    path = run / name
    if path.exists():
        path.rename(run / "moved")
    path.symlink_to(victim / "notes.txt" if name == "LOCK" else victim)
    before = files(victim)
    for call in (
        lambda: RunStore.open(run, writable=True),
        lambda: RunStore.create(run, {}, restart=True),
        lambda: repair(run),
    ):
        with pytest.raises(StoreError, match="is a link, which a run does not follow"):
            call()
    assert files(victim) == before


def test_an_older_owner_publishes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks are not shared (NFS with ``nolock``, Lustre with ``localflock``) both hold one."""
    monkeypatch.setattr(lock.fcntl, "flock", lambda handle, how: None)
    older = RunStore.open(run, writable=True)
    version = commit(older, 3)
    newer = RunStore.open(run, writable=True)
    commit(newer, 4).finish({"step": 40})
    current = (run / "CURRENT").read_bytes()
    with pytest.raises(StoreError, match=r"has taken over .* \(it is writer 3, this one was writer 2\)"):
        version.finish({"step": 30})
    with pytest.raises(StoreError, match="taken over"):
        older.append_history([{"step": 30}])
    assert (run / "CURRENT").read_bytes() == current
    with RunStore.open(run) as reader:
        check(reader, 4)
    newer.append_history([{"step": 50}])
    commit(newer, 5).finish({"step": 50})
    assert verify(run).sound


def test_what_an_older_owner_published_at_the_last_moment_is_not_rolled_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock.fcntl, "flock", lambda handle, how: None)
    older = RunStore.open(run, writable=True)
    newer = RunStore.open(run, writable=True)
    with monkeypatch.context() as patch:  # between its check and its replacing CURRENT, the newer began
        patch.setattr("oocdl.storage.run.pointer.check_owner", lambda root, epoch: None)
        patch.setattr("oocdl.storage.run.pointer.acknowledge", lambda root, epoch, version: None)
        commit(older, 3).finish({"step": 30})
    with pytest.raises(StoreError, match="another process has committed to"):
        commit(newer, 4).finish({"step": 40})
    with RunStore.open(run) as reader:
        check(reader, 3)


def owned_by(run: Path, host: str, pid: int) -> int:
    """A lock that an owner holds; returns its handle."""
    (run / "LOCK").write_text(json.dumps({"host": host, "pid": pid, "start": "2026-01-01T00:00:00+00:00"}))
    handle = os.open(run / "LOCK", os.O_RDWR)
    lock.fcntl.flock(handle, lock.fcntl.LOCK_EX)
    return handle


def test_a_dead_owner_on_another_host_is_evicted_by_repair(run: Path) -> None:
    handle = owned_by(run, "other-host", 17)
    for call in (lambda: RunStore.open(run, writable=True), lambda: repair(run)):
        with pytest.raises(StoreError, match="in use by pid 17 on other-host .* 'oocdl repair --take-over'"):
            call()
    assert str(repair(run, take_over=True)).endswith("sound, nothing to repair (step 20)")
    with RunStore.open(run, writable=True) as store:
        commit(store, 3).finish({"step": 30})
    os.close(handle)


def test_an_owner_on_this_host_is_never_evicted(run: Path) -> None:
    handle = owned_by(run, socket.gethostname(), os.getpid())
    with pytest.raises(StoreError, match=rf"in use by pid {os.getpid()} on .*; wait for it, or stop it$"):
        repair(run, take_over=True)
    os.close(handle)
    assert repair(run).changes == ()
