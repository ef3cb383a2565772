"""Planned traffic of a training step: does it grow with the depth of the network?

Nothing is trained: models are written, planned, and what a step would read and
write if nothing stayed in memory is set beside V, the bytes of the outputs of all
convolutions and matrix products of a forward pass.

    python perf/traffic.py [--toy] [--memory 4GiB] [--only gpt] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import zarr
from models import GPT, ResNet, export, forward_bytes
from table import markdown

import oocdl
from oocdl.graph.cost import made_bytes, read_bytes
from oocdl.graph.ir import Role
from oocdl.zoo import write_unet3d


@dataclass(frozen=True)
class Case:
    """A model and the shapes of its data."""

    name: str
    blocks: int
    write: Callable[[Path], Path]
    inputs: tuple[tuple[int, ...], str]
    """Shape and dtype, samples first."""
    labels: tuple[int, ...]
    ports: tuple[str, str] = ("x", "y")
    """Names of the model's input and output."""

    @property
    def batch(self) -> int:
        """All samples in one batch."""
        return self.labels[0]


@dataclass(frozen=True)
class Traffic:
    """One row of the table; bytes and FLOPs of a step."""

    model: str
    blocks: int
    layers: int
    tasks: int
    forward_bytes: int
    read_bytes: int
    written_bytes: int
    weight_traffic_bytes: int
    """Of these, weights, optimizer state and weight gradients: they do not grow with the batch."""
    flops: int
    plan_seconds: float

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def activations(self) -> int:
        """Bytes read and written of activations, their gradients and data."""
        return self.moved - self.weight_traffic_bytes


def weight_traffic(planned: oocdl.Plan) -> int:
    """Bytes moved of weights, optimizer state and weight gradients, partial ones included."""
    factored = planned.compiled.plan.factored
    values = factored.graph.values
    roles = (Role.WEIGHT, Role.STATE)
    shapes = {value.shape for value in values.values() if value.role in roles}
    total = 0
    for layer in planned.layers:
        for unit in layer.units:
            for moved in (read_bytes(unit, factored), made_bytes(unit, factored)):
                total += sum(count for name, count in moved.items() if values[name].shape in shapes)
    return total


def gpt(blocks: int, width: int, heads: int, batch: int, tokens: int, vocabulary: int) -> Case:
    """A GPT with its token ids and labels."""

    def write(folder: Path) -> Path:
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        return export(GPT(blocks, width, heads, tokens, vocabulary), ids, folder / "model.onnx")

    return Case(f"GPT-{blocks}", blocks, write, ((batch, tokens), "int64"), (batch, tokens))


def resnet(blocks: Sequence[int], width: int, batch: int, size: int, classes: int) -> Case:
    """A bottleneck ResNet with its images and labels."""

    def write(folder: Path) -> Path:
        images = torch.zeros(batch, 3, size, size)
        return export(ResNet(blocks, width, classes), images, folder / "model.onnx")

    depth = 3 * sum(blocks) + 2
    return Case(f"ResNet-{depth}", sum(blocks), write, ((batch, 3, size, size), "float32"), (batch,))


def unet(base: int, size: int, depth: int = 3) -> Case:
    """The U-Net of the zoo with one volume and its labels."""

    def write(folder: Path) -> Path:
        return write_unet3d(folder / "model.onnx", base=base, depth=depth, size=(size,) * 3)

    shape = (1, 1, size, size, size)
    return Case(
        f"U-Net {base} at {size}",
        2 * depth + 1,
        write,
        (shape, "float32"),
        (1, *shape[2:]),
        ("image", "logits"),
    )


FULL = [
    *(gpt(blocks, 512, 8, 8, 256, 8192) for blocks in (6, 12, 24)),
    resnet((3, 4, 6, 3), 64, 4, 224, 1000),
    resnet((3, 8, 36, 3), 64, 4, 224, 1000),
    unet(16, 128),
]
TOY = [
    *(gpt(blocks, 32, 2, 2, 16, 64) for blocks in (1, 2)),
    resnet((1, 1), 8, 2, 32, 10),
    resnet((1, 3), 8, 2, 32, 10),
    unet(4, 16, 2),
]


def measure(case: Case, memory: str) -> Traffic:
    """Write the model, plan a step, count. The dataset has shapes but no data."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        path = case.write(folder)
        group = zarr.open_group(str(folder / "data.zarr"), mode="w")
        shape, dtype = case.inputs
        group.create_array("inputs", shape=shape, dtype=dtype, chunks=(1, *shape[1:]))
        labels = case.labels
        group.create_array("labels", shape=labels, dtype="int64", chunks=(1, *labels[1:]))
        begun = time.monotonic()
        planned = oocdl.plan(
            path, folder / "data.zarr", memory=memory, batch_size=case.batch, allow_missing_chunks=True,
            inputs={case.ports[0]: "inputs"}, targets={case.ports[1]: "labels"},
        )  # fmt: skip
        seconds = time.monotonic() - begun
        return Traffic(
            case.name, case.blocks, len(planned.layers), planned.tasks, forward_bytes(path, case.batch),
            planned.read_bytes, planned.written_bytes, weight_traffic(planned), planned.flops, seconds,
        )  # fmt: skip


HEADS = (
    "model", "layers", "tasks", "V GB", "read GB", "written GB", "of this weights", "weights/block MB",
    "activations/block MB", "activations/V", "FLOP/byte", "plan s",
)  # fmt: skip


def cells(row: Traffic) -> tuple[str, ...]:
    """One line of the table."""
    return (
        row.model, f"{row.layers}", f"{row.tasks}", f"{row.forward_bytes / 1e9:.2f}",
        f"{row.read_bytes / 1e9:.2f}", f"{row.written_bytes / 1e9:.2f}",
        f"{row.weight_traffic_bytes / 1e9:.2f}", f"{row.weight_traffic_bytes / 1e6 / row.blocks:.1f}",
        f"{row.activations / 1e6 / row.blocks:.1f}", f"{row.activations / row.forward_bytes:.1f}",
        f"{row.flops / row.moved:.0f}", f"{row.plan_seconds:.1f}",
    )  # fmt: skip


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="tiny models, for tests")
    parser.add_argument("--memory", default="4GiB", help="budget that the plan keeps")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows: list[Traffic] = []
    for case in TOY if args.toy else FULL:
        if args.only.lower() in case.name.lower():
            rows.append(measure(case, args.memory))
    print(markdown(HEADS, [cells(row) for row in rows]))
    if args.json:
        found: list[dict[str, Any]] = [asdict(row) for row in rows]
        args.json.write_text(json.dumps({"memory": args.memory, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
