"""Lowers ONNX's Einsum, of any number of operands, to diagonals, sums and products of two operands."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from oocdl.errors import ModelError
from oocdl.graph.onnx.context import Context, Lower, Operand
from oocdl.graph.onnx.lower.arithmetic import need_floats


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
    if any(shape[axis] != 1 for axis in range(len(shape)) if axis not in kept):
        raise ModelError(f"extents {list(shape)} of '{term.letters}' are not those of other operands")
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
    perm = tuple(letters.index(letter) for letter in out)
    return x if perm == tuple(range(len(perm))) else ctx.make("Transpose", x, perm=perm)


def _einsum(ctx: Context) -> Sequence[Operand]:
    equation, count = str(ctx.attr("equation")), len(ctx.node.inputs)
    spelled, out = _spelled(equation, [len(ctx.shape(index)) for index in range(count)])
    if len(set(out)) < len(out) or not set(out) <= set("".join(spelled)):
        raise ModelError(f"equation '{equation}' has an output letter twice, or one that no operand has")
    terms = [_diagonal(ctx, Term(x, letters)) for x, letters in zip(ctx.values(), spelled, strict=True)]
    extents: dict[str, int] = {}
    for term in terms:
        for letter, extent in zip(term.letters, ctx.build.shape(term.value), strict=True):
            extents[letter] = max(extents.get(letter, 1), extent)
    terms = [_without_ones(ctx, term, extents) for term in terms]
    if count > 1:
        need_floats(ctx, *range(count))
    total = terms[0]
    for number, term in enumerate(terms[1:], start=1):
        later = set(out).union(*(other.letters for other in terms[number + 1 :]))
        both = dict.fromkeys(total.letters + term.letters)
        made = out if number == count - 1 else "".join(letter for letter in both if letter in later)
        equation = f"{total.letters},{term.letters}->{made}"
        total = Term(ctx.make("Einsum", total.value, term.value, equation=equation), made)
    return [_alone(ctx, total, out)]


CONTRACTIONS: dict[str, Lower] = {"Einsum": _einsum}
"""The lowering of Einsum."""
