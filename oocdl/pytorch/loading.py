"""Puts trained weights and running statistics back into a module, by PyTorch's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.onnx.metadata import Metadata

Blocks = Callable[[str], Iterator[Array]]
"""Initializer -> its trained contents in C order, block by block."""


def load(
    module: nn.Module, metadata: Metadata, shapes: Mapping[str, Shape], blocks: Blocks, passes: int
) -> None:
    """Copy the tensors that ``shapes`` names into ``module``; it is changed only if all of them fit.

    ``shapes``: of the initializers that the run has trained or kept. ``passes``: how many the run has made,
    by which each ``num_batches_tracked`` has grown. Raises InputError that names what does not fit.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into takes a torch.nn.Module, got {type(module).__name__}")
    there: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    there |= dict(module.named_buffers(remove_duplicate=False))
    wrong = _misfits(module, metadata, shapes, there)
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(
            f"{type(module).__name__} is not the {metadata.module} of this run: {'; '.join(wrong[:5])}{more}"
        )
    with torch.no_grad():
        for name, shape in shapes.items():
            targets = {id(there[title]): there[title] for title in metadata.facts[name].names}
            for target in targets.values():
                _fill(target, shape, blocks(name))
        for name, counter in metadata.counters.items():
            there[name].fill_(counter.start + counter.per_pass * passes)


def _misfits(
    module: nn.Module, metadata: Metadata, shapes: Mapping[str, Shape], there: Mapping[str, Tensor]
) -> list[str]:
    """List in words how the module differs from the one that the run was made of."""
    misfits = []
    known = {title for fact in metadata.facts.values() for title in fact.names}
    for name, shape in shapes.items():
        for title in metadata.facts[name].names:
            if title not in there:
                misfits.append(f"it has no '{title}'")
            elif tuple(there[title].shape) != tuple(shape):
                misfits.append(f"'{title}' is {list(there[title].shape)}, in the run {list(shape)}")
    misfits += [f"it has no '{name}'" for name in metadata.counters if name not in there]
    strangers = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    misfits += [f"the run has no '{name}'" for name in strangers if name not in {*known, *metadata.unread}]
    return misfits


def _fill(target: Tensor, shape: Shape, blocks: Iterator[Array]) -> None:
    """Copy blocks in C order into ``target``, in its dtype, on its device."""
    rows = target if target.dim() else target.reshape(1)
    at = 0
    for block in blocks:
        piece = torch.from_numpy(np.ascontiguousarray(block)).reshape(-1, *rows.shape[1:])
        rows[at : at + len(piece)].copy_(piece)
        at += len(piece)
