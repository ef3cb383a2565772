"""Compiled loops are kept in the user's cache, and count only if they are what was written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oocdl.fusion import code_cache
from oocdl.fusion.code_cache import CodeCache

STORES_SEVEN = """
import ctypes, sys, llvmlite.binding as llvm
from oocdl.fusion.jit import compiled

class Seven:
    def write(self, name):
        return f"define void @{name}(ptr %arguments) {{\\n  store i64 7, ptr %arguments\\n  ret void\\n}}\\n"

if sys.argv[1] == "kept":
    llvm.TargetMachine.emit_object = None  # nothing may be compiled
number = ctypes.c_int64()
compiled(Seven())(ctypes.addressof(number))
print(number.value)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return CodeCache("a compiler")


def test_a_machine_compiles_a_loop_once(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    for how in ("compiled", "kept"):
        command = [sys.executable, "-c", STORES_SEVEN, how]
        told = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert told.stdout == "7\n", told.stderr


def test_an_entry_that_is_damaged_or_of_another_does_not_count(cache: CodeCache, tmp_path: Path) -> None:
    key, other = cache.key("a loop"), cache.key("another")
    assert len({key, other, CodeCache("another compiler").key("a loop")}) == 3
    assert cache.read(key) is None
    cache.write(key, b"code")
    assert cache.read(key) == b"code"
    entry = tmp_path / "oocdl" / "loops" / key
    whole = entry.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"!", b""):
        entry.write_bytes(damaged)
        assert cache.read(key) is None
    entry.write_bytes(whole)
    entry.with_name(other).write_bytes(whole)
    assert cache.read(other) is None
    entry.chmod(0o666)
    assert cache.read(key) is None


def test_entries_used_longest_ago_are_removed(
    cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_cache, "MOST_ENTRIES", 3)
    for number in range(4):
        cache.write(cache.key(str(number)), b"code")
        os.utime(tmp_path / "oocdl" / "loops" / cache.key(str(number)), (number, number))
        assert cache.read(cache.key("0")) == b"code"  # used just now
    kept = [number for number in range(4) if cache.read(cache.key(str(number))) is not None]
    assert len(kept) == 2 and 0 in kept


def test_a_folder_that_cannot_be_written_is_told_once(cache: CodeCache, tmp_path: Path) -> None:
    (tmp_path / "oocdl").write_text("a file")
    with pytest.warns(UserWarning, match="compiled loops cannot be kept in .*loops: "):
        cache.write(cache.key("a loop"), b"code")
    cache.write(cache.key("a loop"), b"code")
    assert cache.read(cache.key("a loop")) is None
