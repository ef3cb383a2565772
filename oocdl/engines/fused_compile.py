"""Loops as machine code for this processor, by LLVM."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from oocdl.engines.fused_loop import Loop, Writer

Code = Callable[[int], None]
"""A loop; takes the address of its arguments."""

_lock = threading.Lock()
_made: dict[Loop, Code] = {}
_kept: list[Any] = []
"""What owns the memory of the code."""


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)


def compiled(loop: Loop) -> Code:
    """The code of a loop; made once."""
    with _lock:
        if loop not in _made:
            _made[loop] = _make(loop)
        return _made[loop]


def _make(loop: Loop) -> Code:
    machine = _machine()
    module = llvm.parse_assembly(Writer(loop).write())
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _kept.append(engine)
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("loop"))
