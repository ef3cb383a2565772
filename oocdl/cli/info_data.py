"""What ``oocdl info --json`` prints of a run, a model, a dataset, a search or this machine: plain data.

Numbers are numbers, in units that their names end with; nothing is shortened or drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oocdl.cli.info import read_model
from oocdl.engines.engine import resolve
from oocdl.graph.onnx.bodies import every_node
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.graph.onnx.trained import Part, Trained
from oocdl.host.limits import available, cores, default_budget_bytes, processor
from oocdl.planning.calibrate import cache_path, rates_for
from oocdl.report.tables import array_data
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.training.run import Run
from oocdl.training.trainer import open as open_run
from oocdl.tuning.asked import SEARCH_FILE
from oocdl.tuning.search import Search


def data_of(what: str, dims: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return what is known of a path: a run directory, a search's, an ONNX file or a dataset.

    Of an ONNX file, ``dims`` are sizes of open dimensions.
    """
    path = Path(what)
    if (path / "run.json").is_file():
        return _run(open_run(path))
    if (path / SEARCH_FILE).is_file():
        return {"kind": "search", "folder": str(path), "trials": Search(path).table}
    if path.suffix.lower() == ".onnx":
        return _model(inspect_onnx(path), dims or {})
    return {"kind": "dataset", "arrays": array_data(open_dataset(what).arrays)}


def machine_data(engine: str, again: bool = False) -> dict[str, Any]:
    """Return what this process may use, and how fast it is with ``engine``; measured as for the tables."""
    engine = resolve(engine)
    rates = asdict(rates_for(engine, again=again))
    return {
        "kind": "machine",
        "processor": processor(),
        "cores": cores(),
        "available_bytes": available().nbytes,
        "default_budget_bytes": default_budget_bytes(),
        "engine": engine,
        "rates_file": str(cache_path(engine)),
        "flops_per_second_by_size": rates.pop("arithmetic"),
        "bytes_per_second": rates.pop("memory"),
        **rates,
    }


def _run(run: Run) -> dict[str, Any]:
    history = run.history
    last = history[-1] if history else {}
    losses = [name for name in last if name == "loss" or name.startswith("loss/")]
    return {
        "kind": "run",
        "folder": str(run.path),
        "model": run.model_name,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "finished": run.finished,
        "committed_at_unix_seconds": run.committed_at,
        "epoch": last.get("epoch"),
        "learning_rate": last.get("lr"),
        "train_seconds": sum(row["seconds"] for row in history),
        "peak_bytes": run.peak_bytes,
        "losses": {
            name: {"first": history[0][name], "last": last[name], "least": min(row[name] for row in history)}
            for name in losses
        },
        "settings": run.settings.stored(),
        "weights": array_data(run.weights),
        "kept": array_data(run.kept),
    }


def _model(model: OnnxModel, dims: Mapping[str, int]) -> dict[str, Any]:
    shapes, assumed, found = read_model(model, dims)
    ports = {
        end: [{"name": port.name, "shape": list(port.dims), "dtype": port.dtype} for port in listed]
        for end, listed in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    tensors = found.tensors if isinstance(found, Trained) else ()
    return {
        "kind": "model",
        "file": str(model.path),
        "opset": model.opset,
        "producer": model.producer,
        **ports,
        "operators": dict(sorted(Counter(node.op for node in every_node(model.nodes)).items())),
        "initializer_bytes": sum(item.nbytes for item in model.initializers.values()),
        "read_for": {name: list(shape) for name, shape in shapes.items()},
        "assumed": sorted(assumed),
        "refused": None if isinstance(found, Trained) else str(found),
        "parameters": sum(one.elements for one in tensors if one.part is Part.TRAINED),
        "remarks": [asdict(one) for one in found.remarks] if isinstance(found, Trained) else [],
        "initializers": [
            {"name": one.name, "shape": list(one.shape), "part": one.part.value, "why": one.why}
            for one in tensors
        ],
    }
