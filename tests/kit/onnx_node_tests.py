"""ONNX's own node tests: models of one node with the inputs and outputs that ONNX's authors give."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from oocdl.errors import OocdlError, UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.registry import RULES
from tests.kit.interpret import evaluate


@cache
def by_operator() -> dict[str, list[Any]]:
    """ONNX operator -> its test cases, without those that write it out as other operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found: dict[str, list[Any]] = {}
        for case in collect_testcases(None):
            nodes = case.model.graph.node
            if len(nodes) == 1 and "_expanded" not in case.name:
                found.setdefault(nodes[0].op_type, []).append(case)
    return found


def _models(model: onnx.ModelProto, given: list[Any]) -> Iterator[onnx.ModelProto]:
    """The model as it is, with all but its first input known before the run, and with all of them known.

    The tests feed what networks have as constants (axes, shapes, tables) as inputs.
    """
    names = [port.name for port in model.graph.input]
    for left in (len(names), 1, 0):
        known = {name: array for name, array in list(zip(names, given, strict=True))[left:]}
        if any(not isinstance(array, np.ndarray) for array in known.values()):
            continue
        other = onnx.ModelProto()
        other.CopyFrom(model)
        other.ir_version = min(other.ir_version, 10)
        for entry in other.opset_import:
            entry.version = max(entry.version, 9)  # And, Or and Not were the same in the oldest
        ports = [port for port in other.graph.input if port.name not in known]
        del other.graph.input[:]
        other.graph.input.extend(ports)
        other.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in known.items())
        yield other


def _array(item: Any) -> Any:
    if isinstance(item, onnx.TensorProto):
        return numpy_helper.to_array(item)
    return np.asarray(item) if isinstance(item, np.generic) else item


def outcome(case: Any, folder: Path) -> tuple[str, list[tuple[Any, Any]]]:
    """Run a test in float32: the reason why it is refused, or "" and (found, wanted) of each output."""
    given, wanted = ([_array(item) for item in side] for side in case.data_sets[0])
    reasons = []
    for model in _models(case.model, given):
        path = folder / "node.onnx"
        path.write_bytes(model.SerializeToString())
        try:
            imported = inspect_onnx(path).bind(RULES, training=False)
        except OocdlError as error:
            reasons.append(_in_short(error))
            continue
        values: dict[str, Any] = {name: item.read() for name, item in imported.weights.items()}
        fed = dict(zip([port.name for port in case.model.graph.input], given, strict=True))
        for name in imported.inputs:
            values[name] = np.asarray(fed[name]).astype(imported.graph.values[name].dtype)
        found = evaluate(imported.graph, values)
        made = [found[value].numpy() for _, value in imported.outputs]
        return "", list(zip(made, wanted, strict=True))
    return reasons[-1] if reasons else "operands that are no tensors", []


def _in_short(error: OocdlError) -> str:
    """Why a model of one node is refused, without what all these messages say."""
    if isinstance(error, UnsupportedError) and error.refusals:
        return error.refusals[0].reason.split(" with ", 1)[-1]
    reason = str(error)
    for pattern, short in (
        (r".*this type is not supported", "an element type that NumPy has not"),
        (r".* is no tensor; .*", "operands that are no tensors"),
        (r".* holds strings; .*", "strings"),
        (r"node '[^']*' \(\w+\):? ", ""),
    ):
        reason = re.sub(rf"^{pattern}", short, reason)
    return reason
