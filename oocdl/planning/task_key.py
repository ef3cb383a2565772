"""The keys of tasks: fields that say what a task is for, and the key that a Dask cluster has for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

HEX_NAME = re.compile("[0-9a-f]{32}")


class TaskKind(StrEnum):
    """The work of a task. Kinds are text, so a key is hashed without a call into Python."""

    STORED = "stored"
    """It is a piece of a weight, of optimizer state or of a sum that the pass starts from."""
    UNIT = "unit"
    """It runs a unit of a layer."""
    RESULT = "result"
    """It takes one result of a unit that makes several."""
    COMBINE = "combine"
    """It combines the partial sums of a layer."""
    COMBINED = "combined"
    """It takes one result of a combining task that makes several."""
    RECUT = "recut"
    """It cuts a value as it is stored."""
    STRIP = "strip"
    """It takes a part of a chunk for a unit on another worker."""
    BUNDLE = "bundle"
    """It has a bundle of chunks ready for another worker of a cluster."""
    SEGMENT = "segment"
    """It runs what a worker of a cluster does of a layer, or of several."""
    GROUP = "group"
    """It keeps the group of a layer on a cluster as long as a run lasts."""


class TaskKey(NamedTuple):
    """The identity of a task within a pass. Two different tasks of a pass differ in some field."""

    kind: TaskKind
    layer: str
    """Name of the layer that the task belongs to; empty for what the pass starts from."""
    value: str
    """Name of the value that the task makes; empty for a unit and for a strip."""
    number: int
    """Counts the tasks that have the other fields in common: the shard, for a unit."""


def stored_key(value: str, number: int) -> TaskKey:
    """Return the key of one piece of a weight, of optimizer state or of a sum, by its place among them."""
    return TaskKey(TaskKind.STORED, "", value, number)


def result_key(key: TaskKey, value: str, count: int) -> TaskKey:
    """Return the key of one of ``count`` values that a unit or a combining task makes.

    It is the task's own key if that makes only one value.
    """
    if count == 1:
        return key
    kind = TaskKind.COMBINED if key.kind is TaskKind.COMBINE else TaskKind.RESULT
    return TaskKey(kind, key.layer, value, key.number)


def result_keys(key: TaskKey, values: Sequence[str]) -> list[TaskKey]:
    """Return the keys of all ``values`` that a unit or a combining task makes."""
    return [result_key(key, value, len(values)) for value in values]


DaskKey = tuple[str, str, str, str, str, int]


def dask_key(key: TaskKey, pass_name: str) -> DaskKey:
    """Return the key of a task on a Dask cluster, where ``pass_name`` tells passes apart.

    Different keys and passes give different results, whatever layers and values are called. The first
    element is what ``dask.utils.key_split`` and ``key_split_group`` make of the result. Dask keeps an
    entry for every such name for ever, so it is the layer's alone.

    >>> dask_key(TaskKey(TaskKind.UNIT, "down1.conv1", "", 3), "a1b2/17")
    ('down1.conv1', 'a1b2/17', 'unit', 'down1.conv1', '', 3)
    """
    return group_of(key.layer), pass_name, key.kind.value, key.layer, key.value, key.number


def task_key(key: DaskKey) -> TaskKey:
    """Return the key that ``dask_key`` was given.

    >>> task_key(("down1.conv1", "a1b2/17", "unit", "down1.conv1", "", 3)).number
    3
    """
    return TaskKey(TaskKind(key[2]), *key[3:])


def group_of(layer: str) -> str:
    """Return the name that Dask shows for the tasks of a layer: the layer's own, if Dask leaves it whole.

    Dask cuts names at a dash before what looks like a number or a hash, takes 32 hexadecimal digits for a
    hash, and strips quotes, brackets and all after a comma where the first character is no letter.

    >>> group_of("down1.conv1"), group_of("head-1"), group_of("<lambda>")
    ('down1.conv1', 'head_1', 'layer <lambda>')
    """
    name = layer.replace("-", "_")
    return name if name[:1].isalpha() and not HEX_NAME.fullmatch(name) else f"layer {name}"
