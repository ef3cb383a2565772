"""The gate to the engines: one protocol, and the choice of a runtime by name.

A runtime is heavy: it is imported when it is chosen, and not by this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine_registry import ENGINES
from oocdl.errors import InputError
from oocdl.graph.ir.array_layout import DeviceArray
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import check_known, empty_outputs
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch

Arrays = Sequence[Array]
Rooms = Mapping[int, Array]
Run = Callable[[Arrays, Arrays, Rooms], None]
"""A run of a program: ``Compiled`` with all that may be left out there, and the results in ``outs``."""


class Compiled:
    """A compiled program, which can be run by several threads at once."""

    def __init__(self, program: Program, run: Run) -> None:
        self._program, self._run = program, run

    def __call__(self, arrays: Arrays, outs: Arrays | None = None, rooms: Rooms | None = None) -> list[Array]:
        """Run the program on arrays of ``Program.inputs``; returns arrays of ``Program.outputs``, in order.

        ``outs`` are arrays of the outputs' shapes and dtypes to put them into, without gaps, in
        memory as ``Program.output_orders`` has it; None: new ones. ``arrays`` may lie in any way,
        and are best as ``Program.orders`` has it. ``rooms`` are arrays, by number of an input that the
        program writes over and with the input's shape, dtype and order: it writes there instead, and the
        input may be read-only.
        """
        outs = empty_outputs(self._program) if outs is None else outs
        self._run([np.asarray(array) for array in arrays], outs, rooms or {})
        return list(outs)


@dataclass(frozen=True)
class Part:
    """A box of an input of a program, and where its elements come from."""

    source: Any
    """An array of the host, or what ``DeviceArray.hold`` has returned."""
    box: tuple[slice, ...] = ()
    """The elements of the source, as slices; all of them by default."""
    place: tuple[slice, ...] = ()
    """Where they go in the input; by default they are all of it."""


class Device(Protocol):
    """A processor with memory of its own, such as a GPU. Results stay there until the host wants them."""

    @property
    def model(self) -> str:
        """The name that its maker gives the device."""

    def free_bytes(self) -> int:
        """Bytes of the device's memory that runs of this process could have, were nothing kept there."""

    def needed_bytes(self, program: Program, rules: Rules) -> int:
        """Upper bound of the bytes of the device that runs of a program take, as many at once as the engine
        does."""

    def keep(self, array: Array) -> DeviceArray:
        """Copy an array of the host, which must not change any more, to the device to stay there."""

    def run(
        self, program: Program, rules: Rules, inputs: Sequence[Sequence[Part]], outs: Sequence[Array]
    ) -> Sequence[DeviceArray]:
        """Begin to run a program on inputs that are each put together of parts; returns its results.

        ``outs`` are arrays of the host with the results' shapes and dtypes: ``DeviceArray.settle`` fills
        them. The host may go on at once. Raises ResourceError if the device has too little memory.
        """

    def combine(
        self, how: str, partial: Sequence[Sequence[Any]], counts: Sequence[int], outs: Sequence[Array]
    ) -> Sequence[DeviceArray]:
        """Begin to combine partial results (``combine``), each of ``counts`` elements.

        Arrays are of the host, or what ``DeviceArray.hold`` has returned; ``outs`` as for ``run``.
        """


