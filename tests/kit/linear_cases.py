"""Cases of reductions and linear maps: sums, moments, Einsum, Resample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oocdl.graph.ir.graph import Array
from tests.kit.kernel_cases import INF, Case, noise, oracle


def reductions() -> list[Case]:
    """Sums and their relatives; far-off means, infinities, and lines so long that digits would be lost."""
    x, long = noise(2, 3, 5, 4), noise(1, 2, 40, 32, 32) + 1
    lines = noise(3, 5)
    lines[0] = lines[1, 2] = -INF
    lines[2, 1] = 300.0
    cases = [
        oracle("ReduceMax", x, axes=(1, 3)),
        oracle("ReduceSum", np.arange(12, dtype=np.int64).reshape(3, 4), axes=(0,), label="-int"),
        oracle("LogSumExp", lines, axes=(1,), label="-inf"),
        oracle("Moments", x + 100, axes=(2, 3), label="-far", tolerance=2e-5),
    ]
    for axes in ((0,), (1, 3), (0, 2, 3), (0, 1, 2, 3)):
        for op, operand in (("ReduceSum", x + 1), ("LogSumExp", x), ("Moments", x)):
            cases.append(oracle(op, operand, axes=axes, label=f"{axes}"))
    for axes in ((2, 3, 4), (0, 2, 3, 4)):
        for op in ("Moments", "ReduceSum"):
            cases.append(oracle(op, long, axes=axes, label=f"-long{axes}", tolerance=1e-6))
    return cases


def contractions() -> list[Case]:
    """Einsums of every class of letters."""
    small, large = dict(a=2, b=3, c=4, d=5, e=6, f=3), dict(a=64, b=50, c=40)
    equations = (
        "ab,bc->ac", "ab,cb->ac", "ba,bc->ca", "abcd,abed->abce", "bacd,adbe->abce", "abc,cd->abd",
        "abc,abd->cd", "abc,abc->a", "ab,ab->", "a,b->ab", "ab,bc->c", "ab,a->ab", "ab,c->ac",
        "abcd,bdef->aecf",
    )  # fmt: skip
    cases = []
    for sizes, written in ((small, equations), (large, ("ab,bc->ac", "ba,bc->ac", "ab,cb->ca"))):
        for equation in written:
            terms = equation.split("->")[0].split(",")
            arrays = [noise(*(sizes[x] for x in term), seed=n) for n, term in enumerate(terms)]
            label = f"{'-large' * (sizes is large)} {equation}"
            cases.append(oracle("Einsum", *arrays, equation=equation, label=label))
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
