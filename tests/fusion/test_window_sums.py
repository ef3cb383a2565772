"""The compiled gradient of convolutions' weights beside sums over all places, in random shapes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oocdl.engines.torch.conv import compiled_gradient
from oocdl.fusion.window_sums import Taps, add_window_sums, loop_for
from oocdl.graph.ir.graph import Array, Shape
from tests.kit.kernels import counting
from tests.kit.programs import Pads
from tests.kit.random_convolutions import Convolution, check, runs

TAPS = st.builds(Taps, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(-1, 2))


def sums(x: Array, dy: Array, window: list[Taps], depthwise: bool) -> Array:
    """The gradient of all weights, tap by tap and place by place."""
    weights = (x.shape[4],) if depthwise else (x.shape[4], dy.shape[4])
    total = np.zeros((*(taps.count for taps in window), *weights))
    for tap, place in product(np.ndindex(*total.shape[:3]), np.ndindex(*dy.shape[1:4])):
        at = tuple(taps.element(t, p) for taps, t, p in zip(window, tap, place, strict=True))
        if all(0 <= index < extent for index, extent in zip(at, x.shape[1:4], strict=True)):
            seen, grads = x[:, *at].astype(float), dy[:, *place].astype(float)
            total[tap] += (seen * grads).sum(0) if depthwise else seen.T @ grads
    return total


@given(
    extents=st.tuples(*[st.integers(1, 5)] * 3),
    places=st.tuples(*[st.integers(1, 5)] * 3),
    window=st.tuples(TAPS, TAPS, TAPS),
    channels=st.tuples(st.integers(1, 9), st.sampled_from([2, 4, 8, 12, 16, 24, 64])),
    lanes=st.sampled_from([4, 8, 16]),
    depthwise=st.booleans(),
    samples=st.integers(1, 2),
)
def test_sums_are_those_over_all_places(
    extents: Shape, places: Shape, window: Any, channels: Shape, lanes: int, depthwise: bool, samples: int
) -> None:
    inputs, outputs = channels
    loop = loop_for(inputs, outputs, depthwise, lanes)
    if outputs % (lanes // 2):
        assert loop is None
        return
    assert loop is not None
    random, inputs = np.random.default_rng(0), outputs if depthwise else inputs
    # Both are parts of arrays of more channels, as those of what was concatenated.
    sizes = [(samples, *extents, inputs + 3), (samples, *places, outputs + 3)]
    x, dy = (random.standard_normal(size, np.float32)[..., 1:-2] for size in sizes)
    wanted = sums(x, dy, [*window], depthwise)
    found = np.ones(wanted.shape, np.float32)
    add_window_sums(loop, x, dy, found, window)
    np.testing.assert_allclose(found - 1.0, wanted, rtol=0, atol=2e-5 * (1 + np.abs(wanted).max()))


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize(
    ("space", "pads"),
    [((9, 70), ((2, 1), (0, 2))), ((3, 8, 9), ((1, 1), (1, 0), (2, 2))), ((1, 5, 5), ((2, 2),) * 3)],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_engine_takes_it_where_onednn_is_slow(
    groups: int, space: tuple[int, ...], pads: Pads, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_gradient.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    calls, ones = counting(monkeypatch, compiled_gradient, "weight_gradient"), (1,) * len(space)
    window, strides = (5,) * len(space), (stride,) * len(space)
    case = Convolution((16, 16), space, window, pads, strides, ones, 2, groups)
    check(runs(case, "float32")[2])
    assert len(calls) == 1
