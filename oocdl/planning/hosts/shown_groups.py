"""Chooses the groups of layers that each task of the cluster shows, for each worker."""

from __future__ import annotations

import numpy as np

from oocdl.planning.hosts.call_seconds import call_seconds
from oocdl.planning.hosts.exchange import Exchange

SHOWN_SECONDS = 0.05
"""Minimum seconds, about, of the layers that a task shows: tasks follow one another in 5 ms at best
(measured), and a pass is not over before the last of them."""
MOST_SHOWN, MOST_TASKS = 12, 4000
"""Maximum tasks of a pass that show layers, of one worker and of all. Each takes 1 ms of a worker's core and
2 of the scheduler's: with 32, steps of a GPT and of a U-Net on two workers took 3 to 10 % longer."""
Groups = tuple[int, ...]


def shown_groups(going: Exchange, members: int, threads: int) -> list[tuple[Groups, ...]]:
    """Return, for each member, of so many threads, the groups that each task shows; by nominal rates.

    The last groups are shown by the task that ends the pass, so a short pass has no other tasks.
    """
    groups = len(going.groups)
    code = going.placed.workers * groups + np.array(going.group_of, np.int64)
    seconds = np.array(call_seconds(going.graph)) / threads
    found, size = np.bincount(code, seconds, members * groups), np.bincount(code, minlength=members * groups)
    most = min(MOST_SHOWN, max(MOST_TASKS // members, 1))
    shown: list[tuple[Groups, ...]] = []
    for one, works in zip(found.reshape(members, -1), size.reshape(members, -1) > 0, strict=True):
        least, mine, spent, together = max(SHOWN_SECONDS, float(one.sum()) / most), [], 0.0, []
        for group in np.flatnonzero(works).tolist():
            together.append(group)
            spent += float(one[group])
            if spent >= least:
                mine.append(tuple(together))
                together, spent = [], 0.0
        shown.append(tuple(mine if together else mine[:-1]))
    return shown


def shown_tasks(going: Exchange, members: int, threads: int) -> list[int]:
    """Return the number of each member's tasks: one begins, one ends, those between show groups."""
    return [2 + len(shown) for shown in shown_groups(going, members, threads)]
