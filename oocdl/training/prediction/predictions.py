"""The Zarr group that ``predict`` writes: marked unfinished until its end, gone on with if it was killed.

Chunks of a sample are recorded with length and crc32c in ``progress.jsonl``: what has these is not computed
again. A chunk has one sample.
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
Facts = Mapping[str, Any]
Samples = Mapping[str, Attributes]

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
    row: int | None = None
    """The sample, if it has an array of its own; else all samples are in the array, along its first axis."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.shape if self.row is not None else self.shape[1:]


def array_name(output: str) -> str:
    """Return the name of the array of an output, or of the group of a sample: it is never a path.

    >>> array_name("logits"), array_name("case 1"), array_name("/head/../out")
    ('logits', 'case 1', '_head_.._out-1d00528f')
    """
    plain = re.fullmatch(r"\w[\w. +-]{0,99}", output) and len(output.encode()) <= 200
    if plain and output not in ("zarr.json", PROGRESS):
        return output
    digest = hashlib.sha256(output.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', output)[:60].lstrip('.') or 'output'}-{digest}"


def warn_of_predictions(graph: Graph, model: OnnxModel) -> None:
    """Warn (ModelWarning) if predictions hang on random numbers, or are not those of the model's module."""
    metadata, texts = model.metadata, list[str]()
    if elsewhere := other_sizes(model.inputs, {v.name: v.shape for v in graph.of_role(Role.INPUT)}):
        texts.append(f"{elsewhere}; {EXPORT_OPEN}")
    if metadata is not None and metadata.predicts:
        other = f"in evaluation mode {metadata.module} computes something else than is predicted here"
        texts.append(f"{other}: {metadata.predicts}")
    if drawn := [value.name for value in graph.of_role(Role.RANDOM)]:
        texts.append(
            f"the model draws random numbers in predictions, too, at {len(drawn)} places (the first is "
            f"{printable(drawn[0])}): only dropout and stochastic depth are known to be left out then"
        )
    for text in texts:
        warnings.warn(text, ModelWarning, stacklevel=5)


class Predictions:
    """Arrays by output, in a group that is made, or gone on with if it was begun with the same ``facts``.

    ``done`` has samples that are not computed again, ``samples`` those that have a group each. What else is
    there is not replaced (StoreError), nor what predictions are made of (``reads``, InputError).
    """

    def __init__(
        self, path: Path, outputs: Sequence[Output], facts: Facts, samples: Samples, reads: Iterable[Path]
    ) -> None:
        self.path, self._reads = path, reads
        self._samples = {array_name(name): its for name, its in samples.items()}
        self._mark = {MARK: {KIND: PREDICTIONS, "samples": list(self._samples)}} if samples else USUAL
        asked = json.dumps([dict(facts), [asdict(output) for output in outputs]], sort_keys=True)
        self._facts = hashlib.sha256(asked.encode()).hexdigest()
        self._outputs = {(output.name, output.row): self._name(output) for output in outputs}
        names = self._outputs.values()
        self._stores = {n: SealedStore(path / n, f"output {n!r}", {}, read_only=False) for n in names}
        self.done: set[int] = set()
        with reporting(path):
            if group_attributes(path) == {**self._mark, UNFINISHED: self._facts}:
                self._go_on()
            if not self.done:
                self._begin(outputs)
        self._noted = {name: set(store.records) for name, store in self._stores.items()}
        stores = self._stores.items()
        self.arrays = {name: zarr.open_array(store=store, mode="r+") for name, store in stores}

    def _name(self, output: Output) -> str:
        name = array_name(output.name)
        return name if output.row is None else f"{list(self._samples)[output.row]}/{name}"

    def place(self, output: str, row: int) -> tuple[Array, Region]:
        """Return the array that has an output of a sample, and where in it if others are there, too."""
        if (output, row) in self._outputs:
            return self.arrays[self._outputs[output, row]], ()
        return self.arrays[self._outputs[output, None]], ((row, row + 1),)

    def note(self, rows: Sequence[int]) -> None:
        records = {}
        for name, store in self._stores.items():
            if new := store.records.keys() - self._noted[name]:
                self._noted[name] |= new
                records[name] = {key: [store.records[key].nbytes, store.records[key].crc] for key in new}
        with reporting(self.path), (self.path / PROGRESS).open("ab") as stream:
            stream.write(line_of({"step": rows[-1], "rows": list(rows), "records": records}))

    def finish(self) -> zarr.Group:
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
            mark = group_attributes(self.path).get(MARK)
            if not empty and (mark.get(KIND) if isinstance(mark, Mapping) else mark) != PREDICTIONS:
                text = f"{self.path} is there already and no earlier prediction; choose another place"
                raise StoreError(text)
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
            form: dict[str, Any] = {"shape": output.shape, "dtype": output.dtype, "chunks": output.chunks}
            # A sample that was never computed is not zeros, whoever reads it.
            form["fill_value"] = np.nan if np.dtype(output.dtype).kind == "f" else 0
            config: Any = {"write_empty_chunks": True}
            zarr.create_array(store=store, attributes={"name": output.name}, config=config, **form)
        metadata = {name: store.records["zarr.json"]._asdict() for name, store in self._stores.items()}
        (self.path / PROGRESS).write_bytes(line_of({"step": -1, "metadata": metadata}))

    def _go_on(self) -> None:
        """Take what an earlier call has done, as far as it is what was written."""
        file = self.path / PROGRESS
        lines = file.read_bytes().split(b"\n") if file.exists() else []
        found = [row for line in lines if (row := row_of(line)) is not None]
        if not found or "metadata" not in found[0]:
            return
        for name, store in self._stores.items():
            store.records["zarr.json"] = Record(**found[0]["metadata"][name])
        if not all(self._sound(name, "zarr.json") for name in self._stores):
            return
        for row in found[1:]:
            places = [(name, key) for name, its in row["records"].items() for key in its]
            for name, key in places:
                self._stores[name].records[key] = Record(*row["records"][name][key])
            if all(self._sound(*place) for place in places):
                self.done |= set(row["rows"])
                continue
            for name, key in places:
                del self._stores[name].records[key]

    def _sound(self, name: str, key: str) -> bool:
        try:
            return self._stores[name].read(key) is not None
        except CorruptError:
            return False


def is_unfinished(path: Path) -> bool:
    """Whether a prediction is there that the same call would go on with."""
    return UNFINISHED in group_attributes(path)
