"""The threads of NumPy's matrix products, of which each would take as many as there are cores.

Programs run on several threads at once. Products of OpenBLAS with threads of their own wait for each other
then: attention by NumPy took up to forty times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")
"""Of the names in OpenBLAS as it comes with NumPy."""


def _functions(verb: str) -> Iterator[ctypes._FuncPointer]:
    """Yield the function ``<verb>_num_threads`` of each OpenBLAS that lies beside NumPy."""
    for path in sorted(Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")):
        library = ctypes.CDLL(str(path))
        names = [f"{prefix}_{verb}_num_threads{suffix}" for prefix in _PREFIXES for suffix in _SUFFIXES]
        yield from (getattr(library, name) for name in names if hasattr(library, name))


def blas_threads() -> list[int]:
    """Return how many threads a product takes, for each OpenBLAS; none where NumPy has another library."""
    return [int(function()) for function in _functions("get")]


def limit_blas_threads(count: int) -> None:
    """Have each of NumPy's products in this process take ``count`` threads, where OpenBLAS makes them."""
    for function in _functions("set"):
        function(count)
