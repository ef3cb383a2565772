"""Plain files and folders, where others may have put something else in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from oocdl.errors import StoreError
from oocdl.storage.files import make_private

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
