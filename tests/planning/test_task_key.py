"""Keys of tasks: one for each task, and what Dask makes of them."""

from __future__ import annotations

from itertools import product

import pytest
from dask.core import validate_key
from dask.utils import key_split
from distributed.utils import key_split_group

from oocdl.planning.task_key import TaskKey, TaskKind, dask_key, result_key, task_key
from tests.kit.nets import ODD_NAMES

NAMES = (
    *("", *ODD_NAMES, "weights", "layer weights", "conv_1", "conv-1", "conv-abcdefab"),
    *("é", "7", "_", "data"),
)


@pytest.mark.parametrize("layer", NAMES)
def test_dask_groups_tasks_by_layer_and_by_nothing_else(layer: str) -> None:
    for kind, value, number in product(TaskKind, NAMES, (0, 7)):
        key = TaskKey(kind, layer, value, number)
        made = dask_key(key, "a1b2-c3/17")
        validate_key(made)
        assert key_split(made) == key_split_group(made) == made[0] == dask_key(key, "other")[0]
        assert task_key(made) == key and isinstance(task_key(made).kind, TaskKind)


def test_a_plain_name_is_shown_as_it_is() -> None:
    for name in ("down1.conv1", "grad/up2.conv1", "update/w", "Gemm_12", "x @ y | z", "a = b > c"):
        assert dask_key(TaskKey(TaskKind.UNIT, name, "", 0), "p")[0] == name


def test_different_keys_and_passes_stay_different() -> None:
    keys = [TaskKey(*fields) for fields in product(TaskKind, NAMES, NAMES, (0, 1))]
    made = {dask_key(key, name) for key in keys for name in ("r/0", "r/1", "s/0")}
    assert len(made) == 3 * len(set(keys)) == 3 * len(keys)


def test_results_of_units_and_of_combining_tasks_are_told_apart() -> None:
    unit, combine = TaskKey(TaskKind.UNIT, "a", "", 0), TaskKey(TaskKind.COMBINE, "a", "mean", 0)
    assert result_key(unit, "mean", 1) == unit and result_key(combine, "mean", 1) == combine
    made = {result_key(key, name, 2) for key in (unit, combine) for name in ("mean", "var")}
    assert len(made | {unit, combine}) == 6
