"""The tensors of a module by name, and a copy of the module in which no two have the same contents.

Exporters rename initializers and merge those that are equal. In the copy all that training changes holds
other random numbers, so that each initializer is known by its contents; the true ones are put into the file
afterwards. Other buffers keep their numbers: exporters compute with them.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from oocdl.errors import InputError, UnsupportedError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.onnx.metadata import Metadata
from oocdl.pytorch.child import first_line

Key = tuple[str, tuple[int, ...], bytes]
"""Dtype, shape and digest of the contents."""


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter or a buffer of a module, with all its names."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def is_parameter(self) -> bool:
        """Whether an optimizer would get it."""
        return isinstance(self.tensor, nn.Parameter)


def named_tensors(module: nn.Module) -> list[Held]:
    """Return parameters, then buffers, each once, with all names by which the module has it."""
    names: dict[Tensor, dict[str, None]] = {}
    for pairs in (module.named_parameters, module.named_buffers):
        for name, tensor in pairs(remove_duplicate=False):
            names.setdefault(tensor, {})[name] = None
    return [Held(tuple(found), tensor) for tensor, found in names.items()]


def tensors_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all names by which the module has them."""
    return {name: held.tensor for held in named_tensors(module) for name in held.names}


def refuse_kinds(module: nn.Module) -> None:
    """Raise UnsupportedError for parts and tensors of kinds that no file is written of, with the way out."""
    for name, part in module.named_modules():
        where = f"'{name or type(module).__name__}'"
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(f"{where} is a script of torch.jit: give the module that it was made of")
        if isinstance(part, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise UnsupportedError(f"{where} is of {type(part).__name__}: give its .module, oocdl divides it")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        why = ""
        if nn.parameter.is_lazy(tensor):
            why = "has no shape yet: call the module once before"
        elif tensor.is_meta:
            why = "is on the device meta, without numbers: load or initialise it before"
        elif tensor.layout != torch.strided:
            why = "is sparse: make it dense by to_dense()"
        elif tensor.is_complex():
            why = "holds complex numbers: hold real and imaginary parts, as view_as_real gives them"
        if why:
            raise UnsupportedError(f"'{name}' {why}")


def copied(module: nn.Module) -> nn.Module:
    """Return a deep copy; UnsupportedError where there can be none."""
    try:
        with warnings.catch_warnings():  # of iterators, which Python 3.14 copies no more
            warnings.simplefilter("ignore", DeprecationWarning)
            return copy.deepcopy(module)
    except Exception as error:  # what a module holds raises whatever it likes
        raise UnsupportedError(
            f"{type(module).__name__} cannot be copied ({first_line(error)}): make what cannot be copied "
            "(locks, files, tensors that were computed) where it is used, not in __init__"
        ) from None


def array_of(tensor: Tensor) -> np.ndarray:
    """Return the contents of a tensor; bfloat16 as float32, which NumPy has."""
    held = tensor.detach().cpu().contiguous()
    return (held.float() if held.dtype == torch.bfloat16 else held).numpy()


def key_of(array: np.ndarray) -> Key:
    """Return what tells the contents of an array from those of another."""
    return array.dtype.name, array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy on the processor, with other random numbers in each parameter and running statistic."""
    for name, part in module.named_modules():
        for title, value in vars(part).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                where = f"{name}.{title}".lstrip(".")
                raise UnsupportedError(
                    f"'{where}' is computed from other tensors when the module is not running (as the old "
                    "weight_norm does); use torch.nn.utils.parametrizations, which computes it in forward"
                )
    cells: dict[int, str] = {}
    for held in named_tensors(module):
        other = cells.setdefault(held.tensor.untyped_storage()._cdata, held.names[0])
        if other != held.names[0]:
            raise UnsupportedError(
                f"'{other}' and '{held.names[0]}' are two tensors in the same memory; use one, by two names"
            )
    twin = copied(module).cpu()
    random = torch.Generator().manual_seed(0)
    used: set[Key] = set()
    statistics = norm_buffers(twin, "running_mean", "running_var")
    with torch.no_grad():
        for held in floats(twin):
            while held.is_parameter or held.names[0] in statistics:
                held.tensor.copy_(torch.randn(held.tensor.shape, generator=random, dtype=torch.float64))
                key = key_of(array_of(held.tensor))
                if key not in used or not held.tensor.numel():
                    used.add(key)
                    break
    return twin


def norm_buffers(module: nn.Module, *titles: str) -> frozenset[str]:
    """Return the names of all buffers of norms that have running statistics, or of those in ``titles``."""
    titles = titles or ("running_mean", "running_var", "num_batches_tracked")
    return frozenset(
        f"{name}.{title}".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for title in titles
    )


def floats(module: nn.Module) -> Iterator[Held]:
    """Yield the tensors of a module that hold floating-point numbers."""
    return (held for held in named_tensors(module) if held.tensor.is_floating_point())


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
    there = tensors_by_name(module)
    wrong = _misfits(module, metadata, shapes, there)
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(
            f"{type(module).__name__} is not the {metadata.module} of this run: {'; '.join(wrong[:5])}{more}"
        )
    with torch.no_grad():
        for name in shapes:
            for target in {there[title] for title in metadata.facts[name].names}:
                _fill(target, blocks(name))
        for name, counter in metadata.counters.items():
            there[name].fill_(counter.start + counter.per_pass * passes)


def _misfits(
    module: nn.Module, metadata: Metadata, shapes: Mapping[str, Shape], there: Mapping[str, Tensor]
) -> list[str]:
    misfits, known = [], {title for fact in metadata.facts.values() for title in fact.names}
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


def _fill(target: Tensor, blocks: Iterator[Array]) -> None:
    """Copy blocks in C order into ``target``, in its dtype, on its device."""
    rows = target if target.dim() else target.reshape(1)
    at = 0
    for block in blocks:
        piece = torch.from_numpy(np.ascontiguousarray(block)).reshape(-1, *rows.shape[1:])
        rows[at : at + len(piece)].copy_(piece)
        at += len(piece)
