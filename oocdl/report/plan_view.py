"""``Plan``: what a step will do and need, as numbers, tables, a text and a picture, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dask.delayed import Delayed

from oocdl.augmentation.crop import crop_of
from oocdl.config import Settings
from oocdl.errors import InputError, printable
from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.onnx.trained import Trained
from oocdl.planning.calibrate import known_rates
from oocdl.planning.choice.budget import predict_pass
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.machine import Machine, discards_old_weights
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.planning.passes import FIRST, MAIN, NEXT, VALIDATION, Course, role_of
from oocdl.planning.simulation.timeline import Simulated
from oocdl.report import notebook
from oocdl.report.figure import figure_of, picture_path, written
from oocdl.report.layer_facts import LayerFacts, layer_facts, layer_names
from oocdl.report.plan_parts import size_sheet, trained_text
from oocdl.report.printer.show import What, pass_text
from oocdl.report.run_report import Report, make_report
from oocdl.report.tables import Column, Sheet, block_sheet, shortened, text_of
from oocdl.report.units import counted
from oocdl.runtime.measured import Measured
from oocdl.runtime.session import step_delayed
from oocdl.storage.dataset.dataset import Dataset

FILE_BLOCK_BYTES = 4096
"""File systems round the size of a file up to this; a folder takes as much."""
SPILLED_CHUNK_BYTES = 3 * FILE_BLOCK_BYTES
"""Overhead of a spilled chunk: a folder, ``zarr.json``, and the last block of the data."""
STORED_VERSIONS = 3
"""Versions of weights and state that are on disk while one is written."""
PEAK_MARGIN_FACTOR, PEAK_MARGIN_BYTES = 1.15, 8 << 20
"""Memory beyond the simulated peak that a run may take: its units do not meet as in the simulation."""
KEPT_SHARE, KEPT_BYTES, SPARE_BYTES = 1.0, 64 << 20, 32 << 20
"""Freed memory worth keeping, as a share of what is in use and beyond, and room that stays free beside it."""


def _shards(layers: Sequence[LayerFacts]) -> str:
    """Tell how layers are cut; where they differ in that, into how many units."""
    cuts = {layer.cuts or "1" for layer in layers}
    return cuts.pop() if len(cuts) == 1 else f"{sum(layer.units for layer in layers)} units"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"


COLUMNS = (
    Column("layer", "layer", kind="name"),
    Column("shards", "shards", rank=1, of=_shards),
    Column("unit_bytes", "unit MiB", _mib, 2, of=lambda layers: max(one.unit_bytes for one in layers)),
    Column("read_bytes", "read MiB", _mib, 3),
    Column("written_bytes", "write MiB", _mib, 4),
    Column("flops", "GFLOP", lambda flops: f"{flops / 1e9:.2f}", 5),
    Column(
        "seconds", "seconds", "{:.4f}".format, of=lambda layers: sum(one.predicted_seconds for one in layers)
    ),
)


@dataclass(frozen=True, eq=False)
class Plan:
    """Tells what one step will do and need. Made by ``oocdl.plan``, which runs nothing.

    ``str(plan)`` says what is trained, and has a table of the layers, with ``accumulate`` of those of the
    last pass of a step, and of the memory. Numbers of a step are sums over its passes. ``read_bytes`` and
    ``written_bytes`` are what units would move if nothing stayed in RAM; ``spill_read_bytes`` and
    ``spill_written_bytes`` are what the disk moves, as simulated.
    """

    kinds: Mapping[str, CompiledPass]
    """The compiled kinds of passes, by plan id."""
    settings: Settings
    machine: Machine
    model: str
    dataset: Dataset
    course: Course
    """All steps of the run."""

    @property
    def compiled(self) -> CompiledPass:
        """The pass that ends a step with its update."""
        return self.kinds[MAIN]

    @property
    def trained(self) -> Trained:
        """The parts of the model that are trained, and why, with remarks on anything that looks wrong."""
        return self.compiled.imported.trained

    @property
    def passes(self) -> tuple[PassPlan, ...]:
        """The plans of the passes of a step, in order."""
        return tuple(self.kinds[plan_id].plan for plan_id in self.pass_ids)

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The layers of a step's last pass, in order."""
        return self.compiled.plan.layers

    @cached_property
    def layer_names(self) -> Mapping[str, str]:
        """Layer -> its name, by modules of the network or nodes of its file, for all passes."""
        kinds = sorted(self.kinds.items(), key=lambda item: item[0] == MAIN)
        return {layer: name for _, kind in kinds for layer, name in layer_names(kind).items()}

    @cached_property
    def room_bytes(self) -> int:
        """Bytes of the budget that are left for arrays and running programs."""
        return self.machine.room_bytes(kind.plan for kind in self.kinds.values())

    @property
    def pass_ids(self) -> tuple[str, ...]:
        """The plan ids of the passes of a step, in order."""
        count = self.course.passes
        return (*([FIRST] if count > 1 else []), *([NEXT] * (count - 2)), MAIN)

    @cached_property
    def simulated(self) -> tuple[Simulated, ...]:
        """The simulated passes of a step, as they are expected to go once the run is under way."""
        keeps_old = not discards_old_weights(self.compiled.plan, self.machine)
        known = {plan_id: self._simulated(plan_id, keeps_old) for plan_id in dict.fromkeys(self.pass_ids)}
        return tuple(known[plan_id] for plan_id in self.pass_ids)

    @cached_property
    def validation(self) -> Mapping[str, Simulated]:
        """The simulated passes of a validation, by plan id; empty if there is none."""
        return {plan_id: self._simulated(plan_id, True) for plan_id in self.of_role(VALIDATION)}

    def of_role(self, role: str) -> list[str]:
        """Return the plan ids of a role in the step, of all sizes and batches."""
        return [plan_id for plan_id in self.kinds if role_of(plan_id) == role]

    @cached_property
    def sizes(self) -> Mapping[str, Simulated]:
        """The simulated passes that end a step, of all sizes where samples differ in size, by plan id."""
        keeps_old = not discards_old_weights(self.compiled.plan, self.machine)
        ids = self.of_role(MAIN) if self.course.trained_labels else []
        return {plan_id: self._simulated(plan_id, keeps_old) for plan_id in ids}

    def _simulated(self, plan_id: str, keeps_old: bool) -> Simulated:
        return predict_pass(self.kinds[plan_id].graph, self.machine, self.room_bytes, keeps_old)

    @property
    def validation_seconds(self) -> float:
        """Predicted seconds of a validation; 0 if there is none."""
        return sum(self.validation[plan_id].seconds for plan_id, _ in self.course.validation_passes)

    @property
    def most_bytes(self) -> int:
        """Bytes that arrays and running programs will take at most: simulated, with some to spare."""
        # Weights are read in, and committed, a piece at a time.
        piece = 2 * max(footprint(nbytes) for nbytes in self.compiled.graph.input_bytes.values())
        simulated = (*self.simulated, *self.sizes.values(), *self.validation.values())
        peak = max(one.peak_tier_bytes for one in simulated)
        return min(self.room_bytes, int(PEAK_MARGIN_FACTOR * peak) + piece + PEAK_MARGIN_BYTES)

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory beyond ``most_bytes`` that was freed, and is kept for the next array or program."""
        room_bytes = max(self.room_bytes - self.most_bytes - SPARE_BYTES, 0)
        return min(room_bytes, int(KEPT_SHARE * self.most_bytes) + KEPT_BYTES)

    @property
    def process_bytes(self) -> int:
        """Bytes of the process itself, with a plan that may be large."""
        return self.machine.base_bytes + self.machine.capacity_bytes - self.room_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process in bytes: itself, arrays, running programs, freed memory."""
        return self.process_bytes + self.most_bytes + self.kept_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        values = self.compiled.plan.factored.graph.values
        return sum(values[name].nbytes for name in self.compiled.pieces)

    @property
    def spill_bytes(self) -> int:
        """Disk bytes that the spill takes at most, with files that are kept to be written over."""
        files = max(len(kind.graph.calls) + len(kind.graph.inputs) for kind in self.kinds.values())
        peak = max(one.peak_spill_bytes for one in (*self.simulated, *self.validation.values()))
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
        """Disk bytes of one version of weights and state in the run directory."""
        files = sum(len(pieces) + 2 for pieces in self.compiled.pieces.values())
        return self.weight_bytes + files * FILE_BLOCK_BYTES

    @property
    def store_bytes(self) -> int:
        """Disk bytes of the run directory: three versions (last, current, next) and of what is kept."""
        values = self.compiled.plan.factored.graph.values
        kept = sum(values[name].nbytes for name in self.compiled.kept_values.values())
        groups = (len(self.compiled.pieces) + 1) * 2 * FILE_BLOCK_BYTES  # an array's versions are in a group
        return STORED_VERSIONS * self.version_bytes + groups + STORED_VERSIONS * kept

    @property
    def disk_bytes(self) -> int:
        """Disk bytes that spill and run directory take at most."""
        return self.spill_bytes + self.store_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that units read in a step, be they in RAM or on disk."""
        return sum(plan.read_bytes for plan in self.passes)

    @property
    def written_bytes(self) -> int:
        """Bytes that units write in a step, whether they stay in RAM or not."""
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
        """Number of units of a step."""
        return sum(plan.tasks for plan in self.passes)

    def delayed(self, step: int = 0) -> Delayed:
        """Return one step, from the model file's weights, as a ``dask.delayed.Delayed`` of its loss.

        ``visualize()`` draws its graph; ``compute()`` runs it with any local Dask scheduler. Raises
        InputError where samples are normalised or transformed, which only a run does.

        >>> plan.delayed(0).visualize("step.svg")  # doctest: +SKIP
        """
        if self.settings.augment is not None or self.settings.normalize is not None:
            raise InputError("a step alone does not normalise or augment; train with fit, or leave these out")
        passes = self.course.passes_of(next(self.course.steps_from(step)))
        return step_delayed(self.kinds, passes, self.dataset, self.settings, self.machine)

    def plot(self, path: str | Path) -> Path:
        """Draw one step, as PNG or SVG: memory over time under the budget, and when each layer runs.

        Raises InputError for another ending and where matplotlib is missing (``pip install 'oocdl[plot]'``).

        >>> plan.plot("plan.png")  # doctest: +SKIP
        """
        target = picture_path(path)
        title = f"{self._title()}, predicted {self.seconds:.3g} s"
        sizes = {"base_bytes": self.process_bytes, "peak_bytes": self.peak_bytes}
        sizes["budget_bytes"] = self.settings.memory_bytes
        return written(figure_of(title, self.simulated, **sizes, labels=self.layer_names), target)

    def show(self, what: What, layer: str | int | None = None, kind: str = MAIN) -> str:
        """Return the "graph", "layers", "program" (of each layer) or "tasks" of a pass as text.

        ``layer`` restricts it to one layer, given by name or index. ``kind`` chooses one of the run's kinds
        of passes; where there are several, the first line names them. Raises InputError if there is no such
        text, layer or kind.

        >>> print(plan.show("tasks", layer="down1.conv2"))  # doctest: +SKIP
        """
        compiled = self.kinds.get(kind)
        if compiled is None:
            raise InputError(f"there is no pass of kind '{kind}', only {', '.join(self.kinds)}")
        nodes = {name: node for node, name in self.layer_names.items()}
        text = pass_text(compiled.plan, compiled.graph, what, nodes.get(str(layer), layer))
        others = ", ".join(name for name in self.kinds if name != kind)
        return f"pass of kind '{kind}'; other kinds: {others}\n\n{text}" if others else text

    def report(self, measured: Measured, peak_bytes: int) -> Report | None:
        """Compare what a session has measured with the prediction; None before its first whole step.

        ``peak_bytes``: the most memory that a process had, as the last row of the history has it.
        """
        predicted = self.pass_ids, self.simulated, self.peak_bytes
        return make_report(*predicted, measured, peak_bytes, self.layer_names)

    def _title(self) -> str:
        title = f"{self.model}: one step of batch {self.settings.batch_size}"
        return title if self.course.passes == 1 else f"{title} x {self.course.passes} passes"

    def table(self, every: bool = False) -> Sheet:
        """Make the table of layers, with their cuts and costs: a row each, or of many layers one each block.

        ``every``: a row each, however many they are.
        """
        layers = layer_facts(self.compiled, self.simulated[-1:])
        title = self._title() + ("" if self.course.passes == 1 else ", of which the last")
        total = f"{len(layers)} layers", f"{self.compiled.plan.tasks} units"
        return block_sheet(title, COLUMNS, layers, every, total)

    def budget_table(self) -> Sheet:
        """Make the table of memory: the terms of the predicted peak, and the budget."""
        simulated = max(one.peak_tier_bytes for one in (*self.simulated, *self.validation.values()))
        simulated = min(simulated, self.most_bytes)
        mib = Column("nbytes", "MiB", lambda n: f"{n / 2**20:.0f}")
        columns = (Column("what", "memory", kind="words"), mib)
        rows = (
            ("base process", self.process_bytes),
            ("arrays and programs, simulated", simulated),
            ("to spare for them", self.most_bytes - simulated),
            ("freed memory, kept for the next", self.kept_bytes),
            ("predicted peak", self.peak_bytes),
            ("budget", self.settings.memory_bytes),
        )
        return Sheet("", columns, rows, ends=frozenset({3}))

    def summary(self) -> str:
        """Write a few lines on time, spill, disk and engine of a step."""
        nominal = known_rates(self.machine.engine) is NOMINAL
        rates = "nominal (measure them: oocdl info --machine)" if nominal else "measured on this machine"
        read, written = self.spill_read_bytes / 2**20, self.spill_written_bytes / 2**20
        crop = crop_of(self.settings.augment)
        crops = [f"trains on {crop}, one of each sample an epoch"] if crop else []
        samples, seconds = counted(len(self.course.validated), "sample"), self.validation_seconds
        validation = [f"validation: {samples}, {seconds:.3g} s predicted"] if self.course.validated else []
        together = ", which run each unit together" if self.machine.together > 1 else ""
        lines = (
            f"step: {self.seconds:.3g} s predicted, {self.tasks} tasks a step, "
            f"{self.flops / 1e9:.1f} GFLOP; rates are {rates}",
            f"spill: reads {read:.1f} MiB and writes {written:.1f} MiB a step, "
            f"holds at most {self.spill_bytes / 2**20:.1f} MiB",
            f"disk: at most {self.disk_bytes / 2**20:.1f} MiB, spill and run directory together",
            *crops,
            *validation,
            f"engine {self.machine.engine}; threads {self.machine.threads}{together}",
            *self.dataset.notes(),
        )
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Return what ``text`` tells, as plain data."""
        names = ("seconds", "tasks", "flops", "peak_bytes", "weight_bytes", "disk_bytes", "spill_bytes")
        facts = {name: getattr(self, name) for name in (*names, "spill_read_bytes", "spill_written_bytes")}
        return {
            "model": self.model,
            "engine": self.machine.engine,
            "threads": self.machine.threads,
            "steps": self.course.total_steps,
            "step": facts,
            "layers": self.table(every=True).records(),
            "memory": self.budget_table().records(),
        }

    def text(self, every: bool = False) -> str:
        """Write all there is to know, in lines as long as the terminal is wide; ``every`` as in ``table``."""
        return text_of(*self._parts(every))

    def _parts(self, every: bool = False) -> list[Sheet | str]:
        layers = self.table(every)
        grouped = [f"layers are grouped by blocks; --all, or text(every=True), has all {len(self.layers)}"]
        more = grouped if len(layers.rows) < len(self.layers) else []
        sizes = [size_sheet(self.course, self.kinds, self.sizes)] if self.sizes else []
        return [trained_text(self.trained), layers, *more, *sizes, self.budget_table(), self.summary()]

    def __repr__(self) -> str:
        model, settings = shortened(printable(self.model), 60), self.settings
        tasks = f"{len(self.layers)} layers, {self.tasks} tasks a step of batch {settings.batch_size}"
        return f"<Plan of {model}: {tasks}, within {settings.memory_bytes / 2**20:.0f} MiB>"

    def _repr_html_(self) -> str:
        peak, budget = self.peak_bytes, self.settings.memory_bytes
        words = f"predicted peak {peak / 2**20:.0f} of {budget / 2**20:.0f} MiB"
        return notebook.bar(peak / budget, words) + notebook.page(*self._parts())

    def __str__(self) -> str:
        return self.text()
