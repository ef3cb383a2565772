"""Finds what a module needs and allows, by calling copies of it before anything is exported."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten_with_path

from oocdl.errors import InputError, UnsupportedError
from oocdl.pytorch.child import first_line, start
from oocdl.pytorch.module_calls import Signature, Tensors, dtype_of, tensors_in
from oocdl.pytorch.study.freedom import BATCH, Freedom, freedom
from oocdl.pytorch.study.operator_watch import Findings
from oocdl.pytorch.study.probe import probe
from oocdl.pytorch.study.sizes import Data, Shapes, Sizes, choose

_SECONDS = 10.0
"""Processor time for following sizes that nobody asks for: some modules take minutes."""
_ASKED_SECONDS = 600.0
Axes = Mapping[str, Sequence[int]]
"""Input -> some of its axes."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The findings of a study: plain data, which can be pickled."""

    found: Findings
    example: Shapes
    """Shapes of the inputs as they are given, of at least two samples where the batch is open."""
    free: Freedom
    sizes: Sizes
    data: Data
    outputs: tuple[str, ...]


def study(
    module: nn.Module,
    signature: Signature,
    inputs: Tensors,
    tried: Axes,
    asked: bool,
    outputs: Sequence[str] | None,
) -> Study:
    """Call copies of ``module`` in many ways.

    ``tried``: the axes that may be open; ``asked``: whether they have to be. Raises InputError if it cannot
    be called, UnsupportedError that names what a file cannot carry, or an axis that is asked for
    and is not free.
    """
    wide = _widened(inputs, tried)
    sizes_of = partial(_free, module, signature, tried=tried, asked=asked)
    following = start("following sizes", partial(sizes_of, wide))  # on the other core
    try:
        findings = probe(module, signature, wide)
        free = following()
    except InputError:
        if wide is inputs:
            raise
        findings, wide = probe(module, signature, inputs), inputs
        free = sizes_of(wide)
    names = _output_names(findings.outputs, outputs, signature.names)
    if BATCH not in free.names.values() and wide is not inputs:
        wide, findings = inputs, probe(module, signature, inputs)
    findings.outputs = None  # tensors without contents cannot be pickled
    data = Data(
        dtypes={name: x.dtype for name, x in inputs.items()},
        rows=min(findings.rows, default=2),
        special=tuple(sorted({row for row in findings.padding.values() if row is not None})),
    )
    example = {name: tuple(x.shape) for name, x in wide.items()}
    works = _Works(module, signature, data)
    sizes = works.sizes(example, free)
    # Rows may be looked up by sums of a mask of integers, which are 0 or 1.
    if sizes is None and (flags := replace(data, rows=2, special=())) != data:
        sizes = _Works(module, signature, flags).sizes(example, free)
        data = data if sizes is None else flags
    if sizes is None and not asked:
        why = f"no other size was found that the module takes: {works.why(free)}"
        free = _only_the_batch(free, example, why)
        sizes = works.sizes(example, free)
    if sizes is None and not asked:  # as where a batch is divided into so many parts
        why = f"no other size was found that the module takes: {works.why(free)}"
        free = Freedom(names={}, fixed={**free.fixed, **dict.fromkeys(free.names, why)}, conditions=())
        sizes = works.sizes(example, free)
    if sizes is None:
        refused = f"{type(module).__name__} cannot be called at two sizes of each axis that is open"
        raise UnsupportedError(f"{refused}: {works.why(free)}")
    wider = replace(data, wide=not all(x.is_floating_point() for x in inputs.values()))
    if wider.wide and _Works(module, signature, wider)(sizes.second, seed=1) is not None:
        data = wider  # else it looks something up all the same
    return Study(found=findings, example=example, free=free, sizes=sizes, data=data, outputs=names)


def narrowed(module: nn.Module, signature: Signature, made: Study, reason: str) -> Study:
    """Return a study with all axes but the batch fixed at the sizes of the example, for a reason."""
    free, works = _only_the_batch(made.free, made.example, reason), _Works(module, signature, made.data)
    sizes = works.sizes(made.example, free)
    if sizes is None:
        raise UnsupportedError(f"it cannot be called with {made.example}: {works.reason}")
    return replace(made, free=free, sizes=sizes)


def _only_the_batch(free: Freedom, example: Shapes, reason: str) -> Freedom:
    """Fix all axes but the batch at the sizes of the example, in conditions too."""
    names = {axis: name for axis, name in free.names.items() if name == BATCH}
    lost = {axis: reason for axis in free.names.keys() - names.keys()}
    sizes = {free.names[title, axis]: example[title][axis] for title, axis in lost}
    about = []
    for item in free.conditions:
        text = re.sub(r"\w+", lambda word: str(sizes.get(word[0], word[0])), item.text)
        if BATCH in text:
            about.append(replace(item, text=text))
    fixed = {**free.fixed, **lost}
    return Freedom(names=names, fixed=fixed, conditions=tuple(about), rounded=free.rounded)


