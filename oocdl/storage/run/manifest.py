"""The manifest of a version names every array and every chunk, with its length and crc32c.

A checksum inside a chunk cannot tell a stale or swapped chunk, which is intact. So the checksums stand here,
at (array, chunk) of one version and epoch, beside those of history and kept values and the digests of other
files; the manifest's own digest stands in it and in ``CURRENT``. A run directory may come from anywhere: what
is read from a manifest is checked against patterns before a path is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal, get_args

import numpy as np

from oocdl.errors import StoreError
from oocdl.storage.checksums import Record, sealed, unsealed
from oocdl.storage.zarr_json import chunk_key, grid

Kind = Literal["weights", "state"]
Index = tuple[int, ...]
WAY_OUT = "'oocdl repair' goes back to the newest sound version"
GROUPS = ("", "weights", "state", "kept")  # folders of a run that are Zarr groups


@dataclass(frozen=True)
class TensorSpec:
    """Describes an array of the run, weights or optimizer state, on a regular grid of chunks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]  # extents of a chunk; those at the border are padded with zeros

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise StoreError(f"array {self.name!r} has kind {self.kind!r}, not weights or state")
        if len(self.chunks) != len(self.shape) or min(self.chunks, default=1) < 1:
            raise StoreError(f"array {self.name!r} {self.shape} cannot have chunks {self.chunks}")

    @property
    def grid(self) -> Index:
        return grid(self.shape, self.chunks)

    @property
    def chunk_bytes(self) -> int:
        return prod(self.chunks) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Tensor:
    """A stored array: its folder, and the record of each of its chunks."""

    spec: TensorSpec
    id: str  # names its folder, and stays with the array's name: a name from a model file is never a path
    epoch: int
    version: int  # epoch and version that wrote it: older ones for an array that was carried over
    records: Mapping[str, Record]  # file of a chunk -> its record; that of the metadata follows from the rest

    @property
    def folder(self) -> str:
        return f"{self.spec.kind}/{self.id}/e{self.epoch}-v{self.version}"


@dataclass(frozen=True)
class Sealed:
    """A folder of which a manifest has the records: an array of a version, or a kept value."""

    what: str
    step: int  # step of the version that it belongs to, or that it was kept in
    folder: str  # path relative to the run
    files: Mapping[str, Record]


@dataclass(frozen=True)
class HistorySeal:
    """Length and checksum of the committed part of the history."""

    rows: int = 0
    nbytes: int = 0
    crc: int = 0


@dataclass(frozen=True)
class KeptSeal:
    """A kept value: its folder, and the record of each of its files."""

    id: str
    step: int
    records: Mapping[str, Record]  # key of the Zarr array -> record, its metadata included

    def sealed(self, name: str) -> Sealed:
        return Sealed(f"kept value {name!r}", self.step, f"kept/{self.id}", self.records)


