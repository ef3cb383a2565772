"""A copy of a module that is called on the same numbers as its file."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from oocdl.errors import UnsupportedError
from oocdl.graph.onnx.metadata import Metadata
from oocdl.pytorch.comparison.modes import Pinned, Wide
from oocdl.pytorch.module_calls import Signature, Tensors, tensors_in

_LEAST = 0.02
"""Weights are moved by a tenth of their usual size, and at least by so much: zeros are moved, too."""


class Twin:
    """The copy, in one dtype, and its tensors by the names of the file."""

    def __init__(
        self, module: nn.Module, signature: Signature, metadata: Metadata, dtype: torch.dtype
    ) -> None:
        self.module = copy.deepcopy(module).cpu().to(dtype)
        self.signature, self.dtype, self.facts = signature, dtype, metadata.facts
        self.precision = str(dtype).removeprefix("torch.")
        self.runs: bool | None = None
        """Whether the module runs in this dtype; None before its first call."""
        self.tensors: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(self.module.named_buffers(remove_duplicate=False))

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

    def call(
        self,
        inputs: Tensors,
        cotangents: Mapping[str, Tensor | None],
        draws: Pinned,
        mode: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Tensor]:
        """Call the module, and go backward if it trains; returns results by the titles of ``Pass.results``.

        ``cotangents``: by output the gradient that it is given. ``mode`` is on in both directions.
        """
        args, kwargs = self.signature.split({name: x.clone() for name, x in inputs.items()})
        self.module.zero_grad(set_to_none=True)
        trains = any(given is not None for given in cotangents.values())
        with torch.set_grad_enabled(trains):
            with mode or nullcontext(), draws, Wide(self.dtype):
                self.runs = bool(self.runs)
                returned = self.module(*args, **kwargs)
            self.runs = True
            outputs = tensors_in(returned)
            if len(outputs) != len(cotangents):
                counts = f"{len(outputs)} tensors, its file {len(cotangents)}"
                raise UnsupportedError(f"the module returns {counts}")
            pairs = [
                (y, given)
                for y, given in zip(outputs, cotangents.values(), strict=True)
                if y.requires_grad and given is not None and given.shape == y.shape
            ]
            with mode or nullcontext():
                if pairs:
                    torch.autograd.backward([y for y, _ in pairs], [given for _, given in pairs])
        results = {f"output {name}": y.detach() for name, y in zip(cotangents, outputs, strict=True)}
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
