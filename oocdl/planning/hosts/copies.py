"""Finds small sums that several workers combine, each for itself, as few workers make and read them.

A normalization over a whole volume waits for the sums of all its pieces. If one worker combines them and
sends the total, others wait for two messages, one after the other; if each gets the sums, for one. All of
them add up the same numbers in the same order, so the totals are equal to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oocdl.planning.calls import CombineCall
from oocdl.planning.hosts.flat_pass import FlatPass
from oocdl.planning.hosts.ragged import Ints

MOST_WORKERS = 4
"""Maximum number of workers that make or read a sum that is copied: each hears of all others."""
MOST_BYTES = 64 << 10
"""Maximum bytes that a copied sum adds up; one worker combines a larger sum, and sends the total."""


class Copies(NamedTuple):
    """Calls that combine sums on further workers than the one that they are assigned to."""

    calls: Ints
    """Places of calls; those that pick one of their results are copied with them."""
    workers: Ints

    def holds(self, calls: Ints, workers: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return, for each call (-1: none) and worker, whether the call is copied there."""
        size = int(max(self.workers.max(initial=0), workers.max(initial=0))) + 1
        return np.isin(calls * size + workers, self.calls * size + self.workers)


def copies(flat: FlatPass, workers: Ints) -> Copies:
    """Find the sums that further workers combine, if calls run on these ``workers``."""
    size, count = int(workers.max(initial=0)) + 1, len(workers)
    combines = np.fromiter((isinstance(call, CombineCall) for call in flat.graph.calls), bool, count)
    places = np.flatnonzero(combines)
    added, adder = flat.arguments_of(places)
    adder, piece = places[adder], flat.maker[flat.source[added]]
    read = np.flatnonzero(((flat.maker >= 0) & combines[flat.maker])[flat.source])
    total = flat.maker[flat.source[read]]
    makes, reads = workers[piece], np.unique(total * size + workers[flat.readers(read)])
    ends = np.unique(np.concatenate((adder * size + makes, reads)))
    fits = combines & (np.bincount(ends // size, minlength=count) <= MOST_WORKERS)
    fits &= np.bincount(adder, flat.nbytes[added], count) <= MOST_BYTES
    fits &= np.bincount(adder, makes != workers[adder], count) > 0
    # What a pass hands out is handed out once.
    handed_out = flat.maker[[flat.number[key] for key in flat.graph.outputs]]
    fits[handed_out[handed_out >= 0]] = False
    fits[adder[(piece < 0) | fits[piece]]] = False  # a copy reads what is where it was made
    call, worker = np.divmod(reads, size)
    there = fits[call] & (worker != workers[call])
    return Copies(call[there], worker[there])
