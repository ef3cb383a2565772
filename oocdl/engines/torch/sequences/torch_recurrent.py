"""Recurrent layers on PyTorch: in each step one product and, between products, one loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oocdl.engines.recurrent_steps import RUNS, Attrs, Kit, Part, Product, Step
from oocdl.engines.torch.linear import suits_onednn
from oocdl.engines.torch.torch_pointwise import primitive
from oocdl.engines.torch.torch_record import Kernel, Result
from oocdl.fusion.cell_loops import FLOAT, Rows, bind_steps, cell_code
from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.ops.expression import Cell

LEAST_PACKED_MULTIPLY_ADDS = 1 << 20
"""Minimum multiply-adds a step for which oneDNN with packed weights is faster than MKL."""


class _Product:
    """``x weight^T`` for the few rows of a step, with the weight packed once for all steps."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self.turned, self.packed = weight.t(), None
        if suits_onednn(weight, rows * weight.numel(), LEAST_PACKED_MULTIPLY_ADDS):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def __call__(self, x: Tensor, added: Tensor | None) -> Tensor:
        """``added + x weight^T``, in new memory."""
        if self.packed is None:
            return x @ self.turned if added is None else torch.addmm(added, x, self.turned)
        x = x.contiguous()
        result: Tensor
        if added is None:
            result = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        else:
            other = added.contiguous()
            result = torch.ops.mkldnn._linear_pointwise.binary(x, other, self.packed, None, "add")
        return result


class _Torch(Kit):
    """Products and cells by PyTorch's functions, on any device and in any dtype."""

    def __init__(self, places: Sequence[Tensor | None]) -> None:
        """``places``: where results are made, in their order; None: in new memory."""
        self.places = places

    def empty(self, like: Tensor, shape: Shape, result: int | None = None) -> Tensor:
        place = None if result is None or result >= len(self.places) else self.places[result]
        return like.new_empty(shape) if place is None else place

    def copy(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    def product(self, weight: Tensor, rows: int) -> Product:
        return _Product(weight, rows)

    def compute(self, op: str, given: Sequence[Any]) -> Tensor:
        like = next(each for each in given if isinstance(each, Tensor) and each.dtype != torch.bool)
        return primitive(op, given, like)


class _Loops(_Torch):
    """Cells by loops, on the processor in float32."""

    def cell(
        self, cell: Cell, attrs: Attrs, order: range, reads: Sequence[Part], writes: Sequence[Part]
    ) -> Step:
        parts = [*map(_in_rows, reads), *writes]
        samples, hidden = writes[0].array.shape[-2], writes[0].array.shape[-1] // writes[0].of
        rows = [_rows(part, hidden) for part in parts]
        functions = (("activations", tuple(attrs["activations"])),)
        code = cell_code(cell, functions, tuple(rows[: len(reads)]), tuple(rows[len(reads) :]))
        fresh = [part.number * hidden * itemsize(FLOAT) if part.array is None else None for part in parts]
        addresses = [_addresses(part, order) for part in parts if part.array is not None]
        loop = bind_steps(code, rows, samples, fresh, np.stack(addresses, 1))

        def step(t: int, fresh: Tensor, kept: Sequence[Part] = parts) -> None:
            loop(t, fresh.data_ptr())

        return step


def _in_rows(part: Part) -> Part:
    """The same part of an array whose rows have no gaps, and are as far apart as those of the first state."""
    array, first = part.array, part.first
    if array is not None and array.shape[-1] > 1 and array.stride(-1) != 1:
        array = array.contiguous()
    if first is not None and (first.stride(-1), first.stride(-2)) != (1, array.stride(-2)):
        array, first = array.contiguous(), first.contiguous()
    return Part(array, part.number, part.of, first)


def _rows(part: Part, hidden: int) -> Rows:
    """Tell how the rows of a part lie."""
    array: Tensor | None = part.array
    if array is None:
        return Rows(hidden, part.of * hidden * itemsize(FLOAT))
    row_bytes = array.stride(-2) * array.element_size() if array.shape[-2] > 1 else 0
    return Rows(array.shape[-1] // part.of, row_bytes, str(array.dtype).removeprefix("torch."))


def _addresses(part: Part, order: range) -> npt.NDArray[np.int64]:
    """Return the address of a part's first row in each step."""
    array, each = part.array, part.array.element_size()
    first = array.data_ptr() + part.number * (array.shape[-1] // part.of) * each
    found = first + np.arange(len(order)) * (array.stride(0) * each if array.ndim == 3 else 0)
    if part.first is not None:
        found[order[1:]] = found[order[:-1]]
        found[order[0]] = part.first.data_ptr()
    return np.asarray(found, np.int64)


def _recurrence(
    op: str, args: list[Tensor], item: Instruction, places: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    has_loops = args[0].dtype == torch.float32 and args[0].device.type == "cpu"
    return RUNS[op]((_Loops if has_loops else _Torch)(places), args, item.attrs)


_PLACED = {**dict.fromkeys(RUNS, 1), "GruSteps": 2, "LstmSteps": 3}
"""Number of first results that have all steps; the others are copies of the last ones."""
KERNELS: Mapping[str, Kernel] = {
    op: Kernel(partial(_recurrence, op), Result.OWN, placed=_PLACED[op]) for op in RUNS
}
