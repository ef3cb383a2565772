"""``Weights``: the committed weights of a run, as a mapping that opens an array when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.report import notebook
from oocdl.report.tables import MOST_ROWS, array_table
from oocdl.report.units import counted
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore


class Weights(Mapping[str, "zarr.Array[Any]"]):
    """Maps names of weights to read-only Zarr arrays of the committed version."""

    def __init__(self, store: RunStore, model: Path) -> None:
        self.store = store
        self.model = model

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
        return self.store.array("weights", name)

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
