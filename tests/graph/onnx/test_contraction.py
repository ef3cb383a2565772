"""Einsum in every form that ONNX has, against PyTorch's: values and gradients, cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

from tests.kit.lowered import check, model_of

EQUATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij->ji": ((2, 3),),
    "bij->i": ((2, 3, 4),),
    "ii->": ((3, 3),),
    "...ii->...i": ((2, 3, 3),),
    "iji->ji": ((3, 2, 3),),
    "ij,jk": ((2, 3), (3, 4)),
    "...ij,...jk->...ik": ((2, 1, 2, 3), (4, 3, 2)),
    "bii,bij->bj": ((2, 3, 3), (2, 3, 4)),
    "ab,bc,cd,d->a": ((2, 3), (3, 2), (2, 4), (4,)),
    "i,i": ((3,), (3,)),
    "bhqd,bhkd->bhqk": ((2, 2, 3, 2), (2, 2, 3, 2)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_values_and_gradients(equation: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {f"x{i}": random.normal(size=shape) for i, shape in enumerate(EQUATIONS[equation])}
    node = helper.make_node("Einsum", list(arrays), ["y"], equation=equation)
    model = model_of([node], arrays, ["y"])
    check(model, arrays, lambda *xs: torch.einsum(equation, *xs), tmp_path, counts=(2,))
