"""A network in PyTorch that is what its ONNX file is, with the same data and loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
import zarr
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def twin(made: Sequence[Any], model: Path) -> nn.Module:
    """The network, with the weights of the file."""
    name, arguments = made
    network: nn.Module = getattr(models, name)(*arguments)
    models.load_weights(network, model)
    return network.train()


def batch(dataset: Path) -> tuple[Tensor, Tensor]:
    """All inputs and labels."""
    group = zarr.open_group(str(dataset), mode="r")
    inputs, labels = (torch.from_numpy(group[name][...]) for name in ("inputs", "labels"))  # type: ignore[index]
    return inputs, labels.long()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy; the classes are the last axis of sequences, else that after the samples."""
    if logits.shape[:-1] == labels.shape:
        logits, labels = logits.flatten(0, -2), labels.flatten()
    return functional.cross_entropy(logits, labels)


def checkpoint_blocks(network: nn.Module) -> None:
    """Keep nothing of a block but its input."""
    for module in network.modules():
        if isinstance(module, models.BLOCKS):
            name = "join" if isinstance(module, models.Up) else "forward"
            setattr(module, name, partial(checkpoint, getattr(module, name), use_reentrant=False))
