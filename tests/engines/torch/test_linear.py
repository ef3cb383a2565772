"""Matrix products on PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oocdl.engines.torch import linear


@pytest.mark.skipif(linear.linear_pointwise is None, reason="PyTorch without oneDNN")
def test_onednn_gets_no_operand_of_one_element_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the states before the first step of a recurrent layer, which are zeros."""
    given: list[Tensor] = []

    def watched(a: Tensor, b: Tensor, *rest: Any) -> Any:
        given.extend((a, b))
        return pointwise(a, b, *rest)

    pointwise = linear.linear_pointwise
    a, b = torch.randn(64, 128), torch.randn(1, 1).expand(128, 64)
    wanted = a @ b
    monkeypatch.setattr(linear, "linear_pointwise", watched)
    torch.testing.assert_close(linear.matmul(a, b), wanted)
    torch.testing.assert_close(linear.matmul(b.t(), a.t()), wanted.t())
    assert len(given) == 4 and not any(0 in x.stride() for x in given)
