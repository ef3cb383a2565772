"""Makes tables of a run, a model, a dataset or this machine.

Names come from files that others wrote: they are shown as text, never as markup, and without control
characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor, log2, prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from oocdl.engines.engine import resolve
from oocdl.errors import InputError, ModelError, Refusal, UnsupportedError, printable
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bodies import every_node
from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.own_operators import OWN
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx, supported
from oocdl.graph.onnx.refusals import grouped
from oocdl.graph.onnx.trained import Trained
from oocdl.host.limits import available, cores, default_budget_bytes, processor
from oocdl.ops import RULES
from oocdl.planning.calibrate import cache_path, measure_and_store_rates, rates_for
from oocdl.report.progress import counted, duration
from oocdl.report.trained_view import trained_text
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.training.run import Run
from oocdl.training.trainer import open as open_run
from oocdl.tuning.record import SEARCH_FILE
from oocdl.tuning.search import Search

ASSUMED_SIZES = (64, 32, 16, 8)
"""Sizes of open dimensions, but for the first axis, for which a model is read if none are given."""


def tables_of(what: str, dims: Mapping[str, int] | None = None, weights: bool = False) -> list[Table | Text]:
    """Make the tables of a path: a run directory, a search's, an ONNX file or a dataset.

    Of an ONNX file, ``dims`` are sizes of open dimensions; ``weights`` asks for a row of each initializer.
    """
    path = Path(what)
    if (path / "run.json").is_file():
        return [*run_tables(open_run(path))]
    if (path / SEARCH_FILE).is_file():
        return [Text(str(Search(path)).rstrip())]
    if path.suffix.lower() == ".onnx":
        return model_tables(path, dims or {}, weights)
    return [array_table(what, open_dataset(what).arrays)]


def machine_tables(engine: str, again: bool = False) -> list[Table]:
    """Make the tables of what this process may use, and of how fast it is with ``engine``.

    Rates come from the cache; they are measured (half a minute) if there are none, or with ``again``.
    """
    engine = resolve(engine)
    rates = measure_and_store_rates(engine) if again else rates_for(engine)
    machine = table("machine", "", "")
    for title, value in (
        ("processor", processor()),
        ("cores", cores()),
        ("memory that may be used", size_text(available().nbytes)),
        ("memory budget by default", size_text(default_budget_bytes())),
        ("disk reads", speed_text(rates.disk_read_bytes_per_second)),
        ("disk writes", speed_text(rates.disk_write_bytes_per_second)),
        ("copies in memory, a thread", speed_text(rates.copy_bytes_per_second)),
        ("overhead of an operator", f"{rates.instruction_seconds * 1e6:.1f} µs"),
        ("overhead of a program", f"{rates.program_seconds * 1e6:.1f} µs"),
        ("rates are kept in", cache_path(engine)),
    ):
        machine.add_row(cell(title), cell(value))
    heavy = table(f"{engine}: GFLOP/s of a thread, all {cores()} busy", "operator", "by size")
    for kind, points in rates.arithmetic.items():
        heavy.add_row(cell(kind), cell("  ".join(f"{size}: {rate / 1e9:.3g}" for size, rate in points)))
    light = table(f"{engine}: bytes of a thread, all {cores()} busy", "operators", "at least")
    classes: dict[float, list[str]] = {}
    for op, rate in rates.memory.items():
        # A factor of two is as much as a person wants to know here.
        classes.setdefault(2.0 ** floor(log2(rate)), []).append(op)
    for rate, ops in sorted(classes.items(), reverse=True):
        light.add_row(cell(", ".join(sorted(ops))), cell(speed_text(rate)))
    more = table(f"{engine}: scratch beyond what is told", "operator", "by size, times what is told")
    for kind, points in rates.scratch_ratios.items():
        more.add_row(cell(kind), cell("  ".join(f"{size}: {ratio:.2f}" for size, ratio in points)))
    return [machine, heavy, light, *([more] if rates.scratch_ratios else [])]


def run_tables(run: Run) -> list[Table]:
    """Make the tables of a run: how far it is, its weights and kept values."""
    history, weights = run.history, run.weights
    state = table("run", "", "")
    rows = [("folder", run.path), ("committed steps", run.steps)]
    if history:
        first, last = history[0], history[-1]
        rows += [
            ("first loss", f"{first['loss']:.6g}"),
            ("last loss", f"{last['loss']:.6g} at step {last['step']}"),
            ("time", duration(sum(row["seconds"] for row in history))),
            ("peak memory", size_text(max(row.get("process_bytes", row["peak_bytes"]) for row in history))),
        ]
    for title, value in rows:
        state.add_row(cell(title), cell(value))
    return [state, array_table("weights", weights), *([array_table("kept", run.kept)] if run.kept else [])]


def model_tables(path: Path, dims: Mapping[str, int], weights: bool) -> list[Table | Text]:
    """Make the tables of a model: inputs, outputs, operators; what is trained, or why ``fit`` refuses it.

    The model is read as ``fit`` reads it, for the sizes in the file, ``dims``, and sizes that are assumed.
    """
    model = inspect_onnx(path)
    shapes, assumed, found = read_model(model, dims)
    title = f"{path.name}, opset {model.opset}, by {model.producer or 'unknown'}"
    ends = table(title, "", "name", "shape", "type")
    for kind, ports in (("input", model.inputs), ("output", model.outputs)):
        for port in ports:
            ends.add_row(cell(kind), cell(port.name), cell(shape_text(port.dims)), cell(port.dtype))
    total_bytes = sum(item.nbytes for item in model.initializers.values())
    title = f"{counted(len(model.initializers), 'initializer')}, {size_text(total_bytes)}"
    operators = table(title, "operator", "nodes", "supported")
    refused: dict[str, list[Refusal]] = {}
    known = supported(RULES)
    for refusal in found.refusals if isinstance(found, UnsupportedError) else ():
        refused.setdefault(refusal.op, []).append(refusal)
    for op, count in sorted(Counter(node.op for node in every_node(model.nodes)).items()):
        yes = "yes, your own" if op in OWN else "yes" if op in known else "no, and not needed"
        operators.add_row(
            cell(op), cell(count), cell(f"no: {grouped(refused[op])}" if op in refused else yes)
        )
    sizes = ", ".join(f"{cell(name)}: {shape_text(shape)}" for name, shape in shapes.items())
    guess = f" (assumed: {', '.join(sorted(assumed))}; --dims gives others)" if assumed else ""
    read = f"read for {sizes}{guess}"
    if not isinstance(found, Trained):
        return [ends, operators, Text(f"{read}\nfit refuses this model: {cell(found)}")]
    parts: list[Table | Text] = [ends, operators, Text(f"{read}\n{trained_text(found)}")]
    return [*parts, weight_table(found)] if weights else parts


def read_model(
    model: OnnxModel, dims: Mapping[str, int]
) -> tuple[Mapping[str, Shape], frozenset[str], Trained | ModelError]:
    """Read a model as ``fit`` does; returns input shapes, what of them is assumed, and record or error.

    Open dimensions that ``dims`` does not name are assumed: 2 on the first axis, and on others the first of
    ``ASSUMED_SIZES`` with which the model can be read.
    """
    unknown = sorted(dims.keys() - {dim for port in model.inputs for dim in port.dims})
    if unknown:
        raise InputError(f"--dims names '{unknown[0]}', which is no open dimension of the model")
    tried: list[tuple[Mapping[str, Shape], frozenset[str], Trained | ModelError]] = []
    for size in ASSUMED_SIZES:
        shapes, assumed = {}, {}
        known: dict[str, int] = dict(dims)
        for port in model.inputs:
            for axis, dim in enumerate(port.dims):
                if isinstance(dim, str) and dim not in known:
                    known[dim] = assumed[dim] = size if axis else 2
            shapes[port.name] = tuple(dim if isinstance(dim, int) else known[dim] for dim in port.dims)
        guesses = frozenset(f"{cell(dim)}={extent}" for dim, extent in assumed.items())
        try:
            return shapes, guesses, model.bind(RULES, shapes).trained
        except ModelError as error:
            tried.append((shapes, guesses, error))
            if isinstance(error, UnsupportedError) or not assumed:
                break
    return tried[-1 if isinstance(tried[-1][2], UnsupportedError) else 0]


def weight_table(trained: Trained) -> Table:
    """Make a table of initializers: name, shape, what each is for, and why."""
    found = table("initializers", "name", "shape", "role", "why")
    for record in trained.tensors:
        tie = f"; tied: {', '.join(map(shown, record.modules))}" if record.modules else ""
        row = (record.name, shape_text(record.shape), record.part.value, record.why + tie)
        found.add_row(*map(cell, row))
    return found


def array_table(title: str, arrays: Mapping[str, Any]) -> Table:
    """Make a table of arrays by name, with shape, type and size."""
    found = table(title, "name", "shape", "type", "size")
    for name, array in arrays.items():
        nbytes = prod(array.shape) * np.dtype(array.dtype).itemsize
        found.add_row(cell(name), cell(shape_text(array.shape)), cell(array.dtype), cell(size_text(nbytes)))
    return found


def table(title: str, *columns: str) -> Table:
    """Make an empty table. Its title may come from a file: it is text, never markup."""
    made = Table(title=cell(title), title_justify="left", show_header=any(columns))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def cell(value: object) -> Text:
    """Make a cell of a table. Control characters of a name in a file do not reach the terminal."""
    return Text(printable(str(value)))


def shape_text(shape: Sequence[int | str]) -> str:
    """Write a shape for people.

    >>> shape_text((2, 64, "depth"))
    '2 × 64 × depth'
    """
    return " × ".join(str(extent) for extent in shape) or "scalar"


def speed_text(bytes_per_second: float) -> str:
    """Write bytes per second for people.

    >>> speed_text(3 << 30)
    '3.0 GiB/s'
    """
    return f"{size_text(int(bytes_per_second))}/s"


def size_text(nbytes: int) -> str:
    """Write a size for people.

    >>> size_text(512), size_text(3 << 20)
    ('512 B', '3.0 MiB')
    """
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024:
        after = next(units, None)
        if after is None:
            break
        size, unit = size / 1024, after
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
