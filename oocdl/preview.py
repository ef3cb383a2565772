"""The plan that people read, and can draw, before anything runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dask.delayed import Delayed
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oocdl.compile import Compiled
from oocdl.config import Settings
from oocdl.graph.live import live_bytes
from oocdl.graph.plan import LayerPlan
from oocdl.ops.optimizers import scalars
from oocdl.planning import Machine
from oocdl.session import step_delayed
from oocdl.sources import StepInfo
from oocdl.storage.dataset import Dataset

BLOCK_BYTES = 4096
"""What file systems round the size of a file up to; a folder takes one, too."""
SPILLED_CHUNK_BYTES = 3 * BLOCK_BYTES
"""A folder, ``zarr.json``, and the data's last block."""
VERSIONS = 3
"""Of weights and state that are on disk while one is written."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step will do and need. Made by ``oocdl.plan``; nothing has run.

    ``str(plan)`` is a table. Bytes read and written are those that units move when
    nothing fits in RAM; what stays in the tier is neither read nor written.
    """

    compiled: Compiled
    settings: Settings
    machine: Machine
    model: str
    dataset: Dataset
    batches: Callable[[int], Iterator[tuple[int, int, tuple[int, ...]]]]
    """(step, epoch, dataset rows) from a step on."""
    ragged: Compiled | None = None
    """The smaller last batch of an epoch, if there is one."""

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """All layers in order."""
        return self.compiled.plan.layers

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process: base, and everything the tier may hold."""
        units = self.compiled.plan.peak_unit_bytes * (self.machine.threads + 1)
        stored = sum(layer.written_bytes for layer in self.layers) + self.weight_bytes
        return self.machine.base_bytes + min(self.machine.capacity_bytes, units + stored)

    @property
    def weight_bytes(self) -> int:
        """Weights and state."""
        values = self.compiled.plan.factored.graph.values
        return sum(values[name].nbytes for name in self.compiled.pieces)

    @property
    def spill_bytes(self) -> int:
        """At most this much is in the spill at once: nothing where all that lives at once fits in memory."""
        kinds = [self.compiled] if self.ragged is None else [self.compiled, self.ragged]
        most = 0
        for kind in kinds:
            # Threads run so many units beyond the plan's order.
            ahead = kind.plan.peak_unit_bytes * (self.machine.threads + 1)
            if live_bytes(kind.plan, kind.graph, 0) + ahead > self.machine.capacity_bytes:
                most = max(most, live_bytes(kind.plan, kind.graph, SPILLED_CHUNK_BYTES) + ahead)
        return most

    @property
    def version_bytes(self) -> int:
        """One version of weights and state in the run directory."""
        files = sum(len(pieces) + 2 for pieces in self.compiled.pieces.values())
        return self.weight_bytes + files * BLOCK_BYTES

    @property
    def store_bytes(self) -> int:
        """The run directory: three versions (committed, the one before, and the next), and ``keep``."""
        values = self.compiled.plan.factored.graph.values
        kept = sum(values[name].nbytes for name in self.compiled.kept.values())
        groups = (len(self.compiled.pieces) + 1) * 2 * BLOCK_BYTES  # an array's versions are in a group
        return VERSIONS * self.version_bytes + groups + kept

    @property
    def disk_bytes(self) -> int:
        """At most this much disk: spill and run directory."""
        return self.spill_bytes + self.store_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that units read in a step."""
        return self.compiled.plan.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that units write in a step."""
        return self.compiled.plan.written_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of a step."""
        return self.compiled.plan.flops

    @property
    def seconds(self) -> float:
        """A rough prediction of the seconds of a step."""
        return self.compiled.plan.seconds

    @property
    def tasks(self) -> int:
        """Units of a step."""
        return self.compiled.plan.tasks

    def delayed(self, step: int = 0) -> Delayed:
        """One step from the model file's weights, as a ``dask.delayed.Delayed`` whose value is the loss.

        ``visualize()`` draws its graph; ``compute()`` runs it with any local Dask scheduler.

        >>> plan.delayed(0).visualize("step.svg")  # doctest: +SKIP
        """
        rows = next(rows for number, _, rows in self.batches(step) if number == step)
        info = StepInfo(step, self.settings.seed, rows, scalars(self.settings.optimizer, step))
        compiled = self.compiled
        if self.ragged is not None and len(rows) != self.settings.batch_size:
            compiled = self.ragged
        return step_delayed(compiled, self.dataset, self.settings, self.machine, info)

    def table(self) -> Table:
        """Layers with their cuts and costs."""
        table = Table(title=f"{self.model}: one step of batch {self.settings.batch_size}")
        for name in ("layer", "shards", "unit MiB", "read MiB", "write MiB", "GFLOP"):
            table.add_column(name, justify="left" if name == "layer" else "right")
        names = self.compiled.plan.classes.names
        for layer in self.layers:
            cut = " ".join(f"{names[c]}:{n}" for c, n in layer.grid.items() if n > 1)
            table.add_row(
                Text(layer.layer.name),
                cut or "1",
                f"{layer.peak_bytes / 2**20:.1f}",
                f"{layer.read_bytes / 2**20:.1f}",
                f"{layer.written_bytes / 2**20:.1f}",
                f"{layer.flops / 1e9:.2f}",
            )
        return table

    def summary(self) -> str:
        """One line."""
        return (
            f"{len(self.layers)} layers, {self.tasks} tasks a step, peak {self.peak_bytes >> 20} MiB of "
            f"{self.settings.memory_bytes >> 20} MiB, reads {self.read_bytes / 1e9:.2f} GB and writes "
            f"{self.written_bytes / 1e9:.2f} GB if nothing fits, {self.flops / 1e9:.1f} GFLOP, "
            f"engine {self.machine.engine}, {self.machine.threads} threads"
        )

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=110, force_terminal=False)
        console.print(self.table())
        console.print(self.summary(), soft_wrap=True)
        return out.getvalue()
