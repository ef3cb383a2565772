"""What is kept in the user's cache counts only if it is what was written, by this user."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from oocdl.host import paths
from oocdl.host.user_cache import UserCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "oocdl" / "loops"


CACHE = UserCache("loops", most_entries=3)


def refused(*_: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_what_was_written_is_read(folder: Path) -> None:
    assert CACHE.read("a") is None
    CACHE.write("a", b"one\ntwo\n")
    CACHE.write("b", b"")
    assert (CACHE.read("a"), CACHE.read("b")) == (b"one\ntwo\n", b"")
    assert (folder / "a").stat().st_mode & 0o777 == 0o600 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damaged", [b"one\ntw", b"one\nten\n", b""])
def test_a_damaged_entry_does_not_count(folder: Path, damaged: bytes) -> None:
    CACHE.write("a", b"one\ntwo\n")
    seal = (folder / "a").read_bytes().partition(b"\n")[0]
    (folder / "a").write_bytes(seal + b"\n" + damaged)
    with pytest.warns(UserWarning, match="loops/a does not count, and is made anew: its digest"):
        assert CACHE.read("a") is None


def test_an_entry_of_another_name_or_user_does_not_count(folder: Path) -> None:
    CACHE.write("a", b"one")
    (folder / "a").rename(folder / "b")
    with pytest.warns(UserWarning, match="its digest does not match"):
        assert CACHE.read("b") is None
    CACHE.write("a", b"one")
    (folder / "a").chmod(0o666)
    with pytest.warns(UserWarning, match="another user may have written it"):
        assert CACHE.read("a") is None


def test_entries_used_longest_ago_are_removed(folder: Path) -> None:
    for number in range(3):
        CACHE.write(str(number), b"entry")
        os.utime(folder / str(number), (number, number))
    assert CACHE.read("0") == b"entry"
    CACHE.write("3", b"entry")
    assert sorted(path.name for path in folder.iterdir()) == ["0", "3"]


def test_where_nothing_can_be_kept_that_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    cache = UserCache("loops", most_entries=3)
    assert cache.read("a") is None
    with pytest.warns(UserWarning, match="^loops cannot be kept: .*File exists") as caught:
        cache.write("a", b"one")
    cache.write("b", b"one")
    assert "\n" not in str(caught[0].message)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(paths.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError))
    cache = UserCache("loops", most_entries=3)
    assert cache.read("a") is None
    with pytest.warns(UserWarning, match=r"^loops cannot be kept: nobody knows the home folder of user \d+"):
        cache.write("a", b"one")


def test_an_entry_that_only_can_be_read_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.write("a", b"one")
    monkeypatch.setattr(os, "utime", refused)
    assert CACHE.read("a") == b"one"


def test_a_write_that_fails_is_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = UserCache("loops", most_entries=3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refused)
        with pytest.warns(UserWarning, match="^loops cannot be kept: .*Read-only") as caught:
            for key in ("a", "b"):
                cache.write(key, b"one")
    assert len(caught) == 1 and not list(folder.iterdir())
    CACHE.write("c", b"one")
    assert CACHE.read("c") == cache.read("c") == b"one"
