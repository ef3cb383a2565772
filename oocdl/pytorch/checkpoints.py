"""Calls parts under ``torch.utils.checkpoint`` as they are: a run keeps activations by its own budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import checkpoint

running: list[Any] = []
"""The parts that run now, the innermost last; PyTorch will call them once more, in backward."""


@contextlib.contextmanager
def _noted(part: Any) -> Iterator[None]:
    running.append(part)
    try:
        yield
    finally:
        running.pop()


def _reentrant(part: Callable[..., Any], _: bool, *args: Any) -> Any:
    # Where no argument has a gradient, PyTorch gives the weights of the part none, either.
    follows = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with _noted(part), torch.set_grad_enabled(follows and torch.is_grad_enabled()):
        return part(*args)


def _around(
    part: Any,
    _: bool,
    contexts: Callable[[], tuple[AbstractContextManager[Any], Any]],
    *how: Any,
    **named: Any,
) -> Iterator[None]:
    with _noted(part), contexts()[0]:
        yield


@contextlib.contextmanager
def called_once() -> Iterator[None]:
    """Have checkpoints of both kinds call their part, and nothing else."""
    # A second call has the random numbers of the first: only the statistics of norms are others after it.
    # The functions are PyTorch's own insides, since modules hold the one that is called by any name.
    generator = "_checkpoint_without_reentrant_generator"
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(checkpoint.CheckpointFunction, "apply", _reentrant))
        if hasattr(checkpoint, generator):  # without it such modules are refused
            patches.enter_context(patch.object(checkpoint, generator, _around))
        yield
