"""The gate to the engines: one protocol, and the choice of a runtime by name.

A runtime is heavy, so it is imported only when it is chosen: importing this
module imports neither PyTorch nor onnxruntime.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from oocdl.engines.registry import ENGINES, DeviceEntry
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch


class Compiled(Protocol):
    """A program that can be run."""

    def __call__(self, arrays: Sequence[Array], outs: Sequence[Array] | None = None) -> list[Array]:
        """Arrays of ``Program.inputs`` in order -> arrays of ``Program.outputs`` in order.

        ``outs`` are arrays of the outputs' shapes and dtypes to put them into, without gaps, in
        memory as ``Program.output_orders`` has it; None: new ones. ``arrays`` may lie in any way,
        and are best as ``Program.orders`` has it.
        """
        ...


class Device(Protocol):
    """What programs run on that has memory of its own."""

    @property
    def model(self) -> str:
        """What its maker calls it."""
        ...

    def free_bytes(self) -> int:
        """Its memory that this process could have."""
        ...

    def needed_bytes(self, program: Program, rules: Rules) -> int:
        """Upper bound of what it must have to run a program, as often at once as the engine does."""
        ...


class Engine(Protocol):
    """Runs programs. One instance serves every thread of a process."""

    name: str
    device: Device | None
    """None: programs run in the memory of the host."""
    held_bytes: int
    """Of the host's memory: what it has from beginning to end, and no run counts."""
    has_bfloat16: bool
    """Whether matrix products and convolutions of bfloat16 run here."""
    operators: frozenset[str]
    """Those that there are kernels for; ``compile`` refuses a program with another, and names it."""
    thin_slab_elements: int
    """Channels x depth x height of the thickest slab of a volume that has rates of its own for the gradient
    of a convolution's weights, because it is faster or slower than others; 0: there are none."""

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """Upper bound of the memory that a run takes beside its inputs and the arrays its results go to,
        and which inputs it writes over."""
        ...

    def compile(self, program: Program) -> Compiled:
        """A function that may be called from several threads at once.

        Of ``arrays`` it only writes over those that ``scratch_of`` names; results share no memory with
        them. Programs of equal ``key`` are compiled once.
        """
        ...

    def forget(self) -> None:
        """Keep no compiled program: no run is left that would call them."""
        ...


_engines: dict[tuple[str, int], Engine] = {}
_lock = threading.Lock()


def installed(name: str) -> bool:
    """Whether the runtime of engine ``name`` is there (without importing it)."""
    return importlib.util.find_spec(runtime_of(name)) is not None


def runtime_of(name: str) -> str:
    """The package that an engine's name begins with.

    >>> runtime_of("torch:cuda:1"), runtime_of("torch")
    ('torch', 'torch')
    """
    return name.partition(":")[0]


def model_of(name: str) -> str:
    """What the maker of an engine's device calls it; "" where there is none but the processor."""
    device = get_engine(name).device if ":" in name else None
    return device.model if device else ""


def resolve(name: str) -> str:
    """The engine that ``name`` stands for: "auto" is torch where it is installed, on the processor.

    A device is for the user to choose: results on it are close to the processor's, not equal.

    >>> resolve("onnxruntime"), resolve("torch:cuda:1")
    ('onnxruntime', 'torch:cuda:1')
    """
    if name == "auto":
        return "torch" if installed("torch") else "onnxruntime"
    if name not in ENGINES and _device_entry(name) is None:
        examples = [example for one in ENGINES.values() if one.devices for example in one.devices.examples]
        known = ", ".join(["auto", *ENGINES, *examples])
        raise InputError(f"there is no engine '{name}'; choose one of: {known}")
    return name


def _device_entry(name: str) -> DeviceEntry | None:
    """What there is for the device that ``name`` asks for; None if it asks for none, or for no device."""
    runtime, _, device = name.partition(":")
    entry = ENGINES[runtime].devices if runtime in ENGINES else None
    return entry if entry is not None and entry.names.fullmatch(device) else None


def get_engine(name: str = "auto", threads_per_kernel: int = 1) -> Engine:
    """The engine of this process for ``name``; the same instance for the same arguments.

    Raises InputError that says how to install a runtime that is missing.
    """
    if threads_per_kernel < 1:
        raise InputError(f"threads_per_kernel is {threads_per_kernel}; it must be at least 1")
    name = resolve(name)
    with _lock:
        key = (name, threads_per_kernel)
        if key not in _engines:
            if not installed(name):
                raise InputError(f"engine '{name}' needs {ENGINES[runtime_of(name)].install}")
            entry, on_device = ENGINES[runtime_of(name)], _device_entry(name)
            for variable, value in entry.environment.items():
                os.environ.setdefault(variable, value)
            module = importlib.import_module(on_device.module if on_device else entry.module)
            given = (name.partition(":")[2], threads_per_kernel) if on_device else (threads_per_kernel,)
            engine: Engine = module.make_engine(*given)
            _engines[key] = engine
        return _engines[key]


class Cache:
    """Compiled programs by key, safe to share between threads."""

    def __init__(self) -> None:
        self._known: dict[str, Compiled] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: str, make: Callable[[], Compiled]) -> Compiled:
        """The function stored under ``key``; made by the first caller, once."""
        with self._lock:
            if key in self._known:
                return self._known[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            made = self._known.get(key) or make()
        with self._lock:
            self._making.pop(key, None)
            return self._known.setdefault(key, made)

    def clear(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._known.clear()
