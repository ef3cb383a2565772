"""What is computed before the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oocdl.graph.onnx.folding.constant_folding import fold
from oocdl.graph.onnx.model_file import OnnxNode


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("op", "function"), [("Max", np.max), ("Min", np.min)])
def test_extremes_of_any_number_of_operands(op: str, function: Callable[..., Any], count: int) -> None:
    arrays = [np.random.default_rng(number).integers(0, 9, 4) for number in range(count)]
    names = tuple(f"x{number}" for number in range(count))
    (found,) = fold(OnnxNode("n", op, names, ("y",), {}), arrays)
    np.testing.assert_array_equal(found, function(arrays, axis=0))
