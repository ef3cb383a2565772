"""Sessions of onnxruntime that read and write NumPy arrays in place.

Sessions use one thread and no arena: worker threads run beside each other, and an
arena would keep its peak for ever (`docs/explanation/kernel-measurements.md`, sections 5 and 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import aligned

REFUSALS = (state.Fail, state.InvalidGraph, state.NotImplemented)
"""Errors that onnxruntime raises for a model that it cannot run."""
FAILURES = (RuntimeError, state.Fail, state.InvalidArgument, state.RuntimeException)
"""Errors that onnxruntime raises for numbers that a kernel cannot take, such as an index out of range."""


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Errors are raised; printed as well, they would be noise.
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class Session:
    """A model that reads arrays and writes into arrays, by position. Threads may share it."""

    def __init__(self, model: bytes, inputs: Sequence[str], outputs: Sequence[str], threads: int = 1) -> None:
        # Constants are small as emitted; folded, a tensor of zeros would stay in memory.
        self._session = ort.InferenceSession(
            model,
            _options(threads),
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
        # An input that no output depends on is not one of the session's.
        known = {item.name for item in self._session.get_inputs()}
        self._inputs = [(index, name) for index, name in enumerate(inputs) if name in known]
        self._outputs = list(outputs)

    def run(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """``results`` are C-contiguous; ``arrays`` are copied if they are not."""
        binding = self._session.io_binding()
        held = []
        for index, name in self._inputs:
            array = aligned(np.asarray(arrays[index], order="C"))
            held.append(array)
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, result in zip(self._outputs, results, strict=True):
            binding.bind_output(name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
        self._session.run_with_iobinding(binding)
