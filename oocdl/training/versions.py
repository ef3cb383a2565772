"""Versions of a run that can be read, its last and those that callbacks have kept, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr

from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.optimizers import average_of
from oocdl.report import notebook
from oocdl.report.tables import MOST_ROWS, array_table
from oocdl.report.units import counted
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore

Which = Literal["last", "best", "ema"] | int | None
"""A version of a run: its last, the best that is kept, the last with averaged weights, or that of a step."""


def kept_steps(store: RunStore) -> tuple[int, ...]:
    """Return the steps whose versions callbacks have kept, the best first."""
    manifest = store.current()
    return () if manifest is None else tuple(manifest.meta.get("checkpoints", ()))


def version_of(store: RunStore, which: Which = None) -> RunStore:
    """Open a version; None: that of early stopping, else the last. InputError if it is not kept."""
    manifest, kept = store.current(), kept_steps(store)
    if manifest is None or which == "last":
        return store
    if which == "best" and not kept:
        way = "train with validation= and callbacks=[oocdl.callbacks.ModelCheckpoint()]"
        raise InputError(f"the run in {store.path} keeps no best version; {way}")
    if which == "ema":
        averages = {name: average_of(name) for name in manifest.tensors}
        averages = {name: other for name, other in averages.items() if other in manifest.tensors}
        if not averages:
            raise InputError(f"the run in {store.path} has no averages of weights; train with ema=0.999")
        return store.reading(averages)
    if which is not None and which != "best" and (isinstance(which, bool) or not isinstance(which, int)):
        raise InputError(f"which is 'last', 'best', 'ema' or a step that is kept, got {which!r}")
    step = kept[0] if which == "best" else which
    step = manifest.meta.get("restored") if step is None else step
    return store if step is None else store.at(step)


class Weights(Mapping[str, "zarr.Array[Any]"]):
    """Maps names of weights to read-only Zarr arrays of the committed version."""

    def __init__(self, store: RunStore, model: Path) -> None:
        self.store, self.model = store, model

    def _specs(self) -> dict[str, TensorSpec]:
        manifest = self.store.current()
        found = manifest.tensors.values() if manifest else ()
        return {tensor.spec.name: tensor.spec for tensor in found if tensor.spec.kind == "weights"}

    def __getitem__(self, name: str) -> zarr.Array[Any]:
        if name not in (names := self._specs()):
            # A tied weight has several names in the module that the file was made of.
            metadata = inspect_onnx(self.model).metadata if self.model.is_file() else None
            found = metadata.initializer_of(name) if metadata is not None else None
            if found not in names:
                raise KeyError(name)
            name = found
        return self.store.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs())

    def __len__(self) -> int:
        return len(self._specs())

    def _sums(self, specs: Mapping[str, TensorSpec]) -> str:
        numbers = sum(math.prod(spec.shape) for spec in specs.values())
        nbytes = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs.values())
        return f"{counted(len(specs), 'array')}, {numbers:,} numbers, {nbytes / 2**20:.1f} MiB"

    def __repr__(self) -> str:
        return f"<weights: {self._sums(self._specs())}>"

    def _repr_html_(self) -> str:
        specs = self._specs()
        hint = ["list(run.weights) names them all"] if len(specs) > MOST_ROWS else []
        return notebook.page(array_table(f"weights: {self._sums(specs)}", specs), *hint)
