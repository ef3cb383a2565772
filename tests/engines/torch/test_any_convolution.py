"""Convolutions of any shape are right in float32 and in bfloat16, whatever oneDNN makes of them.

``OOCDL_SEEDS=1000:9000`` tries those seeds instead of the first few. ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``
or ``AVX2`` has oneDNN take the kernels of another processor.
"""

from __future__ import annotations

import os

import pytest

from oocdl.engines.engine import get_engine
from tests.kit.each import for_each
from tests.kit.random_convolutions import FOUND, Convolution, drawn, errors

FIRST, LAST = map(int, os.environ.get("OOCDL_SEEDS", "0:60").split(":"))
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}


@pytest.fixture(params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> str:
    """Each that oneDNN convolves in."""
    if request.param == "bfloat16" and not get_engine("torch").has_bfloat16:
        pytest.skip("this processor does not multiply in bfloat16")
    return str(request.param)


def check(case: Convolution, dtype: str) -> None:
    """All three of a convolution."""
    found = errors(case, dtype)
    assert max(found) <= TOLERANCES[dtype], (found, case)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: f"{case.channels}-{case.space}-{case.window}")
def test_what_was_wrong_once(case: Convolution, dtype: str) -> None:
    check(case, dtype)


@pytest.mark.parametrize("first", range(FIRST, LAST, 20))
def test_random_convolutions(first: int, dtype: str) -> None:
    for_each(range(first, min(first + 20, LAST)))(lambda seed: check(drawn(seed), dtype))()
