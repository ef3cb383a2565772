"""Tells which pieces of weights and state live together, which calls renew them, what these wait for.

Calls are named by their places in the pass, pieces and other chunks by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from oocdl.planning.calls import CombineCall, UnitCall
from oocdl.planning.hosts.flat_pass import FlatPass
from oocdl.planning.hosts.ragged import Ints


class Going(NamedTuple):
    """Results of calls that updates of weights need; each call has a run of columns."""

    first: list[int]
    """First of the columns of each call, and the end of the last."""
    piece: Ints
    """One of the pieces that live with the weight."""
    nbytes: Ints


def going(flat: FlatPass, update_of: Mapping[int, int], together: Mapping[int, tuple[int, ...]]) -> Going:
    """Return what the calls of ``update_of`` read of other calls, each part once for all that lives together.

    What was added to a sum that others began is left out: that sum would have to come first.
    """
    if not update_of:
        return Going([0] * len(flat.results), *np.empty((2, 0), np.int64))
    arguments, reader = flat.arguments_of(list(update_of))
    piece = np.array([min(together[piece]) for piece in update_of.values()], np.int64)[reader]
    adds = np.zeros(len(flat.calls), bool)
    adds[flat.adding] = True
    source = flat.source[arguments]
    known = (flat.maker[source] >= 0) & ~adds[flat.maker[source]]
    columns = np.stack([source, piece, flat.part[arguments]])[:, known]
    _, once = np.unique(columns, axis=1, return_index=True)
    source, piece, nbytes = (one[known][once] for one in (source, piece, flat.nbytes[arguments]))
    return Going(np.searchsorted(source, flat.results).tolist(), piece, nbytes)


def _replaced(flat: FlatPass) -> dict[int, int]:
    """Return each piece that the pass starts from and makes anew -> the call that makes it; -1: none does.

    Sums of gradients are not there before the first pass.
    """
    number, replaced, before = flat.number, flat.graph.replaced, flat.graph.input_bytes
    return {
        number[stored]: int(flat.maker[number[made]]) for stored, made in replaced.items() if stored in before
    }


def updates_of(flat: FlatPass) -> dict[int, int]:
    """Return each call that makes a piece of a weight or of state anew -> that piece, one of several."""
    return {call: stored for stored, call in _replaced(flat).items() if call >= 0}


def _read_by(flat: FlatPass, call: int) -> list[int]:
    """Return the chunks that a call reads, if it is a unit."""
    unit = isinstance(flat.calls[call], UnitCall)
    return flat.source[slice(*flat.first[call : call + 2])].tolist() if unit else []


def updated_together(flat: FlatPass, updates: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return each piece of weights or state -> the pieces that live with it, itself among them.

    These are pieces of a weight and of its state: of equal size, one made anew from the other.
    """
    replaced = _replaced(flat)
    root = {stored: stored for stored in replaced}

    def find(chunk: int) -> int:
        while root[chunk] != chunk:
            chunk = root[chunk] = root[root[chunk]]
        return chunk

    for stored, call in replaced.items():
        root[find(stored)] = find(updates.get(call, stored))
    for call, mine in sorted(updates.items()):
        for chunk in _read_by(flat, call):
            if chunk in root and flat.sizes[chunk] == flat.sizes[mine]:
                root[find(chunk)] = find(mine)
    groups: dict[int, list[int]] = {}
    for stored in root:
        groups.setdefault(find(stored), []).append(stored)
    return {stored: tuple(pieces) for pieces in groups.values() for stored in pieces}


def updates_that_read(flat: FlatPass, updates: Mapping[int, int]) -> dict[int, int]:
    """Return each call that combines partial sums -> a stored piece of the weight that its result updates."""
    found: dict[int, int] = {}
    for call, mine in sorted(updates.items()):
        for chunk in _read_by(flat, call):
            maker = int(flat.maker[chunk])
            if maker >= 0 and isinstance(flat.calls[maker], CombineCall):
                found.setdefault(maker, mine)
    return found
