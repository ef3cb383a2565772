"""The onnxruntime engine: a program becomes a small model of standard operators, a session.

Sessions use one thread and no arena: worker threads run beside each other, and an
arena would keep its peak for ever (research/kernels.md, sections C and D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]

from oocdl.engines.engine import Cache, Compiled
from oocdl.engines.onnx_emit import model_of
from oocdl.engines.onnx_table import LOWERINGS
from oocdl.engines.operands import aligned, check_known
from oocdl.errors import UnsupportedError
from oocdl.graph.cost import program_work_bytes, sorted_bytes
from oocdl.graph.ir import Array
from oocdl.graph.memory import as_numbered, as_stored
from oocdl.graph.program import Program
from oocdl.graph.rule import Rules

_SCATTERS = frozenset({"GatherGrad", "MaxPoolGrad"})
"""Operators that add in an order that would depend on the threads."""


def _check_dtypes(program: Program) -> None:
    dtypes = {dtype for item in program.instructions for dtype in item.dtypes}
    if "bfloat16" in dtypes | set(program.input_dtypes):
        raise UnsupportedError("engine 'onnxruntime' takes no bfloat16 arrays; use engine='torch'")
    if "float64" in dtypes | set(program.input_dtypes):
        raise UnsupportedError("engine 'onnxruntime' has no float64 kernels; use engine='torch' for float64")


def _session(model: bytes, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Errors are raised; printed as well, they would be noise.
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Constants are small as emitted; folded, a tensor of zeros would stay in memory.
    return ort.InferenceSession(
        model,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["ConstantFolding"],
    )


class OnnxRuntimeEngine:
    """Runs programs with onnxruntime on the CPU."""

    name = "onnxruntime"
    has_bfloat16 = False

    def __init__(self, threads_per_kernel: int = 1) -> None:
        self.threads_per_kernel = threads_per_kernel
        self._cache = Cache()

    def work_bytes(self, program: Program, rules: Rules) -> int:
        """See ``Engine.work_bytes``."""
        return program_work_bytes(program, rules) + sorted_bytes(program)

    def compile(self, program: Program) -> Compiled:
        """See ``Engine.compile``."""
        return self._cache.get(program.key, lambda: self._make(program))

    def _make(self, program: Program) -> Compiled:
        check_known(program, frozenset(LOWERINGS), self.name)
        _check_dtypes(program)
        scatters = any(item.op in _SCATTERS for item in program.instructions)
        model, outputs = model_of(program, LOWERINGS)
        threads = 1 if scatters else self.threads_per_kernel
        session = _session(model.SerializeToString(), threads)
        # An input that no output depends on is not one of the session's.
        known = {item.name for item in session.get_inputs()}
        names = [f"x{index}" for index in range(len(program.inputs))]
        given, made = program.input_orders, program.output_orders
        specs = [(value.name, value.shape, np.dtype(value.dtype)) for value in outputs]

        def call(arrays: Sequence[Array], outs: Sequence[Array] | None = None) -> list[Array]:
            binding = session.io_binding()
            held = [
                aligned(np.asarray(as_stored(array, order), order="C"))
                for array, order in zip(arrays, given, strict=True)
            ]
            for name, array in zip(names, held, strict=True):
                if name in known:
                    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            results = (
                list(outs)
                if outs is not None
                else [
                    as_numbered(np.empty(shape, dtype), order)
                    for (_, shape, dtype), order in zip(specs, made, strict=True)
                ]
            )
            for (name, shape, dtype), result in zip(specs, results, strict=True):
                binding.bind_output(name, "cpu", 0, dtype, shape, result.ctypes.data)
            session.run_with_iobinding(binding)
            return results

        return call


def make_engine(threads_per_kernel: int) -> OnnxRuntimeEngine:
    """For ``get_engine``."""
    return OnnxRuntimeEngine(threads_per_kernel)
