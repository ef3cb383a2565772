"""Facts of a run, a model, a dataset, a search or this machine, as plain data and as tables.

Data hold plain numbers, in the units that their names end with; nothing is shortened or drawn. Names come
from files that others wrote: tables show them as text, never as markup, and without control characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from math import floor, log2, prod
from pathlib import Path
from typing import Any

from rich.text import Text

from oocdl.engines.engine import resolve
from oocdl.errors import InputError, ModelError, Refusal, UnsupportedError, printable
from oocdl.graph.ir.graph import Shape
from oocdl.graph.onnx.bodies import every_node
from oocdl.graph.onnx.context import grouped
from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.own_operators import OWN
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx, supported
from oocdl.graph.onnx.trained import Part, Trained
from oocdl.host.limits import available, cores, default_budget_bytes, processor
from oocdl.ops import RULES
from oocdl.planning.calibrate import cache_path, rates_for
from oocdl.report.history_view import curve_names, told_of
from oocdl.report.plan_parts import trained_text
from oocdl.report.tables import Column, Sheet, array_data, array_table, blocks, key_values
from oocdl.report.units import DEFAULTS, counted, shape_text, size_text, value_text
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.run.sealed_files import understood
from oocdl.training.run import Run
from oocdl.training.trainer import open as open_run
from oocdl.tuning.asked import SEARCH_FILE
from oocdl.tuning.search import Search

Reading = tuple[Mapping[str, Shape], frozenset[str], Trained | ModelError]
Info = tuple[dict[str, Any], list[Sheet | Text]]
ASSUMED_SIZES = (64, 32, 16, 8)
"""Sizes of open dimensions, but for the first axis, for which a model is read if none are given."""


def info_of(
    what: str, dims: Mapping[str, int] | None = None, weights: bool = False, every: bool = False
) -> Info:
    """Return what is known of a path; ``weights`` (of a run: ``every``) asks for a row of each tensor."""
    path = Path(what)
    if (path / "run.json").is_file():
        with understood(path):
            return _run(open_run(path), every)
    if (path / SEARCH_FILE).is_file():
        search = Search(path)
        data = {"kind": "search", "folder": str(path), "trials": search.table}
        return data, [Text(str(search).rstrip())]
    if path.suffix.lower() == ".onnx":
        return _model(inspect_onnx(path), dims or {}, weights)
    found = open_dataset(what)
    left_out = [Text(f"left out: {name} {why}") for name, why in found.left_out.items()]
    data = {"kind": "dataset", "arrays": array_data(found.arrays)}
    return data, [array_table(what, found.arrays), *left_out]


def machine_info(engine: str, again: bool = False) -> Info:
    """Return what this process may use, and how fast it is; measured if nobody has, or ``again``."""
    engine = resolve(engine)
    rates = rates_for(engine, again=again)
    known = asdict(rates)
    known |= {"processor": processor(), "cores": cores(), "available_bytes": available().nbytes}
    known |= {"default_budget_bytes": default_budget_bytes(), "rates_file": str(cache_path(engine))}

    def rate(speed: float) -> str:
        return f"{size_text(speed)}/s"

    facts: Mapping[str, tuple[str, Callable[[Any], str]]] = {
        "processor": ("processor", str),
        "cores": ("cores", str),
        "available_bytes": ("memory that may be used", size_text),
        "default_budget_bytes": ("memory budget by default", size_text),
        "disk_read_bytes_per_second": ("disk reads", rate),
        "disk_write_bytes_per_second": ("disk writes", rate),
        "copy_bytes_per_second": ("copies in memory, a thread", rate),
        "instruction_seconds": ("overhead of an operator", lambda of: f"{of * 1e6:.1f} µs"),
        "program_seconds": ("overhead of a program", lambda of: f"{of * 1e6:.1f} µs"),
        "rates_file": ("rates are kept in", str),
    }
    rows = [(label, words(known[name])) for name, (label, words) in facts.items()]
    renamed = {"flops_per_second_by_size": known.pop("arithmetic"), "bytes_per_second": known.pop("memory")}
    data = {"kind": "machine", "engine": engine, **renamed, **known}
    points = rates.arithmetic.items()
    heavy = [(kind, "  ".join(f"{n}: {flops / 1e9:.3g}" for n, flops in found)) for kind, found in points]
    classes: dict[float, list[str]] = {}
    for op, speed in rates.memory.items():
        # A factor of two is as much as a person wants to know here.
        classes.setdefault(2.0 ** floor(log2(speed)), []).append(op)
    light = [(", ".join(sorted(classes[speed])), rate(speed)) for speed in sorted(classes)[::-1]]
    busy = f"of a thread, all {cores()} busy"
    told = [
        key_values("machine", rows),
        _words(f"{engine}: GFLOP/s {busy}", ("operator", "by size"), heavy),
        _words(f"{engine}: bytes {busy}", ("operators", "at least"), light),
    ]
    return data, [table for table in told if table.rows]


def _model(model: OnnxModel, dims: Mapping[str, int], weights: bool) -> Info:
    shapes, assumed, found = read_model(model, dims)
    trained = found if isinstance(found, Trained) else None
    ends = (("input", model.inputs), ("output", model.outputs))
    counts = dict(sorted(Counter(node.op for node in every_node(model.nodes)).items()))
    nbytes = sum(item.nbytes for item in model.initializers.values())
    tensors, remarks = (trained.tensors, trained.remarks) if trained is not None else ((), ())
    data = {
        "kind": "model",
        "file": str(model.path),
        "opset": model.opset,
        "producer": model.producer,
        **{
            f"{end}s": [{"name": port.name, "shape": list(port.dims), "dtype": port.dtype} for port in ports]
            for end, ports in ends
        },
        "operators": counts,
        "initializer_bytes": nbytes,
        "read_for": {name: list(shape) for name, shape in shapes.items()},
        "assumed": sorted(assumed),
        "refused": str(found) if trained is None else None,
        "parameters": sum(one.elements for one in tensors if one.part is Part.TRAINED),
        "remarks": [asdict(one) for one in remarks],
        "initializers": [
            {"name": one.name, "shape": list(one.shape), "part": one.part.value, "why": one.why}
            for one in tensors
        ],
    }
    title = f"{model.path.name}, opset {model.opset}, by {model.producer or 'unknown'}"
    rows = [(end, one.name, shape_text(one.dims), one.dtype) for end, ports in ends for one in ports]
    held = f"{counted(len(model.initializers), 'initializer')}, {size_text(nbytes)}"
    sizes = ", ".join(f"{printable(name)}: {shape_text(shape)}" for name, shape in shapes.items())
    guess = f" (assumed: {', '.join(sorted(assumed))}; --dims gives others)" if assumed else ""
    verdict = f"fit refuses this model: {printable(str(found))}" if trained is None else trained_text(trained)
    ports, nodes = ("end", "name", "shape", "type"), ("operator", "nodes", "supported")
    told: list[Sheet | Text] = [_words(title, ports, rows), _words(held, nodes, _operators(counts, found))]
    told.append(Text(f"read for {sizes}{guess}\n{verdict}"))
    if weights and trained is not None:
        rows = []
        for one in tensors:
            tie = f"; tied: {', '.join(map(shown, one.modules))}" if one.modules else ""
            rows.append((one.name, shape_text(one.shape), one.part.value, one.why + tie))
        told.append(_words("initializers", ("name", "shape", "role", "why"), rows))
    return data, told


def _operators(counts: Mapping[str, int], found: Trained | ModelError) -> list[tuple[str, int, str]]:
    refused: dict[str, list[Refusal]] = {}
    for refusal in found.refusals if isinstance(found, UnsupportedError) else ():
        refused.setdefault(refusal.op, []).append(refusal)
    known, rows = supported(RULES), []
    for op, count in counts.items():
        yes = "yes, your own" if op in OWN else "yes" if op in known else "no, and not needed"
        rows.append((op, count, f"no: {grouped(refused[op])}" if op in refused else yes))
    return rows


def read_model(model: OnnxModel, dims: Mapping[str, int]) -> Reading:
    """Read a model as ``fit`` does; returns input shapes, what of them is assumed, and what it is."""
    unknown = sorted(dims.keys() - {dim for port in model.inputs for dim in port.dims})
    if unknown:
        raise InputError(f"--dims names '{unknown[0]}', which is no open dimension of the model")
    tried: list[Reading] = []
    for size in ASSUMED_SIZES:
        shapes, assumed, known = {}, {}, dict(dims)
        for port in model.inputs:
            for axis, dim in enumerate(port.dims):
                if isinstance(dim, str) and dim not in known:
                    known[dim] = assumed[dim] = size if axis else 2
            shapes[port.name] = tuple(dim if isinstance(dim, int) else known[dim] for dim in port.dims)
        guesses = frozenset(f"{printable(dim)}={extent}" for dim, extent in assumed.items())
        try:
            return shapes, guesses, model.bind(RULES, shapes).trained
        except ModelError as error:
            tried.append((shapes, guesses, error))
            if isinstance(error, UnsupportedError) or not assumed:
                break
    return tried[-1 if isinstance(tried[-1][2], UnsupportedError) else 0]


def _run(run: Run, every: bool) -> Info:
    history, weights, kept = run.history, array_data(run.weights), array_data(run.kept)
    last = history[-1] if history else {}
    losses = {name: [row[name] for row in history if name in row] for name in curve_names(history)}
    total, committed, seconds = run.total_steps, run.committed_at, sum(row["seconds"] for row in history)
    data = {
        "kind": "run",
        "folder": str(run.path),
        "model": run.model_name,
        **{name: getattr(run, name) for name in ("steps", "total_steps", "finished", "peak_bytes")},
        "committed_at_unix_seconds": committed,
        "epoch": last.get("epoch"),
        "learning_rate": last.get("lr"),
        "train_seconds": seconds,
        "losses": {n: {"first": one[0], "last": one[-1], "least": min(one)} for n, one in losses.items()},
        "checkpoints": list(run.checkpoints),
        "settings": run.settings.stored(),
        "weights": weights,
        "kept": kept,
    }
    far = "finished" if run.finished else f"of {total}, unfinished" if total else "unfinished"
    at = "none" if committed is None else f"{datetime.fromtimestamp(committed):%Y-%m-%d %H:%M:%S}"
    rows: list[tuple[str, Any]] = [
        ("folder", run.path),
        ("committed", f"{counted(run.steps, 'step')}, {far}"),
        ("last commit", at),
        *([("kept steps", ", ".join(map(str, run.checkpoints)))] if run.checkpoints else []),
        *told_of(history),
    ]
    own = array_table("weights", run.weights) if every else _module_table(weights)
    further = [array_table("kept", run.kept)] if kept else []
    return data, [key_values("run", [*rows, *_settings(run)]), own, *further]


def _settings(run: Run) -> list[tuple[str, Any]]:
    facts, settings = run.facts, run.settings
    heads = dict[str, str]()
    for output, head in facts["loss"].items():
        times = "" if head["weight"] == 1 else f", times {head['weight']:g}"
        heads[output] = f"{value_text(head['loss'], DEFAULTS)} of {head['target']}{times}"
    batch = f"{facts['batch_size']}" + (f" × {facts['accumulate']} passes" if facts["accumulate"] > 1 else "")
    rows = [
        ("model", run.model_name),
        ("inputs", ", ".join(f"{name} from {array}" for name, array in facts["inputs"].items())),
        *((f"loss of {output}", text) for output, text in heads.items()),
        ("optimizer", value_text(settings.stored()["optimizer"], DEFAULTS)),
        ("batch size", batch),
        ("memory", size_text(settings.memory_bytes)),
        ("engine, precision", f"{settings.engine}, {facts['precision']}"),
        ("seed", f"{facts['seed']}" + ("" if facts["shuffle"] else ", not shuffled")),
        ("frozen", ", ".join(facts["freeze"])),
        ("scale", ", ".join(f"{name} × {factor:g}" for name, factor in (facts["scale"] or {}).items())),
    ]
    return [(name, text) for name, text in rows if text]


def _module_table(arrays: Sequence[Mapping[str, Any]]) -> Sheet:
    columns = (
        Column("module", "weights of", kind="name"),
        Column("tensors", "tensors", rank=2, kind="words"),
        Column("parameters", "parameters", "{:,}".format, rank=1),
        Column("nbytes", "size", size_text),
    )
    modules: dict[str, list[Mapping[str, Any]]] = {}
    for row in arrays:
        modules.setdefault(row["name"].rpartition(".")[0] or row["name"], []).append(row)
    names = list(modules)
    rows: list[tuple[str, str, int, int]] = []
    for label, places in blocks(names):
        inside = [row for at in places for row in modules[names[at]]]
        own = ", ".join(row["name"].rpartition(".")[2] for row in inside)
        tensors = own if len(places) == 1 else counted(len(inside), "tensor")
        parameters = sum(prod(row["shape"]) for row in inside)
        rows.append((label, tensors, parameters, sum(row["nbytes"] for row in inside)))
    total = (counted(len(arrays), "tensor"), "", sum(row[2] for row in rows), sum(row[3] for row in rows))
    return Sheet("weights (each of them: --all)", columns, rows, total)


def _words(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sheet:
    kinds: dict[str, Any] = {"name": "name", "nodes": "number"}
    return Sheet(title, [Column(one, one, kind=kinds.get(one, "words")) for one in columns], rows)
