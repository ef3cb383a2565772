"""Products of NumPy take the threads of a kernel, where the engine computes by them."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

pytest.importorskip("onnxruntime")
from oocdl.engines.ort.ort_engine import make_engine


def test_an_engine_sets_the_threads_of_products() -> None:
    with threadpool_limits(user_api="blas"):  # those of before, afterwards
        for count in (2, 1):
            make_engine(count)
            found = {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}
            assert found == {count}
