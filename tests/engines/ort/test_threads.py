"""Products of NumPy take one thread, where the engine computes by them."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

pytest.importorskip("onnxruntime")
from oocdl.engines.ort.ort_engine import make_engine


def test_an_engine_gives_products_one_thread() -> None:
    with threadpool_limits(2, user_api="blas"):  # those of before, afterwards
        make_engine()
        assert {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"} == {1}
