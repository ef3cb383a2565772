"""Functions of loops beside float64: never farther off than the neighbour of the correctly rounded result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.graph import Array
from tests.kit.programs import program, step

SHAPE = (64, 1024)
PATTERNS = 1 << 32
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "Exp": np.exp, "Log": np.log, "Sigmoid": special.expit, "Tanh": np.tanh, "Erf": special.erf,
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
}  # fmt: skip


def number(values: Array) -> Array:
    """The place of each float32 in their order."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def off(op: str, patterns: Array) -> int:
    """How far results are off at most, for float32 of these bit patterns; what is no number stays so."""
    x = patterns.astype(np.uint32).view(np.float32).reshape(SHAPE)
    made = program([x], [step(op, [(0, SHAPE)], 1, SHAPE, alpha=1.0)], [(1, SHAPE)], f"function {op}")
    found = TorchEngine(small_elements=4).compile(made)([x])[0]
    with np.errstate(all="ignore"):
        wanted = FUNCTIONS[op](x.astype(np.float64)).astype(np.float32)
    real = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), ~real)
    return int(np.abs(number(found[real]) - number(wanted[real])).max())


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_result_is_the_right_one_or_its_neighbour(op: str) -> None:
    """Patterns of all exponents and signs, the smallest and the largest numbers, and what is no number."""
    size = SHAPE[0] * SHAPE[1]
    special_ones = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 1e-45, -1e-45, 88.8, -103.9])
    ends = np.concatenate([special_ones.view(np.uint32).astype(np.uint64), [0x007FFFFF, 0x00800000]])
    even = np.arange(size, dtype=np.uint64) * (PATTERNS // size) + np.uint64(12345)
    even[: len(ends)] = ends
    usual = np.random.default_rng(0).standard_normal(size).astype(np.float32).view(np.uint32)
    assert max(off(op, even), off(op, usual)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_result_is_the_right_one_or_its_neighbour_for_every_argument(op: str) -> None:
    size = SHAPE[0] * SHAPE[1]
    worst = (off(op, np.arange(start, start + size, dtype=np.uint64)) for start in range(0, PATTERNS, size))
    assert max(worst) <= 1
