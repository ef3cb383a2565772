"""What is measured: a network and the shapes of its data, and how to write both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
import zarr

from oocdl.presets.unets import write_unet3d

SLAB_BYTES = 16 << 20
"""At most so much of a dataset is in memory while it is written."""


@dataclass(frozen=True)
class Case:
    """A model and the shapes of its data."""

    name: str
    blocks: int
    write: Callable[[Path], Path]
    """Writes the ONNX file; returns its path."""
    inputs: tuple[tuple[int, ...], str]
    """Shape and dtype, samples first."""
    labels: tuple[int, ...]
    classes: int
    """Labels are below this, and so are inputs that are whole numbers."""
    twin: tuple[str, tuple[Any, ...]]
    """The same network in PyTorch: a class of ``models.py``, and what it is made of."""
    ports: tuple[str, str] = ("x", "y")
    """Names of the model's input and output."""

    @property
    def batch(self) -> int:
        """All samples in one batch."""
        return self.labels[0]

    def options(self) -> dict[str, Any]:
        """Of ``fit``, for the data that ``write_data`` writes."""
        names = {"inputs": {self.ports[0]: "inputs"}, "targets": {self.ports[1]: "labels"}}
        return {"batch_size": self.batch, **names}


def _exported(
    name: str, blocks: int, twin: tuple[str, Any], inputs: Any, labels: tuple[int, ...], classes: int
) -> Case:
    """A network that PyTorch writes."""

    def write(path: Path) -> Path:
        shape, dtype = inputs
        network = getattr(models, twin[0])(*twin[1])
        return models.export(network, torch.zeros(shape, dtype=getattr(torch, dtype)), path)

    return Case(name, blocks, write, inputs, labels, classes, twin)


def gpt(blocks: int, width: int, heads: int, batch: int, tokens: int, vocabulary: int) -> Case:
    """A GPT with its token ids and labels."""
    made, shape = ("GPT", (blocks, width, heads, tokens, vocabulary)), (batch, tokens)
    return _exported(f"GPT-{blocks}", blocks, made, (shape, "int64"), shape, vocabulary)


def resnet(blocks: Sequence[int], width: int, batch: int, size: int, classes: int) -> Case:
    """A bottleneck ResNet with its images and labels."""
    made, shape = ("ResNet", (tuple(blocks), width, classes)), (batch, 3, size, size)
    name = f"ResNet-{3 * sum(blocks) + 2}"
    return _exported(name, sum(blocks), made, (shape, "float32"), (batch,), classes)


def unet(base: int, size: int | Sequence[int], depth: int = 3, samples: int = 1) -> Case:
    """The U-Net of the zoo with volumes, cubes or not, and their labels."""
    space = (size,) * 3 if isinstance(size, int) else tuple(size)

    def write(path: Path) -> Path:
        return write_unet3d(path, base=base, depth=depth, size=space)

    name = f"U-Net {base} at {'x'.join(map(str, space if len(set(space)) > 1 else space[:1]))}"
    data = ((samples, 1, *space), "float32"), (samples, *space), 4
    return Case(name, 2 * depth + 1, write, *data, ("UNet3d", (1, 4, base, depth)), ("image", "logits"))


def plain(layers: int, width: int, size: int) -> Case:
    """Convolutions without norms or skips, with one cube and its labels."""
    space, made = (size,) * 3, ("PlainNet3d", (layers, width))
    name = f"plain {layers}x{width} at {size}"
    return _exported(name, layers, made, ((1, 1, *space), "float32"), (1, *space), 4)


def recurrent(layers: int, width: int, batch: int, steps: int) -> Case:
    """LSTM over sequences, with a label for each step."""
    made, shape = ("Recurrent", (64, width, layers, 32)), (batch, steps)
    return _exported(f"LSTM {layers}x{width}", layers, made, ((*shape, 64), "float32"), shape, 32)


def images(where: str, name: str, batch: int, size: int, **options: Any) -> Case:
    """A network of a library with its images, and a label for each."""
    made = ("library", (where, name, {"num_classes": 100, **options}))
    return _exported(name, 1, made, ((batch, 3, size, size), "float32"), (batch,), 100)


def res_enc(base: int, stages: int, size: int) -> Case:
    """nnU-Net's residual encoder U-Net with one cube and its labels."""
    space, made = (size,) * 3, ("res_enc", (base, stages, 4))
    return _exported(f"ResEnc {base} at {size}", 1, made, ((1, 1, *space), "float32"), (1, *space), 4)


def mlp(layers: int, width: int, batch: int) -> Case:
    """A perceptron whose weights are most of it."""

    widths = (width,) * (layers + 1)
    data = ((batch, width), "float32"), (batch,), width

    def write(path: Path) -> Path:
        return models.write_mlp(path, widths)

    return Case(f"MLP {layers}x{width}", layers, write, *data, ("Mlp", (widths,)))


def write_data(case: Case, path: Path, empty: bool = False) -> Path:
    """A dataset of noise, written slab by slab; with ``empty`` it has shapes and no data."""
    group = zarr.open_group(str(path), mode="w")
    random = np.random.default_rng(0)
    shape, dtype = case.inputs
    for name, extents, kind in (("inputs", shape, dtype), ("labels", case.labels, "int64")):
        slab = _slab(extents, np.dtype(kind).itemsize)
        array = group.create_array(
            name, shape=extents, dtype=kind, chunks=slab, config={"write_empty_chunks": True}
        )
        for place in [] if empty else _slabs(extents, slab):
            part = tuple(where.stop - where.start for where in place)
            if kind == "int64":
                array[place] = random.integers(0, case.classes, part)
            else:
                array[place] = random.standard_normal(part, np.float32)
    return path


def _slab(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """A chunk of one sample, cut along its longest axis until it is small enough."""
    slab = [1, *shape[1:]]
    while np.prod(slab) * itemsize > SLAB_BYTES:
        longest = slab.index(max(slab))
        slab[longest] = -(-slab[longest] // 2)
    return tuple(int(extent) for extent in slab)


def _slabs(shape: Sequence[int], slab: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    counts = [-(-extent // size) for extent, size in zip(shape, slab, strict=True)]
    for index in np.ndindex(*counts):
        yield tuple(
            slice(at * size, min((at + 1) * size, extent))
            for at, size, extent in zip(index, slab, shape, strict=True)
        )
