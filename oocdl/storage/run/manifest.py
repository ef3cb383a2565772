"""The manifest of a version names every array and every chunk, with its length and crc32c.

A checksum inside a chunk cannot tell a stale or swapped chunk, which is intact. So the checksums stand
here, at (array, chunk) of one version and epoch, and the manifest's own digest stands in ``CURRENT``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.files import sync_path, write_text
from oocdl.storage.zarr_json import chunk_key, grid

Kind = Literal["weights", "state"]
Index = tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Describes an array of the run, weights or optimizer state, on a regular grid of chunks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    """A NumPy dtype name."""
    chunks: tuple[int, ...]
    """Extents of a chunk; those at the border are padded with zeros."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise StoreError(f"array {self.name!r} has kind {self.kind!r}, not weights or state")
        if len(self.chunks) != len(self.shape) or min(self.chunks, default=1) < 1:
            raise StoreError(f"array {self.name!r} {self.shape} cannot have chunks {self.chunks}")

    @property
    def grid(self) -> Index:
        """Number of chunks along each axis."""
        return grid(self.shape, self.chunks)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of every stored chunk."""
        return prod(self.chunks) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Record:
    """Length in bytes and crc32c that one stored chunk must have."""

    nbytes: int
    crc: int


@dataclass(frozen=True)
class Tensor:
    """A stored array: its folder, and the record of each of its chunks."""

    spec: TensorSpec
    id: str
    """Names its folder, and stays with the array's name: a name from a model file is never a path."""
    epoch: int
    version: int
    """Epoch and version that wrote it: older than the manifest's for an array that was carried over."""
    records: Mapping[Index, Record]

    @property
    def folder(self) -> str:
        """Path of the Zarr array, relative to the run."""
        return f"{self.spec.kind}/{self.id}/e{self.epoch}-v{self.version}"


@dataclass(frozen=True)
class Manifest:
    """Describes a committed version: all arrays, and what the caller stored with them."""

    version: int
    epoch: int
    parent: str | None
    """File name of the manifest before it."""
    meta: Mapping[str, Any]
    """Plain data that the caller stored with it; ``step`` is the last step it contains."""
    tensors: Mapping[str, Tensor]
    """By name."""
    next_id: int
    """Number of the next new array."""

    @property
    def file(self) -> str:
        """Its file name."""
        return f"manifest-{self.version}-e{self.epoch}.json"

    def dumps(self) -> str:
        """Write the manifest as JSON."""
        tensors = [
            {
                **{key: value for key, value in vars(tensor.spec).items()},
                "id": tensor.id,
                "epoch": tensor.epoch,
                "version": tensor.version,
                "records": {chunk_key(at): [r.nbytes, r.crc] for at, r in tensor.records.items()},
            }
            for tensor in self.tensors.values()
        ]
        head = {**vars(replace(self, tensors={})), "meta": dict(self.meta), "tensors": tensors}
        return json.dumps(head, default=_plain)

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read a manifest from JSON; raises ValueError, KeyError or TypeError if it is none."""
        head = json.loads(text)
        tensors = [_tensor(item) for item in head.pop("tensors")]
        return cls(tensors={tensor.spec.name: tensor for tensor in tensors}, **head)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise StoreError(f"a run stores plain JSON values only, not {value!r}")


def _tensor(item: Mapping[str, Any]) -> Tensor:
    return Tensor(
        spec=TensorSpec(
            name=item["name"],
            kind=item["kind"],
            shape=tuple(item["shape"]),
            dtype=item["dtype"],
            chunks=tuple(item["chunks"]),
        ),
        id=item["id"],
        epoch=item["epoch"],
        version=item["version"],
        records={
            tuple(int(part) for part in key.split(".")[1:]): Record(*record)
            for key, record in item["records"].items()
        },
    )


def publish(root: Path, manifest: Manifest) -> None:
    """Make ``manifest`` the current version, durably: CURRENT is replaced last."""
    text = manifest.dumps()
    write_text(root / manifest.file, text)
    sync_path(root)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_text(root / "CURRENT", json.dumps({"manifest": manifest.file, "sha256": digest}))
    sync_path(root)


def load_current(root: Path) -> Manifest | None:
    """Read the manifest of the committed version; None before the first commit.

    Raises CorruptError if CURRENT or its manifest is damaged or lost.
    """
    path = root / "CURRENT"
    if not path.exists():
        # Before the first commit there is at most its own manifest, not yet acknowledged.
        if len(list(root.glob("manifest-*.json"))) > 1:
            raise CorruptError(f"{path} is missing, but versions are there; restore it")
        return None
    try:
        pointer = json.loads(path.read_text())
        text = (root / Path(pointer["manifest"]).name).read_text()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is damaged ({error}); restore it from a backup") from error
    if hashlib.sha256(text.encode()).hexdigest() != pointer.get("sha256"):
        raise CorruptError(f"{root / pointer['manifest']} is damaged; restore it from a backup")
    return Manifest.loads(text)


def load_parent(root: Path, manifest: Manifest) -> Manifest | None:
    """Read the version before ``manifest``; None if it is gone or damaged, as it is only a spare."""
    if manifest.parent is None:
        return None
    try:
        return Manifest.loads((root / manifest.parent).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing depends on it
