"""Writes `docs/reference/operators.md` from what the code knows: ``python -m tests.kit.operator_table``."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
from onnx import numpy_helper

from oocdl.engines.numpy.numpy_kernels import KERNELS as NUMPY
from oocdl.engines.ort.ort_kernels import KERNELS as ORT
from oocdl.engines.torch.torch_kernels import KERNELS as TORCH
from oocdl.errors import OocdlError, UnsupportedError
from oocdl.graph.ir.index import AxisRule, Whole
from oocdl.graph.ir.op_rule import OpRule, no_gradient
from oocdl.graph.onnx.reader import inspect_onnx, lowerings, supported
from oocdl.ops._broadcast import no_second_derivative
from oocdl.ops.registry import RULES
from tests.kit.code import ROOT
from tests.kit.interpret import evaluate
from tests.kit.op_cases import CASES


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


PAGE = ROOT / "docs" / "reference" / "operators.md"
ENGINES = {"torch": TORCH, "onnxruntime": ORT, "numpy": NUMPY}
OTHERWISE = {
    "test_cast*BFLOAT16*": "floating-point numbers are in the run's precision, whatever the file casts to",
    "test_cast*FLOAT8E5M2": "floating-point numbers are in the run's precision, whatever the file casts to",
    "*_bfloat16": "floating-point numbers are in the run's precision",
    "test_attention*_bf16": "floating-point numbers are in the run's precision",
    "test_attention_4d_gqa_with_past_and_present_fp16": "floating-point numbers are in the run's precision",
    "test_bernoulli*": "numbers are drawn",
    "test_training_dropout*": "numbers are drawn",
    "test_resize_downsample_scales_*_align_corners": "corners follow sizes, as in ONNX's text and PyTorch",
}
"""ONNX's tests that have another result here, and why."""

HEAD = """# Operators

Written by `python -m tests.kit.operator_table`; the tests compare it with the code.

## What ONNX files may have

Opsets are those in which ONNX changed the operator; all up to the newest are read. Then, of ONNX's own tests
of one node, those whose result is ONNX's, of all there are (those left out that write the operator as
others), and why the rest is not: it is refused before anything runs, in these words, or it has another
result on purpose. Operators in italics are computed only where all that they read is known before the run.

| operator | opsets | ONNX's tests | the rest |
|---|---|---|---|
{onnx}

## What layers consist of

Axes are letters; an operand's axis in brackets is read beyond the piece (a window, a band), `*` is read
whole. Letters of results may be cut, each freely; letters that are summed over may be cut where it says so.
Composites are rewritten into others after gradients and before cuts.

| operator | axes of an example | cut and combined | not cut | gradient | engines |
|---|---|---|---|---|---|
{own}
"""


FEW_DIGITS = r"test_(averagepool_2d_ceil_last_window|gridsample)"
"""ONNX's tests whose results are written with four digits."""


def _difference(found: Any, wanted: Any, case: Any) -> None:
    """AssertionError if an output of a test is not ONNX's, but for rounding."""
    assert found.shape == wanted.shape, case.name
    numbers = [np.asarray(array, np.float64) for array in (found, wanted)]
    exact = wanted.dtype in (np.float32, np.float64) and not re.match(FEW_DIGITS, case.name)
    rtol = min(case.rtol, 1e-5) if exact else case.rtol
    np.testing.assert_allclose(*numbers, rtol, max(case.atol, 1e-6), err_msg=case.name)


@cache
def reasons(op: str) -> tuple[str, ...]:
    """For each of ONNX's tests of an operator why its result is not ONNX's, or "" where it is.

    AssertionError if one has another result, and is not in ``OTHERWISE``.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in by_operator().get(op, []):
            on_purpose = [why for name, why in OTHERWISE.items() if fnmatchcase(case.name, name)]
            reason, results = (on_purpose[0], []) if on_purpose else outcome(case, Path(folder))
            for made, wanted in results:
                _difference(made, wanted, case)
            found.append(reason)
    return tuple(found)


def onnx_row(op: str) -> str:
    """The line of an ONNX operator."""
    versions = sorted(
        schema.since_version
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.name == op and schema.domain == ""
    )
    counts = Counter(reasons(op))
    tests = f"{counts.pop('', 0)} / {len(reasons(op))}" if op in by_operator() else ""
    rest = "; ".join(f"{why} ({count})" for why, count in sorted(counts.items()))
    name = f"`{op}`" if op in lowerings(RULES) else f"*`{op}`*"
    return f"| {name} | {', '.join(map(str, versions))} | {tests} | {rest} |"


def total_row() -> str:
    """The last line: of all operators of ONNX, also those that are not here."""
    tried = sum(map(len, by_operator().values()))
    passed = sum(reasons(op).count("") for op in supported(RULES))
    return f"| all | | {passed} / {tried} | |"


def own_row(op: str) -> str:
    """The line of one of our operators."""
    rule = RULES[op]
    gradient = {no_second_derivative: "itself part of one", no_gradient: "none"}.get(rule.gradient, "yes")
    if rule.axes is None:
        return f"| `{op}` | rewritten | | | {gradient} | all |"
    axes = _largest(op, rule)
    engines = ", ".join(name for name, kernels in ENGINES.items() if op in kernels)
    made = {index.letter for side in axes.outputs for index in side if index is not None}
    read = (getattr(index, "letter", None) for side in axes.inputs for index in side)
    reduced = [letter for letter in dict.fromkeys(read) if letter is not None and letter not in made]
    combined = f"{', '.join(reduced)} ({axes.combine})" if reduced and axes.combine else ""
    whole = [letter for letter in axes.extents if letter in axes.uncut]
    if not axes.combine:
        whole += [letter for letter in reduced if letter not in axes.uncut]
    sides = (", ".join(_axes(side) for side in part) for part in (axes.inputs, axes.outputs))
    return f"| `{op}` | {' → '.join(sides)} | {combined} | {', '.join(whole)} | {gradient} | {engines} |"


def _largest(op: str, rule: OpRule) -> AxisRule:
    """The axis rule of the case with most axes."""
    assert rule.axes is not None
    found = []
    for case in CASES:
        if case.op == op:
            build, inputs, outputs = case.node(case.arrays())
            shapes = [tuple(build.shape(name) for name in names) for names in (inputs, outputs)]
            found.append(rule.axes(build.nodes[-1], *shapes))
    return max(found, key=lambda axes: (len(axes.extents), len(axes.inputs)))


def _axes(side: tuple[Any, ...]) -> str:
    return "`" + " ".join(map(_axis, side)) + "`" if side else "`()`"


def _axis(axis: Any) -> str:
    if axis is None:
        return "1"
    if isinstance(axis, Whole):
        return "*"
    return str(axis.letter) if type(axis).__name__ == "Plain" else f"[{axis.letter}]"


def rows(text: str) -> dict[str, str]:
    """Operator -> its line of the first table of a page."""
    first = text.split("## What layers consist of")[0]
    return {found[1]: found[0] for found in re.finditer(r"^\| \*?`([\w.:]+)`\*? .*$", first, re.MULTILINE)}


def page() -> str:
    """The whole page."""
    lines = [*map(onnx_row, sorted(supported(RULES))), total_row()]
    return HEAD.format(onnx="\n".join(lines), own="\n".join(map(own_row, sorted(RULES))))


if __name__ == "__main__":
    PAGE.write_text(page())
