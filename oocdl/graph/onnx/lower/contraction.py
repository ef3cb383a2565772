"""Lowers MatMul, Gemm, Einsum of any number of operands, and transforms by known matrices.

An Einsum becomes diagonals, sums and products of two operands.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array, normalize_axis
from oocdl.graph.onnx.constant_folding import allow
from oocdl.graph.onnx.context import Context, Operand, lowers


@dataclass(frozen=True)
class Term:
    """A value with a letter for each axis."""

    value: str
    letters: str


def _spelled(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return the letters of every operand and of the result, without an ellipsis, one letter an index.

    >>> _spelled("...ij,jk", (3, 2))
    (['Zij', 'jk'], 'Zik')
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise ModelError(f"equation '{equation}' has {len(terms)} terms for {len(ranks)} operands")
    free = [letter for letter in string.ascii_letters[::-1] if letter not in equation][::-1]
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    if any(n < 0 or (n and "..." not in term) for n, term in zip(hidden, terms, strict=True)):
        raise ModelError(f"equation '{equation}' does not fit operands of ranks {list(ranks)}")
    most = max(hidden)
    if most > len(free):
        raise ModelError(f"equation '{equation}' has more axes than there are letters")
    dots = "".join(free[len(free) - most :])
    spelled = [term.replace("...", dots[most - n :]) for term, n in zip(terms, hidden, strict=True)]
    if not arrow:
        once = sorted(letter for letter, count in Counter("".join(terms)).items() if count == 1)
        out = "..." + "".join(letter for letter in once if letter != ".")
    return spelled, out.replace("...", dots)


def _diagonal(ctx: Context, term: Term) -> Term:
    """Take the diagonal of axes that share a letter: every (n + 1)th of their n x n elements."""
    for letter in dict.fromkeys(term.letters):
        while term.letters.count(letter) > 1:
            first = term.letters.index(letter)
            second = term.letters.index(letter, first + 1)
            shape, rank = ctx.build.shape(term.value), len(term.letters)
            n = shape[first]
            if shape[second] != n:
                raise ModelError(f"letter '{letter}' has extents {n} and {shape[second]}")
            rest = [axis for axis in range(rank) if axis not in (first, second)]
            x = ctx.make("Transpose", term.value, perm=(*rest, first, second))
            x = ctx.reshape(x, (*(shape[axis] for axis in rest), n * n))
            if n > 1:
                x = ctx.make("Slice", x, axis=rank - 2, start=0, stop=n * n, step=n + 1)
            term = Term(x, "".join(term.letters[axis] for axis in rest) + letter)
    return term


def _without_ones(ctx: Context, term: Term, extents: dict[str, int]) -> Term:
    """Drop axes of extent one whose letter is longer elsewhere: they broadcast."""
    shape = ctx.build.shape(term.value)
    kept = [axis for axis, letter in enumerate(term.letters) if shape[axis] == extents[letter]]
    for axis, letter in enumerate(term.letters):
        if axis not in kept and shape[axis] != 1:
            raise ModelError(f"letter '{letter}' has extents {extents[letter]} and {shape[axis]}")
    if len(kept) == len(shape):
        return term
    value = ctx.reshape(term.value, [shape[axis] for axis in kept])
    return Term(value, "".join(term.letters[axis] for axis in kept))


def _alone(ctx: Context, term: Term, out: str) -> str:
    """Sum the axes of one operand that the result does not have, and put the others in its order."""
    x, letters = term.value, term.letters
    gone = tuple(axis for axis, letter in enumerate(letters) if letter not in out)
    if gone:
        shape = ctx.build.shape(x)
        x = ctx.make("ReduceSum", x, axes=gone)
        x = ctx.reshape(x, [extent for axis, extent in enumerate(shape) if axis not in gone])
        letters = "".join(letter for letter in letters if letter in out)
    return ctx.transpose(x, [letters.index(letter) for letter in out])


@lowers("Einsum")
def _einsum(ctx: Context) -> Sequence[Operand]:
    equation, count = str(ctx.attr("equation")), len(ctx.node.inputs)
    spelled, out = _spelled(equation, [len(ctx.shape(index)) for index in range(count)])
    if len(set(out)) < len(out) or not set(out) <= set("".join(spelled)):
        raise ModelError(f"equation '{equation}' has an output letter twice, or one that no operand has")
    if count > 1:
        ctx.need_floats(*range(count))
    terms = [_diagonal(ctx, Term(x, letters)) for x, letters in zip(ctx.values(), spelled, strict=True)]
    return [_product(ctx, terms, out)]


def _product(ctx: Context, terms: Sequence[Term], out: str) -> str:
    """Multiply terms, two at a time, and sum over the letters that neither a later one nor ``out`` has."""
    extents: dict[str, int] = {}
    for term in terms:
        for letter, extent in zip(term.letters, ctx.build.shape(term.value), strict=True):
            extents[letter] = max(extents.get(letter, 1), extent)
    total, *others = (_without_ones(ctx, term, extents) for term in terms)
    for number, term in enumerate(others, start=1):
        later = set(out).union(*(other.letters for other in others[number:]))
        both = dict.fromkeys(total.letters + term.letters)
        made = out if number == len(others) else "".join(letter for letter in both if letter in later)
        equation = f"{total.letters},{term.letters}->{made}"
        total = Term(ctx.make("Einsum", total.value, term.value, equation=equation), made)
    return _alone(ctx, total, out)


@lowers("MatMul")
def _matmul(ctx: Context) -> Sequence[Operand]:
    ctx.need_floats(0, 1)
    ranks = [len(ctx.shape(index)) for index in (0, 1)]
    summed = ctx.shape(0)[-1], ctx.shape(1)[-2:][0]
    if summed[0] != summed[1]:  # an extent of 1 does not broadcast there
        raise ModelError(f"{list(ctx.shape(0))} and {list(ctx.shape(1))}: {summed[0]} times {summed[1]}")
    batch = string.ascii_lowercase[3 : max(3, *(rank + 1 for rank in ranks))]
    rows, columns = ("" if rank == 1 else letter for rank, letter in zip(ranks, "ac", strict=True))
    left, right = (batch[len(batch) - max(rank - 2, 0) :] for rank in ranks)
    terms = [Term(ctx.value(0), f"{left}{rows}b"), Term(ctx.value(1), f"{right}b{columns}")]
    return [_product(ctx, terms, f"{batch}{rows}{columns}")]


@lowers("Gemm")
def _gemm(ctx: Context) -> Sequence[Operand]:
    ctx.need_floats(0, 1)
    left = "km" if ctx.attr("transA", 0) else "mk"
    right = "nk" if ctx.attr("transB", 0) else "kn"
    y = ctx.make("Einsum", ctx.value(0), ctx.value(1), equation=f"{left},{right}->mn")
    y = ctx.scaled(y, ctx.attr("alpha", 1.0))
    beta = ctx.attr("beta", 1.0)
    return [ctx.make("Add", y, ctx.scaled(ctx.value(2), beta)) if ctx.has(2) and beta else y]


@lowers("AffineGrid")
def _affine_grid(ctx: Context) -> Sequence[Operand]:
    """Map the points of a regular grid of -1 to 1 by the matrices of all samples."""
    extents = (ctx.ints("a size", "", 1) or ())[2:]
    n, rank = ctx.shape(0)[0], len(extents)
    if ctx.shape(0) != (n, rank, rank + 1):
        raise ModelError(f"matrices {list(ctx.shape(0))} do not fit a grid of {[*extents]}")
    allow(ctx.node, (*extents, rank + 1), 8)
    corners = bool(ctx.attr("align_corners", 0))
    ends = [float(extent > 1) if corners else 1 - 1 / extent for extent in extents]
    lines = [np.linspace(-end, end, extent) for end, extent in zip(ends, extents, strict=True)]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(extents)], -1)
    base = ctx.store(points.reshape(-1, rank + 1))
    grid = ctx.make("Einsum", base, ctx.value(0), equation="pj,nij->npi")
    return [ctx.reshape(grid, (n, *extents, rank))]


def _turns(count: int, length: int, frequencies: int) -> Array:
    """``e^(-2 pi i n k / length)`` of ``n < count`` and ``k < frequencies``, 0 from ``n = length`` on."""
    n, k = np.arange(count)[:, None], np.arange(frequencies)
    return np.asarray(np.where(n < length, np.exp(-2j * np.pi * (n * k % length) / length), 0))


def _parts(complex_matrix: Array, inputs: int, outputs: int) -> Array:
    """Return [n, c, k, d]: how part c (real, imaginary) of a number goes into part d of a product with it."""
    real, imaginary = complex_matrix.real, complex_matrix.imag
    parts = np.stack([np.stack([real, imaginary], -1), np.stack([-imaginary, real], -1)], 1)
    return np.asarray(parts[:, :inputs, :, :outputs])


@lowers("DFT")
def _dft(ctx: Context) -> Sequence[Operand]:
    """Lower DFT, of real or complex numbers, both ways, to a product with its matrix."""
    shape = ctx.shape(0)
    rank, given = len(shape), [ctx.scalar("a length or an axis", index) for index in (1, 2)]
    axis = ctx.attr("axis", 1) if ctx.opset < 20 else -2 if given[1] is None else given[1]
    axis = normalize_axis(axis, rank)
    inverse, onesided = (bool(ctx.attr(name, 0)) for name in ("inverse", "onesided"))
    back = inverse and onesided
    count = shape[axis]
    length = given[0] if given[0] is not None else 2 * (count - 1) if back else count
    if axis == rank - 1 or shape[-1] not in (1, 2) or length < 1:
        raise ModelError(f"axis {axis} of {list(shape)} is not one of {length} real or complex numbers")
    allow(ctx.node, (count, shape[-1], length, 2), 16)
    if back:  # each frequency but 0 and the last of an even length stands for its mirror image, too
        used = min(count, length // 2 + 1)
        matrix = np.zeros((count, length), complex)
        weights = np.where((np.arange(used) > 0) & (2 * np.arange(used) != length), 2, 1)
        matrix[:used] = weights[:, None] * _turns(length, length, used).T.conj() / length
    else:
        matrix = _turns(count, length, length // 2 + 1 if onesided else length)
        matrix = matrix.conj() / length if inverse else matrix
    letters = string.ascii_letters[:rank]
    n, c, out = letters[axis], letters[-1], letters[:-1].replace(letters[axis], "Y") + "Z"
    parts = ctx.store(_parts(matrix, shape[-1], 1 if back else 2))
    return [ctx.make("Einsum", ctx.value(0), parts, equation=f"{letters},{n}{c}YZ->{out}")]


@lowers("STFT")
def _stft(ctx: Context) -> Sequence[Operand]:
    """Lower STFT to a convolution, whose kernel is the window times the matrix of the transform."""
    n, samples, parts = ctx.shape(0) if len(ctx.shape(0)) == 3 else (*ctx.shape(0), 1)
    step, length = (ctx.scalar("a step, a window or a length", index) for index in (1, 3))
    ctx.constants("a step, a window or a length", 2)
    window = ctx.known(2)
    if length is None:
        length = samples if window is None else window.size
    onesided = bool(ctx.attr("onesided", 1))
    if not 0 < length <= samples or step < 1 or parts not in (1, 2) or (onesided and parts == 2):
        raise ModelError(f"no frames of {length} every {step} of {samples} numbers of {parts} parts")
    if window is not None and window.size != length:
        ctx.refuse(f"a window of {window.size} for frames of {length}")
    frequencies = length // 2 + 1 if onesided else length
    allow(ctx.node, (frequencies, 2, parts, length), 8)
    matrix = _turns(length, length, frequencies) * (1 if window is None else window.reshape(-1, 1))
    kernel = _parts(matrix, parts, 2).transpose(2, 3, 1, 0).reshape(2 * frequencies, parts, length)
    signal = ctx.make("Transpose", ctx.reshape(ctx.value(0), (n, samples, parts)), perm=(0, 2, 1))
    made = ctx.make("Conv", signal, ctx.store(kernel), strides=(step,), pads=(0, 0), dilations=(1,))
    apart = ctx.reshape(made, (n, frequencies, 2, ctx.build.shape(made)[2]))
    return [ctx.make("Transpose", apart, perm=(0, 3, 1, 2))]
