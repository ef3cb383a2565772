"""Sessions of onnxruntime that read and write NumPy arrays in place.

Sessions use one thread and no arena: worker threads run beside each other, and an
arena would keep its peak for ever (`docs/explanation/kernel-measurements.md`, sections 5 and 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped]
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import aligned

REFUSALS = (state.Fail, state.InvalidGraph, state.NotImplemented)
"""Errors that onnxruntime raises for a model that it cannot run."""
FAILURES = (RuntimeError, state.Fail, state.InvalidArgument, state.RuntimeException)
"""Errors that onnxruntime raises for numbers that a kernel cannot take, such as an index out of range."""
OPSET = 18
IR_VERSION = 8


def _options() -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Errors are raised; printed as well, they would be noise.
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def model_of(graph: onnx.GraphProto, *domains: str) -> onnx.ModelProto:
    """Return a graph as a model; ``domains`` are those of its operators beside the standard one."""
    opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


class Session:
    """A model that reads arrays and writes into arrays, by position. Threads may share it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        # Constants are small as emitted; folded, a tensor of zeros would stay in memory.
        self._session = ort.InferenceSession(
            model.SerializeToString(),
            _options(),
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
        # An input that no output depends on is not one of the session's.
        known = {item.name for item in self._session.get_inputs()}
        self._inputs = [(index, one.name) for index, one in enumerate(model.graph.input) if one.name in known]
        self._outputs = [one.name for one in model.graph.output]

    def run(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """``results`` are C-contiguous; ``arrays`` are copied if they are not."""
        binding = self._session.io_binding()
        held = []
        for index, name in self._inputs:
            array = aligned(np.asarray(arrays[index], order="C"))
            held.append(array)
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, result in zip(self._outputs, results, strict=True):
            assert result.flags.c_contiguous, "onnxruntime would write over the gaps of a result"
            binding.bind_output(name, "cpu", 0, result.dtype, result.shape, result.ctypes.data)
        self._session.run_with_iobinding(binding)


def session_of(kind: str, inputs: Sequence[str], rank: int, domain: str = "", **attrs: Any) -> Session:
    """Return a session of one operator on float32 arrays of ``rank`` and any extents.

    An input named "" is left out.
    """
    node = helper.make_node(kind, inputs, ["y"], domain=domain, **attrs)
    infos = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [f"{name}{axis}" for axis in range(rank)])
        for name in (*filter(None, inputs), "y")
    ]
    graph = helper.make_graph([node], kind, infos[:-1], infos[-1:])
    return Session(model_of(graph, *([domain] if domain else [])))
