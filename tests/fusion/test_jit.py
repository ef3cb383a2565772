"""Loops are compiled once on a machine."""

from __future__ import annotations

from pathlib import Path

from tests.kit.commands import python

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


def test_a_machine_compiles_a_loop_once(tmp_path: Path) -> None:
    for how in ("compiled", "kept"):
        told = python("-c", STORES_SEVEN, how, XDG_CACHE_HOME=str(tmp_path))
        assert told.stdout == "7\n", told.stderr
