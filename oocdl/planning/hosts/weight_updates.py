"""Weights and state of a pass: which pieces live together, which calls renew them, what these wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.hosts.flat_pass import FlatPass
from oocdl.planning.hosts.ragged import Ints
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey


class Going(NamedTuple):
    """What calls make for the updates of weights: of each call its own run of columns."""

    first: list[int]
    """For each call, and once more at the end: the first of its columns."""
    piece: Ints
    """A piece of those that live with the weight."""
    nbytes: Ints


def going(flat: FlatPass, update_of: Mapping[int, int], together: Mapping[int, tuple[int, ...]]) -> Going:
    """What the calls of ``update_of`` read of other calls, each part once for all that lives together.

    Not what was added to a sum that others began: it would have to come first.
    """
    if not update_of:
        return Going([0] * len(flat.results), *np.empty((2, 0), np.int64))
    arguments, reader = flat.arguments_of(list(update_of))
    piece = np.array([min(together[piece]) for piece in update_of.values()], np.int64)[reader]
    adds = np.zeros(len(flat.graph.calls), bool)
    for place, call in enumerate(flat.graph.calls):
        adds[place] = isinstance(call, UnitCall) and any(sum_ is not None for sum_ in call.partial_sums)
    source = flat.source[arguments]
    known = (flat.maker[source] >= 0) & ~adds[flat.maker[source]]
    columns = np.stack([source, piece, flat.part[arguments]])[:, known]
    _, once = np.unique(columns, axis=1, return_index=True)
    source, piece, nbytes = (one[known][once] for one in (source, piece, flat.nbytes[arguments]))
    return Going(np.searchsorted(source, flat.results).tolist(), piece, nbytes)


def _replaced(graph: TaskGraph) -> dict[TaskKey, TaskKey]:
    """What is there before the pass and made anew; sums of gradients are not there before the first."""
    return {stored: made for stored, made in graph.replaced.items() if stored in graph.input_bytes}


def updates_of(graph: TaskGraph) -> dict[TaskKey, TaskKey]:
    """Call that makes a piece of a weight or of state anew -> that piece, one of several."""
    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    return {source.get(made, made): stored for stored, made in _replaced(graph).items()}


def updated_together(
    graph: TaskGraph, updates: Mapping[TaskKey, TaskKey]
) -> dict[TaskKey, tuple[TaskKey, ...]]:
    """Piece of weights or state -> the pieces that live with it, itself among them.

    A weight's and its state's: those of equal size of which one is made anew from the other.
    """
    root = {stored: stored for stored in _replaced(graph)}

    def find(key: TaskKey) -> TaskKey:
        while root[key] != key:
            key = root[key] = root[root[key]]
        return key

    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    for stored, made in _replaced(graph).items():
        root[find(stored)] = find(updates[source.get(made, made)])
    for call in graph.calls:
        if call.key in updates and isinstance(call, UnitCall):
            mine, nbytes = updates[call.key], graph.input_bytes[updates[call.key]]
            for key in call.arguments:
                if key in root and graph.input_bytes[key] == nbytes:
                    root[find(key)] = find(mine)
    groups: dict[TaskKey, list[TaskKey]] = {}
    for stored in root:
        groups.setdefault(find(stored), []).append(stored)
    return {stored: tuple(pieces) for pieces in groups.values() for stored in pieces}


def updates_that_read(graph: TaskGraph, updates: Mapping[TaskKey, TaskKey]) -> dict[TaskKey, TaskKey]:
    """Call that combines partial sums -> a stored piece of the weight that is updated by its result."""
    source = {call.key: call.source for call in graph.calls if isinstance(call, PickCall)}
    combined = {call.key for call in graph.calls if isinstance(call, CombineCall)}
    found: dict[TaskKey, TaskKey] = {}
    for call in graph.calls:
        if call.key in updates and isinstance(call, UnitCall):
            for key in call.arguments:
                made = source.get(key, key)
                if made in combined:
                    found.setdefault(made, updates[call.key])
    return found
