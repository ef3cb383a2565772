"""Survivors of a rung are the best of it; of equal ones those with lower numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oocdl.tuning.halving import Result, survivors

METRICS = st.lists(
    st.none() | st.sampled_from([0.0, 0.5, 0.5, 1.0]) | st.floats(-1e3, 1e3), min_size=1, max_size=30
)


@given(METRICS, st.integers(2, 5), st.sampled_from(["min", "max"]))
def test_survivors_are_the_best(metrics: list[float | None], eta: int, mode: str) -> None:
    results = {n: Result(n, 0, 1, metric) for n, metric in enumerate(metrics)}
    entered = list(results)
    found = survivors(entered, results, eta, mode)
    good = [n for n in entered if metrics[n] is not None]
    assert len(found) == min(max(1, len(entered) // eta), len(good))
    assert found == sorted(set(found)) and set(found) <= set(good)
    sign = 1 if mode == "min" else -1
    for kept in found:
        for left in set(good) - set(found):
            first, other = metrics[kept], metrics[left]
            assert first is not None and other is not None
            assert sign * first < sign * other or (first == other and kept < left)
    # However results came in.
    assert survivors(entered, dict(reversed(results.items())), eta, mode) == found
