"""CTC by NumPy in log space, all samples and places at once, frame by frame.

For engines that have no kernel of their own for it. Formulas are in ``oocdl.ops.ctc``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from oocdl.engines.recurrent_steps import Run
from oocdl.graph.ir.graph import Array


class _Lattice(NamedTuple):
    """The inputs of the forward and the backward recursion."""

    chances: Array
    """Logarithms of probabilities [T, N, C]."""
    places: Array
    """Classes of labels with blanks around each [N, P]."""
    frames: Array
    ends: Array
    """Number of places of each sample [N]."""
    wrong: Array
    """Samples with a label that is the blank or no class."""


def _lattice(args: Sequence[Array], attrs: Mapping[str, Any]) -> _Lattice:
    x, labels, counts, frames = args[:4]
    blank, (samples, width) = attrs["blank"], labels.shape
    largest = x.max(2, keepdims=True)
    chances = x - largest
    chances -= np.log(np.exp(chances).sum(2, keepdims=True))
    inside = np.arange(width) < counts[:, None]
    wrong = (inside & ((labels == blank) | (labels < 0) | (labels >= x.shape[2]))).any(1)
    places = np.full((samples, 2 * width + 1), blank)
    places[:, 1::2] = np.where(inside & ~wrong[:, None], labels, blank)
    return _Lattice(chances.swapaxes(0, 1), places, frames, 2 * counts + 1, wrong)


def _sums(*terms: Array) -> Array:
    """Return the logarithm of the sum of exponentials; minus infinity where all are."""
    largest = np.maximum.reduce(terms)
    bound = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        found: Array = np.log(sum(np.exp(term - bound) for term in terms)) + bound
    return found


def _shifted(states: Array, by: int) -> Array:
    found = np.full_like(states, -np.inf)
    found[:, by:] = states[:, : states.shape[1] - by]
    return found


def _forward(given: _Lattice) -> Array:
    """Return a_t(s) [T, N, P]."""
    emitted = np.take_along_axis(given.chances, given.places[None], 2)
    found = np.empty_like(emitted)
    # Where a place can be reached from the one before the last: 0, else minus infinity.
    skips = np.full(given.places.shape, -np.inf, found.dtype)
    skips[:, 3::2][given.places[:, 3::2] != given.places[:, 1:-2:2]] = 0
    reach = np.arange(given.places.shape[1]) < np.minimum(given.ends, 2)[:, None]
    found[0] = np.where(reach, emitted[0], -np.inf)
    for t in range(1, len(found)):
        before = found[t - 1]
        ways = _sums(before, _shifted(before, 1), _shifted(before, 2) + skips)
        found[t] = np.where(np.arange(ways.shape[1]) < given.ends[:, None], ways + emitted[t], -np.inf)
    return found


def _losses(given: _Lattice, sums: Array, attrs: Mapping[str, Any]) -> Array:
    """Return the loss of each sample [N]; ``sums``: a_t(s)."""
    rows, last = np.arange(len(given.frames)), given.frames - 1
    ends = [sums[last, rows, np.maximum(given.ends - back, 0)] for back in (1, 2)]
    # A sample without labels has one place, the blank.
    ends[1] = np.where(given.ends > 1, ends[1], -np.inf)
    found = -_sums(*ends)
    nothing = np.where(given.ends > 1, np.inf, 0)
    found = np.where(given.frames > 0, found, nothing)
    found = np.where(attrs["zero_infinity"] & np.isinf(found), 0, found)
    return np.where(given.wrong, np.nan, found).astype(sums.dtype)


def ctc(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """Ctc."""
    given = _lattice(args, attrs)
    return [_losses(given, _forward(given), attrs)]


def _backward(given: _Lattice) -> Array:
    """Return b_t(s) + log p_t(l_s) [T, N, P]: ``_forward`` of the reversed sequences, turned back."""
    steps, width = len(given.chances), given.places.shape[1]
    times = (given.frames[None] - 1 - np.arange(steps)[:, None]) % steps
    order = (given.ends[:, None] - 1 - np.arange(width)) % width
    chances = np.take_along_axis(given.chances, times[..., None], 0)
    places = np.take_along_axis(given.places, order, 1)
    flipped = given._replace(chances=chances, places=places)
    return np.take_along_axis(np.take_along_axis(_forward(flipped), times[..., None], 0), order[None], 2)


def ctc_grad(args: Sequence[Array], attrs: Mapping[str, Any]) -> list[Array]:
    """CtcGrad."""
    given, dloss = _lattice(args, attrs), args[4]
    sums, others = _forward(given), _backward(given)
    steps, width = sums.shape[0], sums.shape[2]
    losses = _losses(given, sums, {**attrs, "zero_infinity": False})
    emitted = np.take_along_axis(given.chances, given.places[None], 2)
    # What a frame emits is in both sums.
    inside = np.arange(width) < given.ends[:, None]
    share = np.where(inside, np.exp(sums + others - emitted + losses[None, :, None]), 0)
    grads = np.exp(given.chances)
    rows = np.arange(len(dloss))[None, :, None]
    np.subtract.at(grads, (np.arange(steps)[:, None, None], rows, given.places[None]), share)
    late = np.arange(steps)[:, None] >= given.frames
    grads = np.where(late[..., None], 0, grads * dloss[:, None])
    if attrs["zero_infinity"]:
        grads = np.where(np.isinf(losses)[:, None], 0, grads)
    grads = np.where(given.wrong[:, None], np.nan, grads)
    return [grads.swapaxes(0, 1).astype(args[0].dtype)]


KERNELS: Mapping[str, Run] = {"Ctc": ctc, "CtcGrad": ctc_grad}
