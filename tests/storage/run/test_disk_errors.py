"""Every call of the system in a commit that fails: typed, and nothing that was committed is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oocdl.errors import OocdlError
from oocdl.storage.run.repair import repair, verify
from oocdl.storage.run.run_store import RunStore
from tests.kit.run_dirs import check, commit

CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "scandir", "listdir", "stat", "lstat")


class Failing:
    """A function that fails at one of its calls, with files below ``root`` or with a handle."""

    def __init__(self, real: Any, root: Path, at: int, number: int) -> None:
        self.real, self.root, self.left, self.number = real, str(root), at, number

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        place = arguments[0] if arguments else None
        if isinstance(place, int) or str(place).startswith(self.root):
            self.left -= 1
            if self.left == -1:
                raise OSError(self.number, os.strerror(self.number))
        return self.real(*arguments, **options)


def calls(root: Path, name: str, number: int) -> Iterator[tuple[pytest.MonkeyPatch, Failing]]:
    """One call after the other that fails, until there are no more."""
    for at in range(200):
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(getattr(os, name), root, at, number)
            yield patch, failing
        if failing.left >= 0:
            return


@pytest.mark.parametrize(
    ("name", "number"), [*((name, errno.EIO) for name in CALLS), ("write", errno.ENOSPC)]
)
def test_a_call_that_fails_is_typed_and_loses_nothing(tmp_path: Path, name: str, number: int) -> None:
    root = tmp_path / "run"
    with RunStore.create(root, {"seed": 7}) as store:
        store.append_history([{"step": 1}])
        commit(store, 1).finish({"step": 1})
        commit(store, 2).finish({"step": 2})  # the next one has something to delete
    version, failed = 2, 0
    for patch, failing in calls(root, name, number):
        try:
            with RunStore.open(root, writable=True) as store:
                patch.setattr(os, name, failing)
                store.append_history([{"step": version + 1}])
                commit(store, version + 1).finish({"step": version + 1})
        except OocdlError as error:
            assert "\n" not in str(error)
            failed += 1
        finally:
            patch.undo()
        repair(root)
        with RunStore.open(root) as store:
            manifest = store.current()
            assert manifest is not None and manifest.version in (version, version + 1)
            version = manifest.version
            check(store, version)
        assert verify(root).sound
    assert failed or name in ("stat", "lstat", "listdir", "scandir")
