"""The torch engine on a device with memory of its own: ``engine="torch:cuda"``.

Programs call one kernel after another on one stream, so a thread goes on to the next program while kernels
run. Two more streams copy, so that arrays travel meanwhile. What a unit makes stays on the device for those
that read it (``device_memory``). With "torch:cpu" the same code runs on the processor, without streams.

Runs give equal bits: no kernel here adds by atomics, and PyTorch is told to refuse those that do.
Pooling is made of maxima and sums of slices; resampling of products and gathers; the gradient of a
table goes through ``index_add_``, which has an order where determinism is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine import Engine, Part, Run, combine
from oocdl.engines.torch.device_memory import DeviceMemory
from oocdl.engines.torch.torch_engine import Step
from oocdl.engines.torch.torch_kernels import KERNELS
from oocdl.engines.torch.transfer import PIECE_BYTES, PIECES_PER_STREAM, Stream, cuda_stream
from oocdl.errors import InputError, ResourceError
from oocdl.fusion.chain import crop
from oocdl.graph.ir.array_layout import DeviceArray, array_bytes
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import endings, slot_dtypes
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch, program_scratch_bytes
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS

STREAMS = 2
"""Streams that copy, and runs that are begun at once: while one computes, the arrays of the other travel."""
LIBRARY_BYTES = 512 << 20
"""Bytes of scratch of cuDNN and cuBLAS on the device, which cannot be known beforehand."""

_PLACES = (
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    *((torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
"""Owner and name of each of PyTorch's global settings but the first of ``Settings``."""
T = TypeVar("T")
Launch = Callable[[list[Tensor]], list[Tensor]]
"""Begins a program on tensors of its inputs, which it takes out of their list, and returns its results."""
Settings = tuple[int | bool, ...]
EXACT: Settings = (2, False, True, False, False, False, False)
"""Settings for exact and equal results. The first, 2: PyTorch raises where a kernel's bits may differ from
run to run. The others are in the order of ``_PLACES``."""


def _settings() -> Settings:
    return (torch.get_deterministic_debug_mode(), *(getattr(*place) for place in _PLACES))


def _set(settings: Settings) -> None:
    torch.set_deterministic_debug_mode(settings[0])
    for place, value in zip(_PLACES, settings[1:], strict=True):
        setattr(*place, value)


