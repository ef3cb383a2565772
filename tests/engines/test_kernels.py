"""Every operator has a record with every engine, and loops know it or say why not."""

from __future__ import annotations

import pytest

from oocdl.engines import engine_registry
from oocdl.engines.engine import get_engine
from oocdl.engines.ort import ort_kernels
from oocdl.engines.torch import torch_pointwise
from oocdl.fusion import functions, loop_axes, loop_ops
from oocdl.ops.pointwise import POINTWISE
from oocdl.ops.registry import RULES

OPERATORS = {op for op, rule in RULES.items() if rule.axes is not None}
LOOPS = {*loop_ops.FLOATS, *loop_ops.COMPARE, *loop_ops.LOGIC, "Cast", "Where"}


def test_loops_know_every_elementwise_operator_but_functions_without_polynomials() -> None:
    elementwise = torch_pointwise.KERNELS.keys() - loop_axes.REDUCTIONS.keys()
    assert LOOPS <= elementwise <= ort_kernels.KERNELS.keys()
    unknown = {row.op for row in POINTWISE if row.flops > 1 and row.op not in functions.FUNCTIONS}
    assert elementwise - LOOPS == unknown


@pytest.mark.parametrize("name", engine_registry.ENGINES)
def test_engines_have_a_kernel_for_every_operator(name: str) -> None:
    """``OPERATORS`` are those that are left after expansion."""
    assert get_engine(name).operators == OPERATORS
