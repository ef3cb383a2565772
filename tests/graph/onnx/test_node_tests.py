"""ONNX's own node tests, of every operator that can be read: each gives ONNX's result, or is refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from oocdl.graph.onnx.reader import lowerings
from oocdl.ops.registry import RULES
from tests.kit.onnx_node_tests import by_operator, outcome

PASSED_AT_LEAST = 420
"""It only grows."""
OTHERWISE = {
    "test_cast*BFLOAT16*": "floating-point numbers are in the run's precision, whatever the file casts to",
    "test_cast*FLOAT8E5M2": "the same",
    "*_bfloat16": "the same",
    "test_resize_downsample_scales_linear_align_corners": "its corners follow sizes, as in PyTorch",
}
"""Tests whose result is another, and why."""
_passed: list[str] = []


@pytest.mark.parametrize("op", sorted(lowerings(RULES)))
def test_results_are_onnxs_or_the_node_is_refused(op: str, tmp_path: Path) -> None:
    for case in by_operator().get(op, []):
        if any(fnmatchcase(case.name, pattern) for pattern in OTHERWISE):
            continue
        reason, results = outcome(case, tmp_path)
        for found, wanted in results:
            assert found.shape == wanted.shape, case.name
            numbers = [np.asarray(array, np.float64) for array in (found, wanted)]
            np.testing.assert_allclose(*numbers, case.rtol, max(case.atol, 1e-6), err_msg=case.name)
        if not reason:
            _passed.append(case.name)


def test_most_are_passed(request: pytest.FixtureRequest) -> None:
    if len(request.session.items) < len(lowerings(RULES)):
        pytest.skip("counts what the tests before it have found")
    assert len(_passed) >= PASSED_AT_LEAST