class Engine(ABC):
    """A runtime that runs programs. One instance serves every thread of a process."""

    name: str
    operators: frozenset[str]
    """Operators with a kernel; ``compile`` raises UnsupportedError that names any other."""
    device: Device | None = None
    """The device that programs run on; None: they run in the memory of the host."""
    held_bytes: int = 0
    """Bytes of the host's memory that the engine holds from beginning to end, and no run counts."""
    runs_together: bool = False
    """Whether several threads can run a program together (``Program.threads``)."""
    has_bfloat16: bool = False
    """Whether matrix products and convolutions of bfloat16 run here."""
    thin_slab_elements: int = 0
    """Channels x depth x height of the thickest slab of a volume that has rates of its own for the gradient
    of a convolution's weights, because it is faster or slower than others; 0: there are none."""

    def __init__(self) -> None:
        self._known: dict[str, Compiled] = {}
        self._making: dict[str, threading.Lock] = {}
        self._scratch: dict[str, ProgramScratch] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """Upper bound of the bytes that a run takes beside its inputs and the arrays its results go to,
        and which inputs it writes over."""

    def compile(self, program: Program) -> Compiled:
        """Compile a program to a function that several threads may call at once.

        The function writes over no input but those that ``scratch_of`` names, and its results share no
        memory with inputs. Programs of equal ``key`` are compiled once.
        """
        key = program.key
        with self._lock:
            if key in self._known:
                return self._known[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            made = self._known.get(key)
            if made is None:
                check_known(program, self.operators, self.name)
                program = without_group_axes(program)
                made = Compiled(program, self._make(program))
        with self._lock:
            self._making.pop(key, None)
            return self._known.setdefault(key, made)

    def forget(self) -> None:
        """Drop all compiled programs, and what is known of others: no run is left that would call them."""
        with self._lock:
            self._known.clear()
            self._scratch = {}  # another one: a plan may be at writing to it

    @abstractmethod
    def _make(self, program: Program) -> Run:
        """Compile a program whose operators are known, without axes of groups."""


_engines: dict[str, Engine] = {}
_lock = threading.Lock()


def installed(name: str) -> bool:
    """Whether the runtime of engine ``name`` is installed; it is not imported."""
    return importlib.util.find_spec(runtime_of(name)) is not None


def runtime_of(name: str) -> str:
    """The package that an engine's name begins with.

    >>> runtime_of("torch:cuda:1"), runtime_of("torch")
    ('torch', 'torch')
    """
    return name.partition(":")[0]


def model_of(name: str) -> str:
    """The model of an engine's device, as its maker names it; "" for engines on the processor."""
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
    runtime, _, device = name.partition(":")
    entry = ENGINES.get(runtime)
    on_device = entry is not None and entry.device_module and re.fullmatch(entry.device_names, device)
    if name not in ENGINES and not on_device:
        examples = (example for one in ENGINES.values() for example in one.device_examples)
        known = ", ".join(["auto", *ENGINES, *examples])
        raise InputError(f"there is no engine '{name}'; choose one of: {known}")
    return name


def get_engine(name: str = "auto") -> Engine:
    """The engine of this process for ``name``; the same instance for the same name.

    Raises InputError that says how to install a runtime that is missing.
    """
    name = resolve(name)
    with _lock:
        if name not in _engines:
            if not installed(name):
                raise InputError(f"engine '{name}' needs {ENGINES[runtime_of(name)].install}")
            runtime, _, device = name.partition(":")
            entry = ENGINES[runtime]
            for variable, value in entry.environment.items():
                os.environ.setdefault(variable, value)
            module = importlib.import_module(entry.device_module if device else entry.module)
            _engines[name] = module.make_engine(*([device] if device else []))
        return _engines[name]


def combine(xp: Any, how: str, total: Sequence[Any], count: int, other: Sequence[Any], elements: int) -> None:
    """Combine partial results into ``total``, in place; ``xp`` is the module that the arrays are of.

    ``moments`` by Chan, Golub and LeVeque (1983), in float64: arrays are mean and
    (biased) variance over ``count`` and ``elements`` elements. ``logsumexp``:
    partial results are themselves log-sum-exps.

    >>> import numpy as np
    >>> total = [np.array([1.0]), np.array([0.0])]
    >>> combine(np, "moments", total, 1, [np.array([4.0]), np.array([0.0])], 2)
    >>> total
    [array([3.]), array([2.])]
    """
    if how == "sum":
        xp.add(total[0], other[0], out=total[0])
    elif how == "max":
        xp.maximum(total[0], other[0], out=total[0])
    elif how == "logsumexp":
        xp.logaddexp(total[0], other[0], out=total[0])
    else:
        mean, var = (xp.asarray(array, dtype=xp.float64) for array in total)
        delta = other[0] - mean
        share = elements / (count + elements)
        total[0][...] = mean + delta * share
        total[1][...] = var * (1 - share) + other[1] * share + delta * delta * share * (1 - share)