class _Exactly:
    """A context in which PyTorch's global settings are ``EXACT``, while any run is inside.

    The settings are those of the process: the user's own are restored when the last run ends.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, EXACT

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = _settings()
                _set(EXACT)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _set(self._before)


_exactly = _Exactly()


class TorchDeviceEngine(Engine):
    """Runs programs with PyTorch on a device, and is its ``Device``.

    On the host it takes the pinned memory of its streams, as long as it lives; runs take memory of
    the device.
    """

    held_bytes = STREAMS * PIECES_PER_STREAM * PIECE_BYTES
    operators = frozenset(KERNELS)
    thin_slab_elements = THIN_SLAB_ELEMENTS

    def __init__(self, device: str) -> None:
        super().__init__()
        self.name = f"torch:{device}"
        self._device = _found(device)
        self._is_host = self._device.type == "cpu"
        self.device = None if self._is_host else self
        self.has_bfloat16 = _has_bfloat16(self._device)
        self._needed, self._launches = dict[str, int](), dict[str, Launch]()
        self._computing = cuda_stream(self._device)
        self._streams: SimpleQueue[Stream] = SimpleQueue()
        for _ in range(STREAMS):
            self._streams.put(Stream(self._device, self._computing))
        self._load_libraries()
        self.memory = DeviceMemory(self.free_bytes, self._fetch)

    @property
    def model(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def free_bytes(self) -> int:
        taken, used = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
        free, whole = torch.cuda.mem_get_info(self._device)
        share = _memory_fraction(self._device)
        return max(min(free, int(share * whole) - taken) + taken - used + self.memory.kept_bytes, 0)

    def needed_bytes(self, program: Program, rules: Rules) -> int:
        return STREAMS * self._run_bytes(program, rules) + LIBRARY_BYTES

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """See ``Engine.scratch_of``: nothing where a device with memory of its own does all of the work."""
        on_host = self._is_host or any(KERNELS[item.op].on_host for item in program.instructions)
        return ProgramScratch(self._run_bytes(program, rules) if on_host else 0)

    def _run_bytes(self, program: Program, rules: Rules) -> int:
        """Bytes of the device that one run takes: inputs, results, and scratch."""
        known, key = self._needed, program.key
        if key not in known:
            program, extra = without_group_axes(program), 0
            inputs = sum(map(array_bytes, program.input_shapes, program.input_dtypes))
            dtypes = slot_dtypes(program)
            for item in program.instructions:
                if beside := KERNELS[item.op].device_scratch:
                    extra = max(extra, beside(item, dtypes[item.operands[0].slot], self._is_host))
            # A part of a result is copied once more if it is seen as another shape.
            parts = (array_bytes(item.shape, dtypes[item.slot]) for item in program.outputs)
            known[key] = inputs + program_scratch_bytes(program, rules) + max(extra, max(parts, default=0))
        return known[key]

    def forget(self) -> None:
        super().forget()
        self._needed = {}
        self._launches.clear()
        self.memory.capacity_bytes = None
        torch.cuda.empty_cache()  # does nothing where CUDA was not used

    def keep(self, array: Array) -> DeviceArray:
        nbytes = array.nbytes + LIBRARY_BYTES
        return self._with_room(nbytes, lambda stream: self.memory.add(stream.to_device(array)))

    def run(
        self, program: Program, rules: Rules, inputs: Sequence[Sequence[Part]], outs: Sequence[Array]
    ) -> Sequence[DeviceArray]:
        self.compile(program)
        given = [*zip(inputs, program.input_shapes, program.input_dtypes, strict=True)]

        def begin(stream: Stream) -> list[DeviceArray]:
            tensors = [_joined(stream, parts, shape, getattr(torch, dtype)) for parts, shape, dtype in given]
            made = self._launches[program.key](tensors)
            # A part of a larger array would keep all of it.
            alone = (x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in made)
            return self._kept([x.contiguous() for x in alone], outs)

        return self._with_room(self.needed_bytes(program, rules), begin)

    def combine(
        self, how: str, partial: Sequence[Sequence[Any]], counts: Sequence[int], outs: Sequence[Array]
    ) -> Sequence[DeviceArray]:
        def begin(stream: Stream) -> list[DeviceArray]:
            first, *others = ([_there(stream, array) for array in arrays] for arrays in partial)
            total, count = [tensor.clone() for tensor in first], counts[0]
            for other, elements in zip(others, counts[1:], strict=True):
                combine(torch, how, total, count, other, elements)
                count += elements
            return self._kept(total, outs)

        nbytes = (len(partial) + 1) * sum(out.nbytes for out in outs) + LIBRARY_BYTES
        return self._with_room(nbytes, begin)

    def _with_room(self, nbytes: int, begin: Callable[[Stream], T]) -> T:
        """Call ``begin`` once so much is free; once more, with nothing kept, if that was too little."""
        self.memory.make_room(nbytes)
        try:
            with self._stream() as stream:
                return begin(stream)
        except ResourceError:  # what is free lies in parts that are too small, or others have taken it
            self.memory.make_room()
            torch.cuda.empty_cache()
            with self._stream() as stream:
                return begin(stream)

    def _kept(self, made: Sequence[Tensor], outs: Sequence[Array]) -> list[DeviceArray]:
        """Keep what was just begun to be made for arrays of the host."""
        ready = None if self._computing is None else self._computing.record_event()
        return [self.memory.add(tensor, ready, out) for tensor, out in zip(made, outs, strict=True)]

    def _make(self, program: Program) -> Run:
        self._launches[program.key] = launch = _launch(program)

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            with self._stream() as stream:
                for tensor, out in zip(launch([*map(stream.to_device, arrays)]), outs, strict=True):
                    stream.to_host(tensor, out)
                stream.finish()

        return run

    def _fetch(self, tensor: Tensor, ready: Any, out: Array) -> None:
        with self._stream() as stream:
            stream.to_host(tensor, out, ready)
            stream.finish()

    @contextmanager
    def _stream(self) -> Iterator[Stream]:
        """A stream to copy with, while kernels that are called go to that on which programs run."""
        torch.set_num_threads(1)
        stream = self._streams.get()
        try:
            with torch.inference_mode(), _exactly, torch.cuda.stream(self._computing):
                yield stream
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"the device of engine '{self.name}' has no memory left; free what others use of it, ask for "
                "smaller units (parallel=, or less memory=), or use engine='torch'"
            ) from error
        finally:
            try:
                stream.drop()
            finally:
                self._streams.put(stream)  # also where the device is lost: no thread may wait for it forever

    def _load_libraries(self) -> None:
        """Call libraries that take host memory when first called, so that it counts with the process."""
        with self._stream() as stream:
            x, w = (stream.to_device(np.zeros((4, 4, 4, 4, 4), np.float32)) for _ in range(2))
            y = torch.nn.functional.conv3d(x, w)
            torch.ops.aten.convolution_backward(
                y, x, w, None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1, [True, True, False]
            )
            stream.to_host(x.flatten(1) @ w.flatten(1).t(), np.empty((4, 4), np.float32))
            stream.finish()


def _memory_fraction(device: torch.device) -> float:
    """The share of a device's memory that the user lets PyTorch have, where this version of it tells."""
    told = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(told(device)) if told else 1.0


