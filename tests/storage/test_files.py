"""Plain files: in place of what others have put there, and errors of the disk that say what is used up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from oocdl.errors import ResourceError, StoreError
from oocdl.report import disk_check
from oocdl.report.disk_check import Need
from oocdl.storage.files import io_error, make_private

MIB = 1 << 20
OTHERS: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "a link": lambda path: path.symlink_to(path.parent),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "open to all": lambda path: (path.mkdir(), path.chmod(0o777)),
}


def test_a_private_folder_is_made_once(tmp_path: Path) -> None:
    for _ in range(2):
        make_private(tmp_path / "spill")
    assert (tmp_path / "spill").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", OTHERS)
def test_what_somebody_else_put_there_is_not_taken(tmp_path: Path, what: str) -> None:
    OTHERS[what](tmp_path / "spill")
    with pytest.raises(StoreError, match="spill"):
        make_private(tmp_path / "spill")


def test_the_folder_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private(tmp_path / "spill")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreError, match="only this user may write to"):
        make_private(tmp_path / "spill")


@pytest.mark.parametrize(
    ("code", "free", "files", "wanted"),
    [
        (errno.ENOSPC, 100, 7, "needs 4096 bytes, 100 are free; free some"),
        (errno.ENOSPC, 1 << 30, 7, "the disk is full (4096 bytes were to be written); free some"),
        (errno.ENOSPC, 1 << 30, 0, "its disk can hold no more than 50 files; delete some"),
        (errno.EDQUOT, 1 << 30, 7, "your quota of this disk is used up; delete some files"),
    ],
    ids=["bytes", "reserved", "inodes", "quota"],
)
def test_what_is_used_up_is_named(
    code: int, free: int, files: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = SimpleNamespace(f_bavail=free, f_frsize=1, f_files=50, f_favail=files)
    monkeypatch.setattr(os, "statvfs", lambda path: stats)
    error = io_error(OSError(code, os.strerror(code)), Path("/place/chunk"), 4096)
    assert isinstance(error, ResourceError)
    assert str(error).startswith(f"no space left for /place/chunk: {wanted}")


def test_what_is_needed_is_more_than_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_check, "free_bytes", lambda path: MIB + 10)
    with pytest.raises(ResourceError, match="needs 2 MiB for spill in .*, where 1 MiB are free"):
        disk_check._check_free([Need("spill", Path("/place"), MIB + 20)])
