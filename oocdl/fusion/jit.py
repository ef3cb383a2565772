"""Compiles loops to machine code for this processor, by LLVM."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import llvmlite.binding as llvm

from oocdl.host.limits import code_digest
from oocdl.host.user_cache import UserCache

Code = Callable[[int], None]
"""A compiled loop, called with the address of its arguments."""

KEPT = UserCache("loops", most_entries=2048)
"""Machine code, of some 4 KiB a loop."""


class Source(Protocol):
    """The description of a loop: everything that its machine code depends on."""

    def write(self, name: str) -> str:
        """Return the text of an LLVM module whose one function is called ``name``: it takes a pointer to the
        loop's arguments."""

    def __hash__(self) -> int: ...


_lock = threading.Lock()
_made: dict[Source, Code] = {}


@cache
class _Linker:
    """Compiles loops, and owns the memory of their code; nothing else that LLVM allocates is kept."""

    def __init__(self) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.machine = _machine()
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
        host = (llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
        self.salt = repr((code_digest(), llvm.llvm_version_info, host))
        """What machine code depends on beside its source."""

    def make(self, loop: Source) -> Code:
        text = loop.write("loop")
        key = hashlib.sha256(f"{self.salt}{text}".encode()).hexdigest()
        name = f"loop_{key}"
        code = KEPT.read(key)
        if code is None:
            code = self.compile(text.replace("@loop(", f"@{name}("), name)
            KEPT.write(key, code)
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.linked(code, name))

    def linked(self, code: bytes, name: str) -> int:
        """Return the address of a function of machine code."""
        self.engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        address: int = self.engine.get_function_address(name)
        return address

    def compile(self, text: str, name: str) -> bytes:
        module = llvm.parse_assembly(text)
        module.verify()
        builder = llvm.create_pass_builder(self.machine, llvm.create_pipeline_tuning_options(speed_level=2))
        # Variables become registers, equal values one. LLVM's whole pipeline makes the loops no faster, and
        # keeps 0.2 MiB for each.
        passes = llvm.create_new_function_pass_manager()
        passes.add_sroa_pass()
        passes.add_new_gvn_pass()
        passes.add_instruction_combine_pass()
        passes.run(module.get_function(name), builder)
        code: bytes = self.machine.emit_object(module)
        return code


def _machine() -> Any:
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)


@cache
def has_feature(name: str) -> bool:
    """Whether this processor has a feature, by LLVM's name of it.

    >>> has_feature("no such feature")
    False
    """
    return bool(llvm.get_host_cpu_features().get(name))


def compiled(loop: Source) -> Code:
    """Return the code of a loop, which is compiled once."""
    with _lock:
        if loop not in _made:
            _made[loop] = _Linker().make(loop)
        return _made[loop]


@cache
def address_of(text: str, name: str) -> int:
    """Return the address of a function of an LLVM module, which is compiled once and stays."""
    with _lock:
        return _Linker().linked(_Linker().compile(text, name), name)
