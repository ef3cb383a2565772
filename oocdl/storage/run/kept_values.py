"""Activations and gradients that the user asked to keep, as Zarr arrays under ids.

Each is made in a folder of its step, and becomes the run's with the next commit.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import zarr

from oocdl.storage.run.manifest import KeptSeal
from oocdl.storage.sealed_store import SealedStore


class Kept:
    """The folder ``kept/`` of a run; names are in the attributes, never in paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, list[KeptSeal]] = {}
        """Not committed yet, by name: that of the step that runs, and the one before, which is what is
        committed if this one stops. Their stores record what is written."""

    def make(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        chunks: tuple[int, ...],
        step: int,
        committed: Mapping[str, KeptSeal],
    ) -> zarr.Array[Any]:
        """Make a writable array for ``name``; of those that are not committed the one before stays."""
        made = self._made.setdefault(name, [])
        while len(made) > 1:
            shutil.rmtree(self._folder / made.pop(0).id)
        taken = [path.name for path in self._folder.glob("k*-s*")] + [seal.id for seal in committed.values()]
        number = max((int(ident[1:].partition("-")[0]) for ident in taken), default=-1) + 1
        ident = f"k{number:05d}-s{step}"
        store = SealedStore(self._folder / ident, what(name, step), {}, read_only=False)
        array = zarr.create_array(
            store, shape=shape, dtype=dtype, chunks=chunks, compressors=None,
            attributes={"name": name, "step": step},
            config={"write_empty_chunks": True},  # a missing chunk is a loss, never zeros
        )  # fmt: skip
        made.append(KeptSeal(ident, step, store.records))
        return array

    def arrays(self, committed: Mapping[str, KeptSeal]) -> Mapping[str, zarr.Array[Any]]:
        """Open kept arrays, by name, read-only; what is read from them is verified."""
        stores = {
            name: SealedStore(self._folder / seal.id, what(name, seal.step), dict(seal.records))
            for name, seal in committed.items()
        }
        return {name: zarr.open_array(store=store, mode="r") for name, store in stores.items()}

    def seals(self, step: int) -> dict[str, KeptSeal]:
        """Return the last of what was made up to ``step``, by name, for the manifest of that step."""
        sealed = ((name, seal) for name, made in self._made.items() for seal in made if seal.step <= step)
        return {name: replace(seal, records=dict(seal.records)) for name, seal in sealed}

    def files(self) -> list[Path]:
        """Return the files and folders of what was made since the last commit."""
        folders = [self._folder / seal.id for made in self._made.values() for seal in made]
        return [path for folder in folders for path in (folder, *folder.rglob("*"))]

    def committed(self) -> None:
        self._made.clear()


def what(name: str, step: int) -> str:
    """Name a kept value in an error."""
    return f"kept value {name!r} of step {step}"
