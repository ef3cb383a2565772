"""The plan that people read, and can draw, before anything runs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dask.delayed import Delayed
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oocdl.compile import Compiled
from oocdl.config import Settings
from oocdl.graph.ir import Role
from oocdl.graph.memory import footprint
from oocdl.graph.plan import LayerPlan, StepPlan
from oocdl.ops import RULES
from oocdl.passes import FIRST, MAIN, NEXT, RAGGED, Course
from oocdl.planning import SPARE, Machine, gives_up, rates_of
from oocdl.session import step_delayed
from oocdl.simulate import simulate
from oocdl.storage.dataset import Dataset
from oocdl.timeline import Simulated

BLOCK_BYTES = 4096
"""What file systems round the size of a file up to; a folder takes one, too."""
SPILLED_CHUNK_BYTES = 3 * BLOCK_BYTES
"""A folder, ``zarr.json``, and the data's last block."""
VERSIONS = 3
"""Of weights and state that are on disk while one is written."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one step will do and need. Made by ``oocdl.plan``; nothing has run.

    ``str(plan)`` is a table of the layers; with ``accumulate`` of those of a step's last pass.
    Bytes read and written are those that units move when nothing fits in RAM; what stays in the
    tier is neither read nor written.
    """

    kinds: Mapping[str, Compiled]
    """All kinds of passes, by plan id."""
    settings: Settings
    machine: Machine
    model: str
    dataset: Dataset
    course: Course
    """All steps of the run."""

    @property
    def compiled(self) -> Compiled:
        """The pass that makes an update."""
        return self.kinds[MAIN]

    @property
    def ragged(self) -> Compiled | None:
        """The same for the smaller last batch of an epoch, if there is one."""
        return self.kinds.get(RAGGED)

    @property
    def passes(self) -> tuple[StepPlan, ...]:
        """The plan of each pass of a step."""
        earlier = [self.kinds[FIRST].plan for _ in range(self.course.passes - 1)]
        return (*earlier, self.compiled.plan)

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """All layers in order."""
        return self.compiled.plan.layers

    @cached_property
    def room_bytes(self) -> int:
        """Memory for arrays and running programs, if all of it is needed."""
        return self.machine.room_bytes(kind.plan for kind in self.kinds.values())

    @cached_property
    def simulated(self) -> tuple[Simulated, ...]:
        """Each pass of a step, as it is expected to go once the run is under way."""
        count = self.course.passes
        ids = [*([FIRST] if count > 1 else []), *([NEXT] * (count - 2)), MAIN]
        rates, known = rates_of(self.machine.engine), {}
        for plan_id in dict.fromkeys(ids):
            known[plan_id] = simulate(
                self.kinds[plan_id].graph,
                self.room_bytes,
                self.machine.threads,
                self.machine.threads + 1,
                rates,
                RULES,
                not gives_up(self.compiled.plan, self.machine),
            )
        return tuple(known[plan_id] for plan_id in ids)

    @property
    def most_bytes(self) -> int:
        """Memory that arrays and running programs will take."""
        # Weights are read in, and committed, a piece at a time.
        piece = 2 * max(footprint(nbytes) for nbytes in self.compiled.graph.input_bytes.values())
        peak = max(one.peak_tier_bytes for one in self.simulated)
        return min(self.room_bytes, int(SPARE * peak) + piece)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process: base, arrays and running programs."""
        return self.machine.base_bytes + self.most_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights and state."""
        values = self.compiled.plan.factored.graph.values
        return sum(values[name].nbytes for name in self.compiled.pieces)

    @property
    def sum_bytes(self) -> int:
        """Sums of gradients, which go from pass to pass of a step."""
        return sum(value.nbytes for value in self.compiled.plan.factored.graph.of_role(Role.SUM))

    @property
    def spill_bytes(self) -> int:
        """Disk that the spill takes at most, files kept for the next step and their blocks included."""
        files = max(len(kind.graph.calls) + len(kind.graph.inputs) for kind in self.kinds.values())
        peak = max(one.peak_spill_bytes for one in self.simulated)
        return peak + files * SPILLED_CHUNK_BYTES if peak else 0

    @property
    def spill_read_bytes(self) -> int:
        """Bytes that a step reads from the spill."""
        return sum(one.read_bytes for one in self.simulated)

    @property
    def spill_written_bytes(self) -> int:
        """Bytes that a step writes to the spill."""
        return sum(one.written_bytes for one in self.simulated)

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
        return sum(plan.read_bytes for plan in self.passes)

    @property
    def written_bytes(self) -> int:
        """Bytes that units write in a step."""
        return sum(plan.written_bytes for plan in self.passes)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step."""
        return sum(plan.flops for plan in self.passes)

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step, by the machine's rates (``oocdl info --machine``)."""
        return sum(one.seconds for one in self.simulated)

    @property
    def tasks(self) -> int:
        """Units of a step."""
        return sum(plan.tasks for plan in self.passes)

    def delayed(self, step: int = 0) -> Delayed:
        """One step from the model file's weights, as a ``dask.delayed.Delayed`` whose value is the loss.

        ``visualize()`` draws its graph; ``compute()`` runs it with any local Dask scheduler.

        >>> plan.delayed(0).visualize("step.svg")  # doctest: +SKIP
        """
        passes = self.course.passes_of(next(self.course.steps_from(step)))
        return step_delayed(self.kinds, passes, self.dataset, self.settings, self.machine)

    def table(self) -> Table:
        """Layers with their cuts and costs."""
        title = f"{self.model}: one step of batch {self.settings.batch_size}"
        if self.course.passes > 1:
            title += f" x {self.course.passes} passes, of which the last"
        table = Table(title=title)
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
