"""The tables of a run: how far it is, by what settings, its losses at a glance, its weights by module."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from math import prod
from typing import Any

from oocdl.report.history_view import told_of
from oocdl.report.tables import Column, Sheet, array_data, array_table, blocks, key_values
from oocdl.report.units import DEFAULTS, counted, size_text, value_text
from oocdl.training.run import Run


def run_tables(run: Run, every: bool = False) -> list[Sheet]:
    """Make the tables of a run; ``every``: a row for each weight, not for each module."""
    weights = array_table("weights", run.weights) if every else module_table(run.weights)
    kept = [array_table("kept", run.kept)] if run.kept else []
    return [key_values("run", [*_state(run), *_settings(run)]), weights, *kept]


def _state(run: Run) -> list[tuple[str, Any]]:
    """Say how far a run is."""
    total, committed = run.total_steps, run.committed_at
    far = "finished" if run.finished else f"of {total}, unfinished" if total else "unfinished"
    at = "none" if committed is None else f"{datetime.fromtimestamp(committed):%Y-%m-%d %H:%M:%S}"
    return [
        ("folder", run.path),
        ("committed", f"{counted(run.steps, 'step')}, {far}"),
        ("last commit", at),
        *told_of(run.history),
    ]


def _settings(run: Run) -> list[tuple[str, Any]]:
    """Return the settings that a run was started with."""
    facts, settings = run.facts, run.settings
    heads = {
        output: f"{value_text(head['loss'], DEFAULTS)} of {head['target']}"
        + ("" if head["weight"] == 1 else f", times {head['weight']:g}")
        for output, head in facts["loss"].items()
    }
    batch = f"{facts['batch_size']}" + (f" × {facts['accumulate']} passes" if facts["accumulate"] > 1 else "")
    rows = [
        ("model", run.model_name),
        ("inputs", ", ".join(f"{name} from {array}" for name, array in facts["inputs"].items())),
        *((f"loss of {output}", text) for output, text in heads.items()),
        ("optimizer", value_text(facts["optimizer"], DEFAULTS)),
        ("batch size", batch),
        ("memory", size_text(settings.memory_bytes)),
        ("engine, precision", f"{settings.engine}, {facts['precision']}"),
        ("seed", f"{facts['seed']}" + ("" if facts["shuffle"] else ", not shuffled")),
        ("frozen", ", ".join(facts["freeze"])),
        ("scale", ", ".join(f"{name} × {factor:g}" for name, factor in (facts["scale"] or {}).items())),
    ]
    return [(name, text) for name, text in rows if text]


def module_table(arrays: Mapping[str, Any]) -> Sheet:
    """Make a table of weights with a row for each module, or for blocks of modules where they are many."""
    columns = (
        Column("module", "weights of", kind="name"),
        Column("tensors", "tensors", rank=2, kind="words"),
        Column("parameters", "parameters", "{:,}".format, rank=1),
        Column("nbytes", "size", size_text),
    )
    modules: dict[str, list[dict[str, Any]]] = {}
    for row in array_data(arrays):
        modules.setdefault(row["name"].rpartition(".")[0] or row["name"], []).append(row)
    names = list(modules)
    rows: list[tuple[str, str, int, int]] = []
    for label, places in blocks(names):
        inside = [row for at in places for row in modules[names[at]]]
        tensors = ", ".join(row["name"].rpartition(".")[2] for row in inside)
        if len(places) > 1:
            tensors = counted(len(inside), "tensor")
        parameters = sum(prod(row["shape"]) for row in inside)
        rows.append((label, tensors, parameters, sum(row["nbytes"] for row in inside)))
    total = (counted(len(arrays), "tensor"), "", sum(row[2] for row in rows), sum(row[3] for row in rows))
    return Sheet("weights (each of them: --all)", columns, rows, total)
