"""The plan that people read, and can draw, before anything runs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

from dask.delayed import Delayed
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oocdl.compile import Compiled
from oocdl.config import Settings
from oocdl.graph.ir import Role
from oocdl.graph.plan import LayerPlan, StepPlan
from oocdl.passes import FIRST, MAIN, RAGGED, Course
from oocdl.planning import Machine, needs_of
from oocdl.session import step_delayed
from oocdl.storage.dataset import Dataset


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

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process: base, running programs, and what the tier may hold."""
        share = self.machine.share(needs_of(self.passes, self.machine.threads))
        return self.machine.base_bytes + share.heap_bytes + share.tier_bytes

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
    def disk_bytes(self) -> int:
        """At most this much spill and run store: what a pass stores, and three versions of the weights."""
        return max(plan.written_bytes for plan in self.passes) + self.sum_bytes + 3 * self.weight_bytes

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
        """A rough prediction of the seconds of a step."""
        return sum(plan.seconds for plan in self.passes)

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
