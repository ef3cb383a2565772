"""One writer, by a file: also where a process was forked meanwhile, or the file is removed and made anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from oocdl.errors import InUseError, StoreError
from oocdl.storage.run import lock
from oocdl.storage.run.lock import RunLock, locked


def test_a_process_that_was_forked_keeps_no_lock_and_releases_none(tmp_path: Path) -> None:
    held = RunLock(tmp_path / "LOCK")
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        held.release()  # what is not its own
        os.write(there, b"1")
        os.close(there)
        os._exit(0)
    assert os.read(here, 1) == b"1"
    with pytest.raises(InUseError, match=f"pid {os.getpid()} "):
        RunLock(tmp_path / "LOCK")
    os.waitpid(child, 0)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        os.read(here, 1)
        os._exit(0)
    held.release()
    RunLock(tmp_path / "LOCK").release()
    os.close(there)
    os.waitpid(child, 0)


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a process that ends between the opening of the file and its locking here."""
    take: Callable[[int, Path], None] = lock._take
    taken = list[int]()

    def late(handle: int, path: Path) -> None:
        if not taken:
            path.unlink()
        taken.append(handle)
        take(handle, path)

    monkeypatch.setattr(lock, "_take", late)
    with locked(tmp_path / "out.zarr"):
        assert len(taken) == 2
        with pytest.raises(InUseError), locked(tmp_path / "out.zarr"):
            pytest.fail("two write to one place")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_always_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_take", lambda handle, path: path.unlink())
    with pytest.raises(StoreError, match="removed each time"):
        RunLock(tmp_path / "LOCK")
