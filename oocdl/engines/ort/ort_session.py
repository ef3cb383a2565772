"""Operators of onnxruntime on NumPy arrays, in place.

There is one session for each operator, its attributes, and the ranks and dtypes of its arrays. Sessions use
one thread and no arena: worker threads run beside each other, and an arena would keep its peak for ever
(`docs/explanation/kernel-measurements.md`, sections 5 and 7).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import helper

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import aligned


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let imports in this block take a module that is not loaded yet for one that is not installed."""
    is_loaded = sys.modules.setdefault(module, None) is not None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if not is_loaded:
            del sys.modules[module]


# onnxruntime-training loads PyTorch and SymPy with its tools for training: 2 s, and 180 MiB of each process.
with _hidden("onnxruntime.training"):
    import onnxruntime as ort  # type: ignore[import-untyped]
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

REFUSALS = (state.Fail, state.InvalidGraph, state.NotImplemented)
"""Errors that onnxruntime raises for an operator that it cannot run."""
OPSET = 18
IR_VERSION = 8
MOST_SESSIONS = 256
"""Sessions that are kept."""
Kind = tuple[str, int]
"""dtype (a letter of NumPy's) and rank of an array, which may have any extents."""
Attrs = tuple[tuple[str, Any], ...]


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


@lru_cache(MOST_SESSIONS)
def _session(
    op: str, domain: str, given: tuple[Kind | None, ...], made: tuple[Kind, ...], attrs: Attrs
) -> tuple[Any, list[str], list[str]]:
    """Return a session of one operator, and the names of its inputs and outputs; "" is left out."""

    def infos(letter: str, kinds: Sequence[Kind | None]) -> list[Any]:
        known = [(f"{letter}{number}", *kind) for number, kind in enumerate(kinds) if kind is not None]
        types = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for _, dtype, _ in known]
        shapes = [[f"{name}_{axis}" for axis in range(rank)] for name, _, rank in known]
        return [*map(helper.make_tensor_value_info, [name for name, _, _ in known], types, shapes)]

    inputs = ["" if kind is None else f"x{number}" for number, kind in enumerate(given)]
    outputs = [f"y{number}" for number in range(len(made))]
    node = helper.make_node(op, inputs, outputs, domain=domain, **dict(attrs))
    graph = helper.make_graph([node], op, infos("x", given), infos("y", made))
    opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    options, providers = _options(), ["CPUExecutionProvider"]
    return ort.InferenceSession(model.SerializeToString(), options, providers), inputs, outputs


def run(
    op: str, arrays: Sequence[Array | None], results: Sequence[Array], domain: str = "", **attrs: Any
) -> None:
    """Run an operator, whose attributes are hashable; an array of None is left out.

    ``arrays`` with gaps are copied, and ``results`` that have some are made elsewhere.
    """
    # Lists, not generators: this is called thousands of times a step, and Python is held meanwhile.
    given = [None if array is None else aligned(np.asarray(array, order="C")) for array in arrays]
    made = [out if out.flags.c_contiguous else np.empty(out.shape, out.dtype) for out in results]
    kinds = tuple([None if array is None else (array.dtype.char, array.ndim) for array in given])
    outs = tuple([(out.dtype.char, out.ndim) for out in made])
    session, inputs, outputs = _session(op, domain, kinds, outs, tuple(attrs.items()))
    binding = session.io_binding()
    for name, array in zip(inputs, given, strict=True):
        if array is not None:
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, out in zip(outputs, made, strict=True):
        binding.bind_output(name, "cpu", 0, out.dtype, out.shape, out.ctypes.data)
    session.run_with_iobinding(binding)
    for out, result in zip(made, results, strict=True):
        if out is not result:
            result[...] = out


def forget_sessions() -> None:
    """Drop all sessions."""
    _session.cache_clear()
