"""Steps of thousands of units plan, or are refused by a sentence that names a budget which would do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oocdl.errors import BudgetError
from tests.kit import nets
from tests.kit.machine import Small, plan
from tests.kit.settings import QUICK

PROCESS_BYTES = 300 << 20
OPTIONS = {**QUICK, "parallel": {"space": (16, 16, 8)}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("many")
    model = nets.write_conv(folder / "conv.onnx")
    return model, nets.write_data(folder / "data.zarr", nets.volumes(samples=1, extent=32))


def test_thousands_of_units_plan(files: tuple[Path, Path]) -> None:
    made = plan(*files, machine=Small(1 << 30, PROCESS_BYTES), **OPTIONS)
    assert made.kinds["main"].plan.tasks > 4096


def test_without_room_for_the_plan_a_budget_is_named(files: tuple[Path, Path]) -> None:
    """Memory for the units is not what is lacking."""
    with pytest.raises(BudgetError, match=r"a plan of so many finds no room .* would do") as refused:
        plan(*files, machine=Small(32 << 20, PROCESS_BYTES), **OPTIONS)
    named = re.search(r"memory='(\d+)MiB'", str(refused.value))
    assert named is not None
    assert 100 < int(named[1]) - (PROCESS_BYTES >> 20) < 1000