class _Works:
    """Whether a copy of a module can be called with inputs of some shapes."""

    def __init__(self, module: nn.Module, signature: Signature, data: Data) -> None:
        self.module, self.signature, self.data = copy.deepcopy(module), signature, data
        self.dtype = dtype_of(module)
        self.parameters = sum(p.numel() for p in module.parameters())
        self.reason = ""
        """Why the last call failed."""

    def __call__(self, shapes: Shapes, seed: int = 0) -> list[tuple[int, ...]] | None:
        args, kwargs = self.signature.split(self.data.inputs(shapes, self.dtype, seed))
        try:
            with torch.no_grad():
                returned = self.module(*args, **kwargs)
        except Exception as error:  # a size that does not fit fails with whatever the module raises
            self.reason = first_line(error)
            return None
        return [tuple(x.shape) for x in tensors_in(returned)]

    def why(self, free: Freedom) -> str:
        """Say why sizes were not found: how the last call failed, and what the module needs."""
        needed = "; ".join(f"{one.text} ({one.place})" for one in free.conditions)
        return "; ".join(filter(None, [self.reason, f"it needs {needed}" if needed else ""]))

    def sizes(self, example: Shapes, free: Freedom) -> Sizes | None:
        return choose(example, free.names, free.conditions, self, self.parameters)


def _widened(inputs: Tensors, tried: Axes) -> Tensors:
    """Repeat a batch of one, which would be taken for an axis that has no other size."""
    wide = [name for name, x in inputs.items() if x.dim() and 0 in tried.get(name, ())]
    if not wide or any(inputs[name].shape[0] != 1 for name in wide):
        return inputs
    return {name: torch.cat([x, x]) if name in wide else x for name, x in inputs.items()}


def _free(module: nn.Module, signature: Signature, inputs: Tensors, tried: Axes, asked: bool) -> Freedom:
    """Find the axes that are free; UnsupportedError if one that is asked for is not."""
    tried = {
        name: [axis for axis in tried.get(name, ()) if axis < x.dim() and x.shape[axis] > 1]
        for name, x in inputs.items()
    }
    try:
        seconds = _ASKED_SECONDS if asked else _SECONDS
        try:
            free = freedom(module, signature, inputs, tried, seconds)
        except (DataDependentOutputException, GuardOnDataDependentSymNode):
            with patch("torch.jit.is_tracing", lambda: True):  # else the probe refuses the module
                free = freedom(module, signature, inputs, tried, seconds)
    except Exception as error:  # whatever a module raises of sizes that are symbols
        late = isinstance(error, TimeoutError)
        if late and asked:
            raise UnsupportedError(str(error)) from None
        followed = f"its sizes cannot be followed: {first_line(error)}"
        reason = f"{error}; dynamic= asks for it" if late else followed
        batch = {name: [axis for axis in axes if axis == 0] for name, axes in tried.items()}
        free = Freedom(names={}, fixed={}, conditions=())
        if not asked and batch != tried:
            free = _free(module, signature, inputs, batch, False)
        lost = {(name, axis) for name, axes in tried.items() for axis in axes} - free.names.keys()
        free = replace(free, fixed={**dict.fromkeys(lost, reason), **free.fixed})
    if any(axis == 0 for _, axis in free.fixed):  # samples are the first axis of every input
        free = replace(free, names={axis: name for axis, name in free.names.items() if name != BATCH})
    if asked and free.fixed:
        (name, axis), why = next(iter(free.fixed.items()))
        needs = f"{type(module).__name__} needs its size" + (f", {why}" if why else "")
        raise UnsupportedError(f"axis {axis} of '{name}' cannot be left open: {needs}")
    return free


def _output_names(made: Any, asked: Sequence[str] | None, inputs: Sequence[str]) -> tuple[str, ...]:
    """Name the outputs: as asked, by the keys of a mapping, else ``output``, or ``output_0`` and so on."""
    leaves = [(path, x) for path, x in tree_flatten_with_path(made)[0] if isinstance(x, Tensor)]
    if not leaves:
        returned = f"the module returns no tensor, but {type(made).__name__}"
        raise InputError(f"{returned}: return tensors, or tuples or dicts of them")
    if asked is not None:
        names = [str(name) for name in ([asked] if isinstance(asked, str) else asked)]
        if len(names) != len(leaves) or len(set(names)) < len(names):
            raise InputError(f"outputs names {', '.join(names)}; the module returns {len(leaves)} tensors")
    else:
        names = [str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) for path, _ in leaves if path]
        if len(set(names)) < len(leaves) or not all(names) or not isinstance(made, Mapping | tuple):
            names = ["output"] if len(leaves) == 1 else [f"output_{n}" for n in range(len(leaves))]
    return tuple(f"{name}_out" if name in inputs else name for name in names)
