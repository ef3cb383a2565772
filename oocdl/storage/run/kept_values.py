"""Activations and gradients that the user asked to keep, as plain Zarr arrays under ids.

Unlike weights they are not versioned: a value that is kept again replaces the one before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zarr


class Kept:
    """The folder ``kept/`` of a run; names are in the attributes, never in paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(
        self, name: str, shape: tuple[int, ...], dtype: str, chunks: tuple[int, ...], step: int
    ) -> zarr.Array[Any]:
        """Make a writable array for ``name``, in place of an earlier one."""
        taken = {str(attributes["name"]): at for at, attributes in self._found().items()}
        path = taken.get(name)
        if path is None:
            numbers = [int(at.name[1:]) for at in taken.values()]
            path = self._folder / f"k{max(numbers, default=-1) + 1:05d}"
        return zarr.create_array(
            store=path,
            shape=shape,
            dtype=dtype,
            chunks=chunks,
            compressors=None,
            attributes={"name": name, "step": step},
            overwrite=True,
            config={"write_empty_chunks": True},  # a missing chunk is a loss, never zeros
        )

    def arrays(self) -> Mapping[str, zarr.Array[Any]]:
        """Open all kept arrays, by name, read-only."""
        return {
            str(attributes["name"]): zarr.open_array(path, mode="r")
            for path, attributes in self._found().items()
        }

    def cut(self, step: int) -> None:
        """Remove arrays of steps after ``step``, and those whose making was cut off."""
        found = self._found()
        for path in self._folder.glob("k*"):
            if path not in found or int(found[path]["step"]) > step:
                shutil.rmtree(path)

    def _found(self) -> dict[Path, Mapping[str, Any]]:
        found = {}
        for path in sorted(self._folder.glob("k*")):
            try:
                attributes = json.loads((path / "zarr.json").read_text())["attributes"]
            except (OSError, ValueError):
                continue  # its making was cut off; cut() removes it
            if {"name", "step"} <= set(attributes):
                found[path] = attributes
        return found