def _launch(program: Program) -> Launch:
    """Prepare a program to be begun on tensors of its inputs."""
    steps, dying = [Step(item, (), on_device=True) for item in program.instructions], endings(program)

    def launch(tensors: list[Tensor]) -> list[Tensor]:
        slots = dict(zip(program.inputs, tensors, strict=True))
        tensors.clear()
        for step, ending in zip(steps, dying, strict=True):
            step.run(slots, {})
            for slot in ending:
                del slots[slot]
        return [crop(slots[item.slot], item.crop).reshape(item.shape) for item in program.outputs]

    return launch


def _there(stream: Stream, array: Array | Tensor) -> Tensor:
    """An array of the host, or one that is on the device, on the device."""
    if isinstance(array, Tensor):
        return array
    if array.size == 1:  # goes with the call of a kernel, and waits for no copy
        dtype = getattr(torch, array.dtype.name)
        return torch.full(array.shape, array.item(), dtype=dtype, device=stream.device)
    return stream.to_device(array)


def _joined(stream: Stream, parts: Sequence[Part], shape: Shape, dtype: torch.dtype) -> Tensor:
    there = [_there(stream, part.source) for part in parts]
    if len(parts) == 1 and not parts[0].place:
        return there[0]
    made = torch.empty(shape, dtype=dtype, device=stream.device)
    for part, tensor in zip(parts, there, strict=True):
        made[part.place] = tensor[part.box] if part.box else tensor
    return made


def _found(name: str) -> torch.device:
    """The device of that name. Raises InputError if PyTorch sees none."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        built = "" if torch.version.cuda else ", and is built without CUDA"
        sees = f"PyTorch {torch.__version__} sees {count} of its kind{built}"
        way_out = "use engine='torch', or install a PyTorch for the device"
        raise InputError(f"there is no device for engine 'torch:{name}': {sees}; {way_out}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cuda.get_device_capability(device) >= (8, 0)


def make_engine(device: str) -> TorchDeviceEngine:
    """Make the engine of a device for ``get_engine``."""
    if device != "cpu":  # cuBLAS reads it when it is first used: without it sums of products may differ
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return TorchDeviceEngine(device)
