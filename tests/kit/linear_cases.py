"""Cases of reductions and linear maps: sums, moments, Einsum, Resample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oocdl.graph.ir.graph import Array
from tests.kit.kernel_cases import INF, Case, noise


def reductions() -> list[Case]:
    """Sums and their relatives; far-off means, infinities."""
    x = noise(2, 3, 5, 4)
    lines = noise(3, 5)
    lines[0] = -INF
    lines[1, 2] = -INF
    lines[2, 1] = 300.0
    cases = [
        Case("ReduceMax", "ReduceMax", [x], lambda a: a.amax((1, 3), keepdim=True), {"axes": (1, 3)}),
        Case(
            "ReduceSum-int",
            "ReduceSum",
            [np.arange(12, dtype=np.int64).reshape(3, 4)],
            lambda a: a.sum(0, keepdim=True),
            {"axes": (0,)},
        ),
        Case("LogSumExp-inf", "LogSumExp", [lines], lambda a: a.logsumexp(1, keepdim=True), {"axes": (1,)}),
        Case(
            "Moments-far",
            "Moments",
            [x + 100],
            lambda a: variance(a, (2, 3)),
            {"axes": (2, 3)},
            tolerance=2e-5,
        ),
    ]
    for axes in ((0,), (1, 3), (0, 2, 3), (0, 1, 2, 3)):
        cases += [
            Case(
                f"ReduceSum{axes}",
                "ReduceSum",
                [x + 1],
                lambda a, axes=axes: a.sum(axes, keepdim=True),
                {"axes": axes},
            ),
            Case(
                f"LogSumExp{axes}",
                "LogSumExp",
                [x],
                lambda a, axes=axes: a.logsumexp(axes, keepdim=True),
                {"axes": axes},
            ),
            Case(f"Moments{axes}", "Moments", [x], lambda a, axes=axes: variance(a, axes), {"axes": axes}),
        ]
    return cases


def long_reductions() -> list[Case]:
    """Sums so long that adding one by one would lose digits."""
    cases = []
    long = noise(1, 2, 40, 32, 32) + 1
    for axes in ((2, 3, 4), (0, 2, 3, 4)):
        cases.append(
            Case(
                f"Moments-long{axes}",
                "Moments",
                [long],
                lambda a, axes=axes: variance(a, axes),
                {"axes": axes},
                tolerance=1e-6,
            )
        )
        cases.append(
            Case(
                f"ReduceSum-long{axes}",
                "ReduceSum",
                [long],
                lambda a, axes=axes: a.sum(axes, keepdim=True),
                {"axes": axes},
                tolerance=1e-6,
            )
        )
    return cases


def variance(a: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(mean, biased variance)."""
    var, mean = torch.var_mean(a, axes, correction=0, keepdim=True)
    return mean, var


def contractions() -> list[Case]:
    """Einsums of every class of letters."""
    sizes = dict(a=2, b=3, c=4, d=5, e=6, f=3)
    equations = [
        "ab,bc->ac",
        "ab,cb->ac",
        "ba,bc->ca",
        "abcd,abed->abce",
        "bacd,adbe->abce",
        "abc,cd->abd",
        "abc,abd->cd",
        "abc,abc->a",
        "ab,ab->",
        "a,b->ab",
        "ab,bc->c",
        "ab,a->ab",
        "ab,c->ac",
        "abcd,bdef->aecf",
    ]
    cases = []
    for equation in equations:
        left, right = equation.split("->")[0].split(",")
        arrays = [noise(*(sizes[x] for x in term), seed=n) for n, term in enumerate((left, right))]
        cases.append(
            Case(
                f"Einsum {equation}",
                "Einsum",
                arrays,
                lambda a, b, equation=equation: torch.einsum(equation, a, b),
                {"equation": equation},
            )
        )
    large = noise(64, 50), noise(50, 40, seed=1)
    for equation in ("ab,bc->ac", "ba,bc->ac", "ab,cb->ca"):
        arrays = [
            a if term == first else a.T
            for a, term, first in zip(large, equation[:5].split(","), ("ab", "bc"), strict=True)
        ]
        cases.append(
            Case(
                f"Einsum-large {equation}",
                "Einsum",
                [np.ascontiguousarray(a) for a in arrays],
                lambda a, b, equation=equation: torch.einsum(equation, a, b),
                {"equation": equation},
            )
        )
    return cases


def taps_of(matrix: Array) -> dict[str, Array]:
    """Columns and weights [taps, rows] of what is not zero in a matrix."""
    order = np.argsort(matrix == 0, axis=1, kind="stable")[:, : max((matrix != 0).sum(1).max(), 1)]
    return {
        "columns": order.T.astype(np.int32),
        "weights": np.ascontiguousarray(np.take_along_axis(matrix, order, axis=1).T),
    }


def resamples() -> list[Case]:
    """Matrices on each axis: dense, of few numbers a row, nearest."""
    random = np.random.default_rng(5)
    wide = np.zeros((50, 60))
    for row in range(50):
        wide[row, row : row + 2] = random.random(2)
    wide[7] = 0
    matrices = {
        "dense": random.random((7, 5)),
        "nearest": np.eye(5)[[0, 0, 1, 3, 4, 4]],
        "weighted": 0.5 * np.eye(5)[[4, 2]],
        "taps": wide,
        "none": np.zeros((3, 5)),
    }
    cases = []
    for label, matrix in matrices.items():
        extent = matrix.shape[1]
        for axis, shape in ((2, (2, 3, extent, 4)), (3, (2, 3, 4, extent)), (0, (extent, 3))):

            def reference(a: Tensor, axis: int = axis, matrix: Array = matrix) -> Tensor:
                return torch.movedim(torch.movedim(a, axis, -1) @ torch.tensor(matrix).T, -1, axis)

            attrs = {"axis": axis, **taps_of(matrix)}
            cases.append(Case(f"Resample-{label}{axis}", "Resample", [noise(*shape)], reference, attrs))
    return cases
