"""The torch engine on a device with memory of its own: ``engine="torch:cuda"``.

A run copies its inputs to the device, calls one kernel after another there, and copies the results
back, all on one stream. There are two streams, so that one program can compute while the
arrays of another travel. With "torch:cpu" the same code runs on the processor, without streams.

Runs give equal bits: no kernel here adds by atomics, and PyTorch is told to refuse those that do.
Pooling is made of maxima and sums of slices; resampling of products and gathers; the gradient of a
table goes through ``index_add_``, which has an order where determinism is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine import Engine, Run
from oocdl.engines.torch.torch_engine import Step, use_one_thread
from oocdl.engines.torch.torch_kernels import KERNELS
from oocdl.engines.torch.transfer import PIECE_BYTES, PIECES_PER_STREAM, Stream
from oocdl.errors import InputError, ResourceError
from oocdl.fusion.executor import crop
from oocdl.graph.ir.array_layout import array_bytes
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import endings
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch, program_scratch_bytes
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS

STREAMS = 2
"""Runs at once: while one computes, the arrays of the other travel."""
LIBRARY_BYTES = 512 << 20
"""Bytes of scratch of cuDNN and cuBLAS on the device, which cannot be known beforehand."""

_PLACES = (
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    *((torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
"""Owner and name of each of PyTorch's global settings but the first of ``Settings``."""
Settings = tuple[int | bool, ...]
EXACT: Settings = (2, False, True, False, False, False, False)
"""Settings for exact and equal results. The first, 2: PyTorch raises where a kernel's bits may differ from
run to run. The others are in the order of ``_PLACES``."""


def _settings() -> Settings:
    """Return PyTorch's global settings as they are now."""
    return (torch.get_deterministic_debug_mode(), *(getattr(*place) for place in _PLACES))


def _set(settings: Settings) -> None:
    """Set PyTorch's global settings."""
    torch.set_deterministic_debug_mode(settings[0])
    for place, value in zip(_PLACES, settings[1:], strict=True):
        setattr(*place, value)


class _Exactly:
    """A context in which PyTorch's global settings are ``EXACT``, while any run is inside.

    The settings are those of the process: the user's own are restored when the last run ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = EXACT

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
    """Runs programs with PyTorch on a device.

    On the host it takes the pinned memory of its streams, as long as it lives; runs take memory of the
    device.
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
        self._needed: dict[str, int] = {}
        self._streams: SimpleQueue[Stream] = SimpleQueue()
        for _ in range(STREAMS):
            self._streams.put(Stream(self._device))
        self._load_libraries()

    @property
    def model(self) -> str:
        """See ``Device.model``."""
        return torch.cuda.get_device_name(self._device)

    def free_bytes(self) -> int:
        """See ``Device.free_bytes``."""
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + idle

    def needed_bytes(self, program: Program, rules: Rules) -> int:
        """See ``Device.needed_bytes``."""
        return STREAMS * self._run_bytes(program, rules) + LIBRARY_BYTES

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """See ``Engine.scratch_of``: nothing where a device with memory of its own does all of the work."""
        on_host = self._is_host or any(KERNELS[item.op].on_host for item in program.instructions)
        return ProgramScratch(self._run_bytes(program, rules) if on_host else 0)

    def _run_bytes(self, program: Program, rules: Rules) -> int:
        """Bytes of the device that one run takes: inputs, results, and scratch."""
        if program.key not in self._needed:
            program = without_group_axes(program)
            dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
            inputs = sum(map(array_bytes, program.input_shapes, program.input_dtypes))
            extra = 0
            for item in program.instructions:
                dtypes |= dict(zip(item.outputs, item.dtypes, strict=True))
                if beside := KERNELS[item.op].device_scratch:
                    extra = max(extra, beside(item, dtypes[item.operands[0].slot], self._is_host))
            # A part of a result is copied once more if it is seen as another shape.
            parts = (array_bytes(item.shape, dtypes[item.slot]) for item in program.outputs)
            scratch = program_scratch_bytes(program, rules) + max(extra, max(parts, default=0))
            self._needed[program.key] = inputs + scratch
        return self._needed[program.key]

    def forget(self) -> None:
        """See ``Engine.forget``."""
        super().forget()
        if not self._is_host:
            torch.cuda.empty_cache()

    def _make(self, program: Program) -> Run:
        steps = [Step(item, (), on_device=True) for item in program.instructions]
        dying = endings(program)

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            use_one_thread()
            with self._stream() as stream:
                slots = dict(zip(program.inputs, map(stream.to_device, arrays), strict=True))
                for step, ending in zip(steps, dying, strict=True):
                    step.run(slots, {})
                    for slot in ending:
                        del slots[slot]
                for item, out in zip(program.outputs, outs, strict=True):
                    stream.to_host(crop(slots[item.slot], item.crop).reshape(item.shape), out)

        return run

    @contextmanager
    def _stream(self) -> Iterator[Stream]:
        """A stream for one run; when it ends all results are in their arrays."""
        stream = self._streams.get()
        try:
            with torch.inference_mode(), _exactly, torch.cuda.stream(stream.cuda_stream):
                yield stream
                stream.finish()
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


def _found(name: str) -> torch.device:
    """The device of that name. Raises InputError if PyTorch sees none."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        built = "" if torch.version.cuda else ", and is built without CUDA"
        raise InputError(
            f"there is no device for engine 'torch:{name}': PyTorch {torch.__version__} sees {count} of its "
            f"kind{built}; use engine='torch', or install a PyTorch for the device"
        )
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
