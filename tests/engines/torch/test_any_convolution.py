"""Convolutions of any shape are right in float32 and in bfloat16, whatever oneDNN makes of them.

``OOCDL_SEEDS=1000:9000`` tries those seeds instead of the first few. ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``
or ``AVX2`` has oneDNN take the kernels of another processor.
"""

from __future__ import annotations

import os

import pytest

from oocdl.engines.engine import get_engine
from oocdl.ops import RULES
from tests.kit.each import for_each
from tests.kit.random_convolutions import FOUND, Convolution, check, drawn, runs
from tests.kit.torch_heap import peak_bytes

FIRST, LAST = map(int, os.environ.get("OOCDL_SEEDS", "0:60").split(":"))
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}
LEAST_BYTES = 2 << 20
"""Heap that no plan is short of."""


@pytest.fixture(params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> str:
    """Each that oneDNN convolves in."""
    if request.param == "bfloat16" and not get_engine("torch").has_bfloat16:
        pytest.skip("this processor does not multiply in bfloat16")
    return str(request.param)


@pytest.mark.parametrize("engine", ["torch", "torch:cpu"])
@pytest.mark.parametrize("case", FOUND, ids=lambda case: f"{case.channels}-{case.space}-{case.window}")
def test_what_was_wrong_once(case: Convolution, engine: str, dtype: str) -> None:
    for run in runs(case, dtype):
        check(run, TOLERANCES[dtype], engine)


@for_each(FOUND)
def test_what_is_done_instead_is_counted(case: Convolution) -> None:
    engine = get_engine("torch")
    for dtype in [dtype for dtype in TOLERANCES if dtype == "float32" or engine.has_bfloat16]:
        for run in runs(case, dtype):
            said, taken = engine.scratch_of(run.program, RULES).scratch_bytes, peak_bytes(run.program)
            assert taken <= max(said, LEAST_BYTES), (run.program.instructions[0].op, dtype, said, taken)


@pytest.mark.parametrize("first", range(FIRST, LAST, 20))
def test_random_convolutions(first: int, dtype: str) -> None:
    @for_each(range(first, min(first + 20, LAST)))
    def are_right(seed: int) -> None:
        for run in runs(drawn(seed), dtype):
            check(run, TOLERANCES[dtype])

    are_right()
