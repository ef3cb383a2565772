"""Calls and keys of tasks: what a call acquires, one key for each task, and what Dask makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from dask.core import validate_key
from dask.utils import key_split
from distributed.utils import key_split_group

from oocdl.graph.ir.index import Region
from oocdl.graph.ir.region_index import Parts
from oocdl.planning.calls import CombineCall, Read, UnitCall, acquired, in_place
from oocdl.planning.task_key import TaskKey, TaskKind, dask_key, result_key, task_key
from tests.kit.nets import ODD_NAMES


@dataclass(frozen=True)
class Piece:
    """A chunk, as a call sees it."""

    region: Region
    footprint_bytes: int


WHOLE = Piece(((0, 8),), 100)
HALF = Piece(((0, 4),), 50)


def read(region: Region, *numbers: int, overwritten: bool = False) -> Read:
    """A read of arguments ``numbers``, which follow each other."""
    parts = Parts((region,) * len(numbers))
    return Read("x", region, "float32", parts, min(numbers, default=0), overwritten=overwritten)


@pytest.mark.parametrize(
    ("wanted", "pinned"),
    [
        (read(((0, 8),), 0), WHOLE),
        (read(((0, 4),), 1), HALF),
        (read(((0, 4),), 0), None),  # a part of it is copied
        (read(((0, 8),), 0, overwritten=True), None),  # the program writes over it
        (read(((0, 8),), 0, 1), None),  # put together of several
        (read(((0, 8),)), None),  # from a source
    ],
)
def test_a_read_is_in_place_if_it_is_all_of_one_chunk(wanted: Read, pinned: Piece | None) -> None:
    assert in_place(wanted, [WHOLE, HALF]) is pinned


def unit(*reads: Read, buffer_bytes: int) -> UnitCall:
    """A call with these reads; it never runs."""
    program: Any = None
    facts = dict.fromkeys(("partial_sums", "combines", "dtypes", "uses"), ())
    place = {"key": ("layer", 0), "position": 0, "unit": program, "arguments": (("a", 0), ("b", 0))}
    return UnitCall(**place, **facts, reads=reads, buffer_bytes=buffer_bytes, scratch_bytes=7)


def test_a_chunk_read_twice_is_pinned_and_counted_once() -> None:
    found = acquired(unit(read(((0, 8),), 0), read(((0, 8),), 0), buffer_bytes=130), [WHOLE, HALF])
    assert (found.pins, found.array_bytes, found.scratch_bytes) == ((WHOLE,), 30, 7)


def test_pins_beyond_the_buffers_do_not_make_it_negative() -> None:
    found = acquired(unit(read(((0, 8),), 0), read(((0, 4),), 1), buffer_bytes=120), [WHOLE, HALF])
    assert (found.pins, found.array_bytes) == ((WHOLE, HALF), 0)


def test_combining_copies_all_it_reads() -> None:
    call = CombineCall(
        key=("c", 0), position=1, combine="sum", arguments=(("a", 0),), values=("x",), counts=(1,),
        region=WHOLE.region, dtypes=("float32",), buffer_bytes=60,
    )  # fmt: skip
    found = acquired(call, [WHOLE])
    assert (found.pins, found.array_bytes, found.scratch_bytes) == ((), 60, 0)


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
