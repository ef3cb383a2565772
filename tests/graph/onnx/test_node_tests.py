"""ONNX's own node tests, of every operator that can be read: each gives ONNX's result, or is refused."""

from __future__ import annotations

import pytest

from oocdl.graph.onnx.reader import supported
from oocdl.ops.registry import RULES
from tests.kit.operator_table import PAGE, onnx_row, own_row, rows, total_row

ANEW = "python -m tests.kit.operator_table"


@pytest.mark.parametrize("op", sorted(supported(RULES)))
def test_results_are_onnxs_or_the_node_is_refused(op: str) -> None:
    assert rows(PAGE.read_text()).get(op) == onnx_row(op), ANEW


def test_the_page_has_all_operators() -> None:
    text = PAGE.read_text()
    assert sorted(rows(text)) == sorted(supported(RULES)), ANEW
    assert text.split("|---|---|---|---|---|---|\n")[1] == "\n".join(map(own_row, sorted(RULES))) + "\n", ANEW
    assert total_row() in text, ANEW
