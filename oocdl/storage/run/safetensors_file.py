"""Writes arrays as a file of safetensors, block by block (https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.array_layout import Array
from oocdl.storage.files import as_bytes, sync_path
from oocdl.storage.run.manifest import TensorSpec

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""NumPy's name of a type -> that in the file."""


def write_safetensors(
    path: Path, specs: Mapping[str, TensorSpec], blocks: Callable[[str], Iterable[Array]]
) -> Path:
    """Write arrays, each as its blocks in C order, beside ``path``, which appears at the end; returns it."""
    ordered = sorted(specs.values(), key=lambda spec: -np.dtype(spec.dtype).itemsize)  # aligned
    sizes = [prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in ordered]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec, size, end in zip(ordered, sizes, accumulate(sizes), strict=True):
        if spec.dtype not in DTYPES:
            raise UnsupportedError(f"weight '{spec.name}' is {spec.dtype}, which safetensors does not have")
        place = [end - size, end]
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for spec in ordered:
                for block in blocks(spec.name):
                    file.write(as_bytes(np.ascontiguousarray(block)).data)
        sync_path(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
