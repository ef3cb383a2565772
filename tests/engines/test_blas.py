"""Products of NumPy take the threads of a kernel, where an engine computes by them."""

from __future__ import annotations

import pytest

from oocdl.engines.blas import blas_threads, limit_blas_threads

pytest.importorskip("onnxruntime")
from oocdl.engines.ort.engine import make_engine


@pytest.mark.skipif(not blas_threads(), reason="NumPy has no OpenBLAS of its own")
def test_an_engine_sets_the_threads_of_products() -> None:
    before = max(blas_threads())
    try:
        for count in (2, 1):
            make_engine(count)
            assert set(blas_threads()) == {count}
    finally:
        limit_blas_threads(before)
