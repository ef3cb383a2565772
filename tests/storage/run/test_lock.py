"""One writer, by a file: also where a process was forked meanwhile, or the file is removed and made anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oocdl.errors import InUseError
from oocdl.storage.run.lock import RunLock


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