@dataclass(frozen=True)
class Manifest:
    """Describes a committed version: all arrays, and what the caller stored with them."""

    version: int
    epoch: int
    parent: str | None  # file name of the manifest before it
    meta: Mapping[str, Any]
    """Plain data that the caller stored with it; ``step`` is the last step it contains."""
    tensors: Mapping[str, Tensor]
    next_id: int  # number of the next new array
    seals: Mapping[str, str] = field(default_factory=dict)  # digests of the run's other files, by file name
    history: HistorySeal = HistorySeal()
    kept: Mapping[str, KeptSeal] = field(default_factory=dict)
    checkpoints: Mapping[str, str] = field(default_factory=dict)  # step -> manifest of a kept version

    @property
    def file(self) -> str:
        return f"manifest-{self.version}-e{self.epoch}.json"

    @property
    def step(self) -> int:
        """The last step that it contains; -1 if its writer did not say."""
        return int(self.meta.get("step", -1))

    @property
    def spares(self) -> list[str]:
        """File names of the versions that are kept beside it."""
        return list(dict.fromkeys([*filter(None, [self.parent]), *self.checkpoints.values()]))

    def arrays(self) -> list[Sealed]:
        named = self.tensors.items()
        return [Sealed(f"array {name!r}", self.step, one.folder, one.records) for name, one in named]

    def dumps(self) -> str:
        tensors = [{**vars(tensor.spec), **vars(tensor)} for tensor in self.tensors.values()]
        for item in tensors:
            del item["spec"]
        kept = {name: {**vars(value), "records": dict(value.records)} for name, value in self.kept.items()}
        plain = {"meta": dict(self.meta), "seals": dict(self.seals), "history": asdict(self.history)}
        return sealed("manifest", {**vars(self), **plain, "tensors": tensors, "kept": kept}, _plain)

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read a manifest. Raises ValueError, KeyError, TypeError, AttributeError, StoreError for others."""
        head = unsealed("manifest", text)
        tensors = [_tensor(item) for item in head.pop("tensors")]
        by_name = {tensor.spec.name: tensor for tensor in tensors}
        kept = {name: _kept(item) for name, item in head.pop("kept").items()}
        made = cls(**{**head, "history": HistorySeal(**head["history"])}, tensors=by_name, kept=kept)
        numbers = (made.version, made.epoch, made.next_id, *vars(made.history).values())
        _match(made.parent is None or re.fullmatch(MANIFEST_NAME, made.parent), "parent", made.parent)
        _match(all(type(number) is int and number >= 0 for number in numbers), "number", numbers)
        _match(type(made.meta.get("step", 0)) is int, "step", made.meta)
        _match(all(isinstance(digest, str) for digest in made.seals.values()), "seals", made.seals)
        files = made.checkpoints.values()
        _match(all(re.fullmatch(MANIFEST_NAME, file) for file in files), "checkpoints", made.checkpoints)
        _match(len(by_name) == len(tensors) and len({t.id for t in tensors}) == len(tensors), "arrays", "ids")
        return made


def kept_versions(old: Manifest | None, new: Manifest) -> dict[str, str]:
    """Return which older versions a new one keeps, by step: those whose steps its metadata names."""
    known = {} if old is None else {**old.checkpoints, str(old.step): old.file}
    steps = {*map(str, new.meta.get("checkpoints", ()))} - {str(new.step)}
    return {step: file for step, file in known.items() if step in steps}


MANIFEST_NAME = r"manifest-\d{1,18}-e\d{1,18}\.json"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise StoreError(f"a run stores plain JSON values only, not {value!r}")


def _match(right: object, what: str, value: object) -> None:
    """Raise ValueError unless ``right``: a path, a shape or a number would be made of ``value``."""
    if not right:
        raise ValueError(f"its {what} cannot be {value!r}")


def _tensor(item: Mapping[str, Any]) -> Tensor:
    shape, chunks = tuple(item["shape"]), tuple(item["chunks"])
    spec = TensorSpec(item["name"], item["kind"], shape, item["dtype"], chunks)
    numbers = (*spec.shape, *spec.chunks, item["epoch"], item["version"])
    _match(all(type(number) is int and number >= 0 for number in numbers), "number", numbers)
    _match(isinstance(spec.name, str) and re.fullmatch(r"t\d{5,18}", item["id"]), "id", item["id"])
    _match(np.dtype(spec.dtype).kind in "fiubV", "dtype", spec.dtype)
    records = {key: Record(*record) for key, record in item["records"].items()}
    _match(len(records) == prod(spec.grid), "number of chunks", len(records))
    _match(all(record.nbytes == spec.chunk_bytes for record in records.values()), "chunk", spec.name)
    _match(all(chunk_key(index) in records for index in product(*map(range, spec.grid))), "chunk", spec.name)
    return Tensor(spec, item["id"], item["epoch"], item["version"], records)


def _kept(item: Mapping[str, Any]) -> KeptSeal:
    _match(re.fullmatch(r"k\d{5,18}-s\d{1,18}", item["id"]) and type(item["step"]) is int, "id", item["id"])
    for key in item["records"]:
        _match(re.fullmatch(r"zarr\.json|c(/\d{1,18})*", key), "chunk", key)
    return KeptSeal(item["id"], item["step"], {k: Record(*record) for k, record in item["records"].items()})
