"""Numbers to call a module with, when it is compared with its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oocdl.pytorch.study.sizes import Shapes

_MOST_ROWS = 64
_TRUE = 0.7
"""Share of the flags that are set: a mask that hides everything gives no numbers."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The numbers that inputs may hold."""

    dtypes: Mapping[str, torch.dtype]
    """Type of each input of the example."""
    rows: int = 2
    """Whole numbers are smaller: rows of the smallest table that they look up."""
    special: tuple[int, ...] = field(default=())
    """Whole numbers that have to be among them, such as rows of padding."""

    def inputs(
        self, shapes: Shapes, dtype: torch.dtype, seed: int, *, ties: bool = False, positive: bool = False
    ) -> dict[str, Tensor]:
        """Return inputs of these shapes, floating-point ones in ``dtype``.

        ``ties``: of whole numbers, half of the last axis zeros, as images with a background are.
        """
        random = torch.Generator().manual_seed(seed)
        return {
            name: self._numbers(self.dtypes[name], shape, dtype, random, ties, positive)
            for name, shape in shapes.items()
        }

    def _numbers(
        self,
        kind: torch.dtype,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        random: torch.Generator,
        ties: bool,
        positive: bool,
    ) -> Tensor:
        if kind == torch.bool:
            return torch.rand(shape, generator=random) < _TRUE
        if not kind.is_floating_point:
            ids = torch.randint(0, max(min(self.rows, _MOST_ROWS), 1), shape, generator=random)
            for place, number in enumerate(self.special[: ids.numel()]):
                ids.view(-1)[place] = number
            return ids.to(kind)
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        if ties:
            x = x.mul_(1.5).round_()
            x[..., : shape[-1] // 2 if shape else 0] = 0.0
        return (x.abs_().add_(0.1) if positive else x).to(dtype)
