"""Compares a module with its file by numbers: outputs, gradients and statistics, at several sizes.

Both run twice in a row in float64, in training mode with the same random numbers: first with the module's own
weights on data with ties and zeros, then with weights that are moved, at other sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from oocdl.errors import UnsupportedError
from oocdl.graph.onnx.metadata import Metadata
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.pytorch.child import first_line
from oocdl.pytorch.comparison.blame import Recorder, first_difference, mark
from oocdl.pytorch.comparison.file_pass import Pass, inference_pass, training_pass
from oocdl.pytorch.comparison.modes import Jitter, Pinned, RightNorms, Wide, errors, limits_of
from oocdl.pytorch.module_calls import Places, Signature, Tensors, dtype_of, tensors_in
from oocdl.pytorch.module_tensors import array_of, named_tensors, tensors_by_name
from oocdl.pytorch.study.freedom import BATCH
from oocdl.pytorch.study.sizes import Data, Shapes
from oocdl.pytorch.study.study import Study

FLOOR = {torch.float64: 1e-7, torch.float32: 1e-5}
"""Error, relative to the largest number of its tensor, up to which a result is equal.

PyTorch itself computes some float64 gradients with constants of float32 (1/6 in Hardsigmoid's, 1/alpha in
CELU's): 3e-8."""
NOISE = 20
"""Largest ratio of a file's errors to those of PyTorch itself in other roundings."""
ROUNDINGS = 3
MOST_NOISE = 1e-3
"""Largest error that is allowed: where rounding alone moves results by more, numbers say nothing."""
_ORDER = ("output", "update", "gradient")
_SORTING = {"topk", "sort", "argsort"}
"""Functions of which PyTorch does not say in which order they give equal numbers."""
_LEAST = 0.02
"""Weights are moved by a tenth of their usual size, and at least by so much: zeros are moved, too."""


class Twin:
    """A copy of a module in one dtype, called on the numbers of its file; its tensors by the file's names."""

    def __init__(
        self, module: nn.Module, signature: Signature, metadata: Metadata, dtype: torch.dtype
    ) -> None:
        self.module = copy.deepcopy(module).cpu().to(dtype)
        self.signature, self.dtype, self.facts = signature, dtype, metadata.facts
        self.own_dtype = dtype_of(module)
        self.precision = str(dtype).removeprefix("torch.")
        self.runs: bool | None = None
        """Whether the module runs in this dtype; None before its first call."""
        self.tensors = tensors_by_name(self.module)

    def held(self) -> dict[str, Tensor]:
        return {name: self.tensors[fact.names[0]].detach().clone() for name, fact in self.facts.items()}

    def put(self, held: Tensors) -> None:
        with torch.no_grad():
            for name, data in held.items():
                self.tensors[self.facts[name].names[0]].copy_(data)

    def move(self, seed: int) -> None:
        """Move all parameters a little, as training would."""
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in dict.fromkeys(self.module.parameters()):
                if p.is_floating_point() and p.numel():
                    usual = max(float(p.square().mean().sqrt()) / 10, _LEAST)
                    noise = torch.randn(p.shape, generator=random, dtype=torch.float64)
                    p.add_((noise * usual).to(p.dtype))

    def move_statistics(self, seed: int) -> None:
        """Move the running statistics of all norms that training may update; they stay positive."""
        random = torch.Generator().manual_seed(seed)
        for part in self.module.modules():
            for name, x in part.named_buffers(recurse=False):
                if isinstance(part, nn.modules.batchnorm._NormBase) and part.training and "running" in name:
                    x.add_(torch.rand(x.shape, generator=random, dtype=torch.float64).to(x.dtype))

    def call(
        self,
        inputs: Tensors,
        cotangents: Mapping[str, Tensor | None],
        draws: Pinned,
        mode: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Tensor]:
        """Call the module, and go backward if it trains; returns results by the titles of ``Pass.results``.

        ``cotangents``: by output the gradient that it is given. ``mode`` is on in both directions. A module
        that predicts may return the first outputs alone, without those of deep supervision.
        """
        args, kwargs = self.signature.split({name: x.clone() for name, x in inputs.items()})
        self.module.zero_grad(set_to_none=True)
        trains = any(given is not None for given in cotangents.values())
        # Faster kernels of attention lose gradients of queries that have the least number added to all keys.
        with torch.set_grad_enabled(trains), sdpa_kernel(SDPBackend.MATH):
            with mode or nullcontext(), draws, Wide(self.dtype), limits_of(self.own_dtype, self.dtype):
                self.runs = bool(self.runs)
                returned = self.module(*args, **kwargs)
            self.runs = True
            outputs = tensors_in(returned)
            if len(outputs) > len(cotangents) or (trains and len(outputs) < len(cotangents)):
                counts = f"{len(outputs)} tensors, its file {len(cotangents)}"
                raise UnsupportedError(f"the module returns {counts}")
            pairs = [
                (y, given)
                for y, given in zip(outputs, cotangents.values(), strict=False)
                if y.requires_grad and given is not None and given.shape == y.shape
            ]
            with mode or nullcontext(), RightNorms():  # type: ignore[no-untyped-call]
                if pairs:
                    torch.autograd.backward([y for y, _ in pairs], [given for _, given in pairs])
        results = {f"output {name}": y.detach() for name, y in zip(cotangents, outputs, strict=False)}
        return results | self._left() if trains else results

    def _left(self) -> dict[str, Tensor]:
        left = {}
        for name, fact in self.facts.items():
            tensor = self.tensors[fact.names[0]]
            if fact.kind == "statistic":
                left[f"update {name}"] = tensor.detach().clone()
            elif tensor.requires_grad and tensor.grad is not None:
                left[f"gradient {name}"] = tensor.grad.detach().clone()
        return left


def compare(twin: Twin, model: OnnxModel, made: Study) -> str:
    """Train module and file on the same numbers, and say what differs, '' if nothing does.

    The second call finds what the first has changed (running statistics). Code that decides by data
    unless it is traced is called once more at each size, with masks that hide nothing. Raises
    UnsupportedError where the two do not take the same random numbers.
    """
    all_set = [replace(made.data, all_set=True)] if made.found.untraced else []
    for number, shapes in enumerate((made.sizes.first, made.sizes.second)):
        if number:
            twin.move(number)
        file_pass = training_pass(model, shapes, twin.precision)
        for data in (made.data, *all_set):
            if difference := _one(twin, file_pass, data, shapes, number, not number):
                return difference
    return ""


def _one(twin: Twin, made: Pass, data: Data, shapes: Shapes, seed: int, ties: bool = False) -> str:
    """Call both on the same numbers, and compare all results: say what differs, '' if nothing does.

    Code that sorts, and whose results rounding moves where numbers are equal, is compared where none are.
    """
    start = twin.held()
    for positive in (False, True):
        inputs = data.inputs(shapes, twin.dtype, seed, ties=ties, positive=positive)
        cotangents = _cotangents(made, twin.dtype, seed)
        draws = Pinned(made.draws, twin.dtype, seed)
        wanted = twin.call(inputs, cotangents, draws)
        if all(bool(x.isfinite().all()) for x in wanted.values()):
            break
        twin.put(start)
    draws.check_all_drawn()
    given = inputs | {name: x for name, x in cotangents.items() if x is not None}
    found = made.run(start, given, draws.random)
    off = errors(found if made.cotangents else {title: found[title] for title in wanted}, wanted)
    allowed = dict.fromkeys(off, FLOOR[twin.dtype])
    if any(error > allowed[title] for title, error in off.items()):
        after = twin.held()
        for number in range(ROUNDINGS):
            twin.put(start)
            again = Pinned(made.draws, twin.dtype, seed)
            moved = errors(twin.call(inputs, cotangents, again, Jitter(number)), wanted)
            allowed = {title: max(most, NOISE * moved.get(title, 0.0)) for title, most in allowed.items()}
        allowed = {title: min(most, MOST_NOISE) for title, most in allowed.items()}
        twin.put(after)
    wrong = [title for title, error in off.items() if not error <= allowed[title]]
    if not wrong:
        return ""
    twin.put(start)
    recorder, known = Recorder(Places(twin.module)), list[tuple[float, ...]]()
    twin.call(inputs, cotangents, Pinned(made.draws, twin.dtype, seed), recorder)
    if ties and MOST_NOISE in allowed.values() and _SORTING & recorder.names:
        twin.put(start)
        return _one(twin, made, data, shapes, seed)
    made.run(start, given, draws.random, lambda x: known.append(mark(x)))
    first = min(wrong, key=lambda title: _ORDER.index(title.partition(" ")[0]))
    place = first_difference(recorder.operations, known)
    where = f", first in {place}" if place else ""
    sizes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    rounding = f"(rounding: {allowed[first]:.0e})"
    return f"its {first} is off by {off[first]:.1e} {rounding} for {sizes}{where}"


def _cotangents(made: Pass, dtype: torch.dtype, seed: int) -> dict[str, Tensor | None]:
    """Return a gradient for each output that has one; None for others, and for all in a prediction."""
    random = torch.Generator().manual_seed(seed)
    cotangents: dict[str, Tensor | None] = {name: None for name, _ in made.imported.outputs}
    for name, value in made.cotangents.items():
        drawn = torch.randn(made.graph.values[value].shape, generator=random, dtype=torch.float64)
        cotangents[name] = drawn.to(dtype)
    return cotangents


def differences(module: nn.Module, signature: Signature, model: OnnxModel, made: Study) -> tuple[str, str]:
    """Say in what a file trains, and in what it predicts, otherwise than its module; '' where in nothing.

    In float64, but in float32 for code with types of its own that does not run in float64.
    """
    assert model.metadata is not None
    held = {tensor.names[0]: tensor.tensor for tensor in named_tensors(module)}
    for name, fact in model.metadata.facts.items():
        if not np.array_equal(model.initializers[name].raw(), array_of(held[fact.names[0]]), equal_nan=True):
            return f"'{fact.names[0]}' holds other numbers there", ""
    twin = Twin(module, signature, model.metadata, torch.float64)
    try:
        difference = compare(twin, model, made)
    except Exception:  # whatever PyTorch raises of types that do not fit; any other failure shows in float32
        if twin.runs is not False:
            raise
        twin = Twin(module, signature, model.metadata, torch.float32)
        difference = compare(twin, model, made)
    if difference:
        return difference, ""
    return "", _predicts_otherwise(Twin(module, signature, model.metadata, twin.dtype), model, made)


def _predicts_otherwise(twin: Twin, model: OnnxModel, made: Study) -> str:
    """Say in what predictions of a file are others than the module's in evaluation mode; '' if in nothing."""
    free = any(name == BATCH for name in made.free.names.values())
    shapes = {name: (1, *shape[1:]) if free else shape for name, shape in made.sizes.second.items()}
    twin.move(len(_ORDER))  # else other parts that start from the same numbers would do
    twin.move_statistics(len(_ORDER))
    twin.module.eval()
    zeros = _zeros_at_padding(twin.module)
    try:
        file_pass = inference_pass(model, shapes, twin.precision)
        return _one(twin, file_pass, made.data, shapes, len(_ORDER)) or "".join(zeros[:1])
    except UnsupportedError as error:
        return str(error)
    except Exception as error:  # a module that is trained may never have been called so
        return first_line(error)


def _zeros_at_padding(module: nn.Module) -> list[str]:
    """Return a list that will name the encoders of a module that are called with padding and set it to zero.

    They do so without gradients alone, and where padding comes last, by kernels that are off here.
    """
    found = list[str]()

    def look(name: str, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (*args, None, None, None)[2] is not None or kwargs.get("src_key_padding_mask") is not None:
            encoder = name or type(module).__name__
            found.append(f"'{encoder}' gives zeros at padding (not with enable_nested_tensor=False)")

    for name, part in module.named_modules():
        if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor:
            part.register_forward_pre_hook(partial(look, name), with_kwargs=True)
    return found
