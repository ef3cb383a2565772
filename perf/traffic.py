"""Planned traffic of a training step: does it grow with the depth of the network?

Nothing is trained: models are written, planned, and what a step would read and
write if nothing stayed in memory is set beside V, the bytes of the outputs of all
convolutions and matrix products of a forward pass.

    python perf/traffic.py [--toy] [--memory 4GiB] [--only gpt] [--json FILE]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from cases import Case, gpt, resnet, unet, write_data
from measure import report, short_parser
from models import forward_bytes

import oocdl
from oocdl.graph.ir.graph import Role
from oocdl.planning.tile_search import bytes_of


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
            for moved in (bytes_of(unit.reads, factored), bytes_of(unit.makes, factored)):
                total += sum(count for name, count in moved.items() if values[name].shape in shapes)
    return total


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
        path = case.write(folder / "model.onnx")
        data = write_data(case, folder / "data.zarr", empty=True)
        begun = time.monotonic()
        planned = oocdl.plan(path, data, memory=memory, **case.options(), allow_missing_chunks=True)
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
    parser = short_parser(__doc__)
    parser.add_argument("--memory", default="4GiB", help="budget that the plan keeps")
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    cases = [case for case in (TOY if args.toy else FULL) if args.only.lower() in case.name.lower()]
    rows = [measure(case, args.memory) for case in cases]
    report(args, HEADS, [cells(row) for row in rows], rows)


if __name__ == "__main__":
    main()
