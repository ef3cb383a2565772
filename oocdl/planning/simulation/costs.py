"""Seconds of calls: where programs have cores of their own, and where a process shares its cores."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from oocdl.ops import RULES
from oocdl.planning.calls import CombineCall, UnitCall, made_of
from oocdl.planning.cost_model import TASK_SECONDS, Rates, by_key, cold_seconds, program_seconds

SLOWDOWN_FACTOR = 1.2
"""Programs take so much longer in a run than alone, where nobody else copies and moves bytes: measured
for networks that fit (1.08 to 1.26) and for such that do not (1.2 to 1.4). It stands for all that is charged
by itself where cores are shared, and does not count there."""
GATHER_SECONDS, PART_SECONDS = 1.3e-4, 2.9e-5
"""Time of Python to put together what a unit reads: once, and for each part that is copied. Measured."""
STRIDED_FACTOR = 1.3
"""Parts that lie apart take so much longer to copy than as many bytes side by side."""
UNIT_SECONDS, COMBINE_SECONDS = 6e-4, 1.5e-4
"""Core time of a unit or a combination beside program and reading, where cores are shared: to reserve and
measure memory (0.25 to 0.55 ms), and to put results away. Measured in steps of five networks."""
SCHEDULING_SECONDS, BEGIN_SECONDS = 2.2e-5, 1.4e-5
"""Time of a shared core for each task: while a pass runs, and before the first one starts. Measured too."""


class Costs:
    """Seconds of calls on one thread; those of programs are found once for all processes."""

    def __init__(self, rates: Rates, feeds: Mapping[str, int] | None = None) -> None:
        """``feeds``: value from the dataset -> how many of its first axes, as stored, are samples."""
        self.rates, self.feeds = rates, feeds or {}
        self._program_seconds = by_key(partial(program_seconds, rules=RULES, rates=rates))
        self._cold_seconds = by_key(partial(cold_seconds, rules=RULES))

    def seconds(self, call: UnitCall | CombineCall) -> float:
        """Return the seconds of a call where programs have cores of their own."""
        if isinstance(call, CombineCall):
            return TASK_SECONDS + self._adding(call)
        return TASK_SECONDS + SLOWDOWN_FACTOR * self._program_seconds(call.unit.program)

    def shared_seconds(self, call: UnitCall | CombineCall) -> float:
        """Return the seconds of a core that a call takes where all that the process does shares its cores."""
        if isinstance(call, CombineCall):
            return COMBINE_SECONDS + SCHEDULING_SECONDS + self._adding(call)
        made, program = len(call.unit.makes), call.unit.program
        tasks = 1 if made == 1 else 1 + made  # several results are picked by tasks
        seconds = UNIT_SECONDS + tasks * SCHEDULING_SECONDS
        return seconds + self._program_seconds(program) + self._cold_seconds(program)

    def gathering_seconds(self, parts: int, nbytes: int) -> float:
        """Return the seconds of a shared core for putting together bytes that lie in so many parts."""
        copying = 2 * nbytes / self.rates.copy_bytes_per_second
        return GATHER_SECONDS + parts * PART_SECONDS + STRIDED_FACTOR * copying

    def _adding(self, call: CombineCall) -> float:
        moved = 3 * len(call.counts) * sum(made.nbytes for made in made_of(call))
        return moved / self.rates.copy_bytes_per_second
