"""Every operator has a whole record with every engine, and loops know it or say why not."""

from __future__ import annotations

import pytest

from oocdl.engines import engine_registry
from oocdl.engines.engine import get_engine
from oocdl.engines.ort import ort_kernels
from oocdl.engines.torch import torch_kernels, torch_pointwise
from oocdl.fusion import loop_ops
from oocdl.ops.registry import RULES

OPERATORS = sorted(op for op, rule in RULES.items() if rule.axes is not None)
"""Those that are left after expansion."""
LOOPS = [loop_ops.FLOATS, loop_ops.COMPARE, loop_ops.LOGIC, {"Cast", "Where"}, loop_ops.NO_LOOP]


@pytest.mark.parametrize("table", [torch_kernels.KERNELS, ort_kernels.KERNELS])
def test_loops_know_every_elementwise_operator_or_say_why_not(table: dict[str, torch_kernels.Kernel]) -> None:
    blocks = {op: kernel.blocks for op, kernel in table.items() if kernel.blocks is not None}
    for op, one in blocks.items():
        assert sum(op in loops for loops in LOOPS) == (one.finish is None), op


def test_loops_know_no_other_operator() -> None:
    known = {op for loops in LOOPS for op in loops}
    assert known <= torch_pointwise.BLOCKWISE.keys()


@pytest.mark.parametrize("name", engine_registry.ENGINES)
def test_engines_have_a_kernel_for_every_operator_or_are_known_to_lack_it(name: str) -> None:
    operators, unsupported = get_engine(name).operators, engine_registry.ENGINES[name].unsupported
    assert not operators & unsupported
    assert operators | unsupported == set(OPERATORS)
