"""Lookups are left to sessions: loops of NumPy over indices take up to 50 times as long."""

from __future__ import annotations

import pytest

pytest.importorskip("onnxruntime")
from oocdl.engines.ort.lowerings import KERNELS
from tests.kit.kernel_cases import lookups


def test_sums_and_maxima_by_index_are_sessions() -> None:
    cases = [case for case in lookups() if case.op in ("GatherGrad", "LastAt")]
    assert {case.op for case in cases} == {"GatherGrad", "LastAt"}
    for case in cases:
        item = case.program("float32").instructions[0]
        assert KERNELS[item.op].on_arrays(item, {}) is None, case.name
