"""Makes tables of a run, a model, a dataset or this machine.

Names come from files that others wrote: they are shown as text, never as markup, and without control
characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor, log2
from pathlib import Path
from typing import Any

from rich.text import Text

from oocdl.cli.run_info import run_tables
from oocdl.engines.engine import resolve
from oocdl.errors import InputError, ModelError, Refusal, UnsupportedError, printable
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bodies import every_node
from oocdl.graph.onnx.context import grouped
from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.own_operators import OWN
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx, supported
from oocdl.graph.onnx.trained import Trained
from oocdl.host.limits import available, cores, default_budget_bytes, processor
from oocdl.ops import RULES
from oocdl.planning.calibrate import cache_path, rates_for
from oocdl.report.tables import Column, Sheet, array_table, key_values
from oocdl.report.trained_view import trained_text
from oocdl.report.units import counted, shape_text, size_text, speed_text
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.run.sealed_files import understood
from oocdl.training.trainer import open as open_run
from oocdl.tuning.asked import SEARCH_FILE
from oocdl.tuning.search import Search

ASSUMED_SIZES = (64, 32, 16, 8)
"""Sizes of open dimensions, but for the first axis, for which a model is read if none are given."""


def tables_of(
    what: str, dims: Mapping[str, int] | None = None, weights: bool = False, every: bool = False
) -> list[Sheet | Text]:
    """Make the tables of a path: a run directory, a search's, an ONNX file or a dataset.

    Of an ONNX file, ``dims`` are sizes of open dimensions; ``weights`` asks for a row of each initializer. Of
    a run, ``every`` asks for a row of each weight.
    """
    path = Path(what)
    if (path / "run.json").is_file():
        with understood(path):
            return [*run_tables(open_run(path), every)]
    if (path / SEARCH_FILE).is_file():
        return [Text(str(Search(path)).rstrip())]
    if path.suffix.lower() == ".onnx":
        return model_tables(path, dims or {}, weights)
    return [array_table(what, open_dataset(what).arrays)]


def machine_tables(engine: str, again: bool = False) -> list[Sheet | Text]:
    """Make the tables of what this process may use, and of how fast it is with ``engine``.

    Rates come from the cache; they are measured (half a minute) if there are none, or with ``again``.
    """
    engine = resolve(engine)
    rates = rates_for(engine, again=again)
    rows = (
        ("processor", processor()),
        ("cores", cores()),
        ("memory that may be used", size_text(available().nbytes)),
        ("memory budget by default", size_text(default_budget_bytes())),
        ("disk reads", speed_text(rates.disk_read_bytes_per_second)),
        ("disk writes", speed_text(rates.disk_write_bytes_per_second)),
        ("copies in memory, a thread", speed_text(rates.copy_bytes_per_second)),
        ("overhead of an operator", f"{rates.instruction_seconds * 1e6:.1f} µs"),
        ("overhead of a program", f"{rates.program_seconds * 1e6:.1f} µs"),
        ("rates are kept in", str(cache_path(engine))),
    )
    heavy = [
        (kind, "  ".join(f"{size}: {rate / 1e9:.3g}" for size, rate in points))
        for kind, points in rates.arithmetic.items()
    ]
    classes: dict[float, list[str]] = {}
    for op, rate in rates.memory.items():
        # A factor of two is as much as a person wants to know here.
        classes.setdefault(2.0 ** floor(log2(rate)), []).append(op)
    light = [
        (", ".join(sorted(ops)), speed_text(rate)) for rate, ops in sorted(classes.items(), reverse=True)
    ]
    ratios = [
        (kind, "  ".join(f"{size}: {ratio:.2f}" for size, ratio in points))
        for kind, points in rates.scratch_ratios.items()
    ]
    busy = f"of a thread, all {cores()} busy"
    return [
        key_values("machine", rows),
        words(f"{engine}: GFLOP/s {busy}", ("operator", "by size"), heavy),
        words(f"{engine}: bytes {busy}", ("operators", "at least"), light),
        *(
            [words(f"{engine}: scratch, times what is told", ("operator", "by size"), ratios)]
            if ratios
            else []
        ),
    ]


def model_tables(path: Path, dims: Mapping[str, int], weights: bool) -> list[Sheet | Text]:
    """Make the tables of a model: inputs, outputs, operators; what is trained, or why ``fit`` refuses it.

    The model is read as ``fit`` reads it, for the sizes in the file, ``dims``, and sizes that are assumed.
    """
    model = inspect_onnx(path)
    shapes, assumed, found = read_model(model, dims)
    title = f"{path.name}, opset {model.opset}, by {model.producer or 'unknown'}"
    ends = words(
        title,
        ("end", "name", "shape", "type"),
        [
            (kind, port.name, shape_text(port.dims), port.dtype)
            for kind, ports in (("input", model.inputs), ("output", model.outputs))
            for port in ports
        ],
    )
    total_bytes = sum(item.nbytes for item in model.initializers.values())
    refused: dict[str, list[Refusal]] = {}
    known = supported(RULES)
    for refusal in found.refusals if isinstance(found, UnsupportedError) else ():
        refused.setdefault(refusal.op, []).append(refusal)
    rows = []
    for op, count in sorted(Counter(node.op for node in every_node(model.nodes)).items()):
        yes = "yes, your own" if op in OWN else "yes" if op in known else "no, and not needed"
        rows.append((op, count, f"no: {grouped(refused[op])}" if op in refused else yes))
    title = f"{counted(len(model.initializers), 'initializer')}, {size_text(total_bytes)}"
    operators = words(title, ("operator", "nodes", "supported"), rows)
    sizes = ", ".join(f"{cell(name)}: {shape_text(shape)}" for name, shape in shapes.items())
    guess = f" (assumed: {', '.join(sorted(assumed))}; --dims gives others)" if assumed else ""
    read = f"read for {sizes}{guess}"
    if not isinstance(found, Trained):
        return [ends, operators, Text(f"{read}\nfit refuses this model: {cell(found)}")]
    parts: list[Sheet | Text] = [ends, operators, Text(f"{read}\n{trained_text(found)}")]
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


def weight_table(trained: Trained) -> Sheet:
    """Make a table of initializers: name, shape, what each is for, and why."""
    rows = []
    for record in trained.tensors:
        tie = f"; tied: {', '.join(map(shown, record.modules))}" if record.modules else ""
        rows.append((record.name, shape_text(record.shape), record.part.value, record.why + tie))
    return words("initializers", ("name", "shape", "role", "why"), rows)


def words(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sheet:
    """Make a table of words: names in the column that is called so are shortened."""
    kinds: dict[str, Any] = {"name": "name", "nodes": "number"}
    return Sheet(title, [Column(one, one, kind=kinds.get(one, "words")) for one in columns], rows)


def cell(value: object) -> str:
    """Write a name of a file, whose control characters do not reach the terminal."""
    return printable(str(value))
