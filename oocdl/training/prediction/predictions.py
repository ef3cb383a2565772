"""The Zarr group that ``predict`` writes: marked unfinished until its end, gone on with if it was killed.

Each sample's chunks are recorded with length and crc32c in ``progress.jsonl`` when its pass is done. What is
gone on with later is what still has these; all else is computed again. A chunk has one sample.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.data.new_group import group_attributes
from oocdl.errors import CorruptError, InputError, ModelWarning, StoreError, printable
from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.index import Region
from oocdl.graph.onnx.input_sizes import EXPORT_OPEN, other_sizes
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.storage.checksums import Record
from oocdl.storage.dataset.sample_stack import KIND, MARK
from oocdl.storage.files import reporting, sync_all, sync_path, write_text
from oocdl.storage.run.history import line_of, row_of
from oocdl.storage.sealed_store import SealedStore
from oocdl.storage.zarr_json import UNFINISHED, Attributes, group_json

Array = zarr.Array[Any]

PREDICTIONS = "predictions"
USUAL: Attributes = {MARK: PREDICTIONS}
"""Attributes of a group that ``predict`` made, and may replace, where all samples have one array."""
PROGRESS = "progress.jsonl"


@dataclass(frozen=True)
class Output:
    """An array to write: one for each output of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    """The first is 1: a chunk has one sample."""
    row: int | None = None
    """The sample, if it has an array of its own; else all samples are in the array, along its first axis."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.shape if self.row is not None else self.shape[1:]


def array_name(output: str) -> str:
    """Return the name of the array of an output: a name from a model's file is never a path.

    >>> array_name("logits"), array_name("/head/../out")
    ('logits', '_head_.._out-1d00528f')
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", output) and output not in ("zarr.json", PROGRESS):
        return output
    digest = hashlib.sha256(output.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', output)[:60].lstrip('.') or 'output'}-{digest}"


def warn_of_predictions(graph: Graph, model: OnnxModel) -> None:
    """Warn (ModelWarning) if predictions hang on random numbers, or are not those of the model's module."""
    metadata = model.metadata
    elsewhere = other_sizes(model.inputs, {v.name: v.shape for v in graph.of_role(Role.INPUT)})
    if elsewhere:
        warnings.warn(f"{elsewhere}; {EXPORT_OPEN}", ModelWarning, stacklevel=5)
    if metadata is not None and metadata.predicts:
        warnings.warn(
            f"in evaluation mode {metadata.module} computes something else than is predicted here: "
            f"{metadata.predicts}",
            ModelWarning,
            stacklevel=5,
        )
    drawn = [value.name for value in graph.of_role(Role.RANDOM)]
    if drawn:
        warnings.warn(
            f"the model draws random numbers in predictions, too, at {len(drawn)} places (the first is "
            f"{printable(drawn[0])}): only dropout and stochastic depth are known to be left out then",
            ModelWarning,
            stacklevel=5,
        )


class Predictions:
    """Arrays by output, in a group that is made, or gone on with if it was begun with the same ``facts``.

    ``done`` has the samples that need not be computed again. ``samples`` are the names and attributes of
    samples that have a group each. ``reads`` are files and folders that the predictions are made of.
    Raises StoreError if something else than a prediction is in ``path``, or it cannot be written;
    InputError if one of ``reads`` would be replaced.
    """

    def __init__(
        self,
        path: Path,
        outputs: Sequence[Output],
        facts: Mapping[str, Any],
        samples: Mapping[str, Attributes],
        reads: Iterable[Path],
    ) -> None:
        self._reads = reads
        self.path, self._samples = path, {array_name(name): its for name, its in samples.items()}
        self._mark = {MARK: {KIND: PREDICTIONS, "samples": list(self._samples)}} if samples else USUAL
        asked = json.dumps([dict(facts), [asdict(output) for output in outputs]], sort_keys=True)
        self._facts = hashlib.sha256(asked.encode()).hexdigest()
        self._outputs = {(output.name, output.row): self._name(output) for output in outputs}
        self._stores = {
            name: SealedStore(path / name, f"output {name!r}", {}, read_only=False)
            for name in self._outputs.values()
        }
        self.done: set[int] = set()
        with reporting(path):
            if group_attributes(path) == {**self._mark, UNFINISHED: self._facts}:
                self._go_on()
            if not self.done:
                self._begin(outputs)
        self._noted = {name: set(store.records) for name, store in self._stores.items()}
        self.arrays: Mapping[str, Array] = {
            name: zarr.open_array(store=store, mode="r+") for name, store in self._stores.items()
        }

    def _name(self, output: Output) -> str:
        name = array_name(output.name)
        return name if output.row is None else f"{list(self._samples)[output.row]}/{name}"

    def place(self, output: str, row: int) -> tuple[Array, Region]:
        """Return the array that has an output of a sample, and where in it if others are there, too."""
        own = self._outputs.get((output, row))
        if own is not None:
            return self.arrays[own], ()
        return self.arrays[self._outputs[output, None]], ((row, row + 1),)

    def note(self, rows: Sequence[int]) -> None:
        """Note that all outputs of these samples are written."""
        records = {}
        for name, store in self._stores.items():
            new = store.records.keys() - self._noted[name]
            self._noted[name] |= new
            if new:
                records[name] = {key: [store.records[key].nbytes, store.records[key].crc] for key in new}
        with reporting(self.path), (self.path / PROGRESS).open("ab") as stream:
            stream.write(line_of({"step": rows[-1], "rows": list(rows), "records": records}))

    def finish(self) -> zarr.Group:
        """Make everything durable, and take the mark away; returns the group."""
        with reporting(self.path):
            own = self.path / "zarr.json"
            sync_all([path for path in self.path.rglob("*") if path != own])
            write_text(own, group_json(self._mark))
            (self.path / PROGRESS).unlink()
            sync_path(self.path)
        return zarr.open_group(str(self.path), mode="r+")

    def _begin(self, outputs: Sequence[Output]) -> None:
        if self.path.exists():
            empty = self.path.is_dir() and not any(self.path.iterdir())
            if not empty and not _is_prediction(self.path):
                raise StoreError(
                    f"{self.path} is there already and no earlier prediction; choose another place"
                )
            for place in self._reads:
                if place.resolve().is_relative_to(self.path.resolve()):
                    raise InputError(f"{self.path} has {place}, which predict reads; choose another place")
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True)
        write_text(self.path / "zarr.json", group_json({**self._mark, UNFINISHED: self._facts}))
        for sample, attributes in self._samples.items():
            (self.path / sample).mkdir()
            write_text(self.path / sample / "zarr.json", group_json(attributes))
        for output in outputs:
            store = self._stores[self._name(output)]
            store.records.clear()
            zarr.create_array(
                store=store,
                shape=output.shape,
                dtype=output.dtype,
                chunks=output.chunks,
                # A sample that was never computed is not zeros, whoever reads it.
                fill_value=np.nan if np.dtype(output.dtype).kind == "f" else 0,
                attributes={"name": output.name},
                config={"write_empty_chunks": True},
            )
        metadata = {name: store.records["zarr.json"]._asdict() for name, store in self._stores.items()}
        (self.path / PROGRESS).write_bytes(line_of({"step": -1, "metadata": metadata}))

    def _go_on(self) -> None:
        """Take what an earlier call has done, as far as it is what was written."""
        lines = (self.path / PROGRESS).read_bytes().split(b"\n") if (self.path / PROGRESS).exists() else []
        found = [row for line in lines if (row := row_of(line)) is not None]
        if not found or "metadata" not in found[0]:
            return
        for name, store in self._stores.items():
            store.records["zarr.json"] = Record(**found[0]["metadata"][name])
        if not all(self._sound(name, "zarr.json") for name in self._stores):
            return
        for row in found[1:]:
            records = [(name, key, its[key]) for name, its in row["records"].items() for key in its]
            for name, key, record in records:
                self._stores[name].records[key] = Record(*record)
            if all(self._sound(name, key) for name, key, _ in records):
                self.done |= set(row["rows"])
                continue
            for name, key, _ in records:
                del self._stores[name].records[key]

    def _sound(self, name: str, key: str) -> bool:
        """Whether a file is still what was written."""
        try:
            return self._stores[name].read(key) is not None
        except CorruptError:
            return False


def is_unfinished(path: Path) -> bool:
    """Whether a prediction is there that the same call would go on with."""
    return UNFINISHED in group_attributes(path)


def _is_prediction(path: Path) -> bool:
    mark = group_attributes(path).get(MARK)
    return (mark.get(KIND) if isinstance(mark, Mapping) else mark) == PREDICTIONS
