"""The memory guard: keeps the budget where a prediction was too low.

A budget is kept by counting: arrays exactly, scratch of programs and growth of the process as predicted. The
guard looks at what the process *has*. Where that, and what units have reserved and not written yet, is more
than it may have, the heap is trimmed; if that is not enough, so much is *withheld* from the memory tier,
which then keeps fewer chunks in RAM, and programs wait for others to end. Results stay as they are: no order
of sums changes. Where even one unit that runs alone finds no room, the run ends with an error before it
starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from oocdl.errors import ResourceError
from oocdl.host.limits import anonymous_bytes

PERIOD_SECONDS = 0.005
"""The process is measured no more often than this; to ask the kernel takes 8 µs."""
RELIEF_SECONDS = 0.02
"""Nor is the heap trimmed, or more withheld, more often than this: chunks take as long to leave."""


class MemoryGuard:
    """Compares what the process has with a budget. Not thread-safe: ``Heap`` asks under its lock.

    Of the budget, ``kernel_bytes`` are the kernel's, and ``file_bytes`` for pages of mapped files, which one
    unit that runs alone may use up: the kernel can read them again.

    >>> guard = MemoryGuard(100, measure=lambda: 90, clock=lambda: 0.0)
    >>> guard.is_time("measure"), guard.is_time("measure"), guard.has_bytes(), guard.excess_bytes(30)
    (True, False, 90, 20)
    >>> guard.withhold(20, over_bytes=20)
    >>> guard.withheld_bytes, guard.notice is None
    (20, False)
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        kernel_bytes: int = 0,
        file_bytes: int = 0,
        measure: Callable[[], int] = anonymous_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = budget_bytes - kernel_bytes - file_bytes
        """Limit of the process's own memory, beside the kernel's share and pages of files."""
        self._budget_bytes, self._kernel_bytes = budget_bytes, kernel_bytes
        self.withheld_bytes = 0
        """Bytes withheld from the tier, for good: what was not predicted once may come again."""
        self.notice: str | None = None
        """Warning that a run gives its user, once; None: nothing had to be withheld."""
        self.seen_bytes = 0
        """Maximum of the process's own memory over all measurements."""
        self._measure, self._clock = measure, clock
        self._last: dict[str, float] = {}

    def is_time(self, action: str, seconds: float = PERIOD_SECONDS) -> bool:
        """Whether an action was not taken for so long; if so, the next time is counted from now."""
        now = self._clock()
        if now - self._last.get(action, -math.inf) < seconds:
            return False
        self._last[action] = now
        return True

    def has_bytes(self) -> int:
        """Measure what the process has of memory of its own."""
        found = self._measure()
        self.seen_bytes = max(self.seen_bytes, found)
        return found

    def withhold(self, nbytes: int, over_bytes: int) -> None:
        """Withhold so much from the tier: the process was about to have ``over_bytes`` more than it may."""
        self.withheld_bytes = max(self.withheld_bytes, nbytes)
        if self.notice is None:
            self.notice = (
                f"this process was about to take {(self.most_bytes + over_bytes) >> 20} MiB of the "
                f"{self.most_bytes >> 20} MiB that it may have: programs or libraries take more than was "
                "predicted; units wait and chunks leave memory earlier from now on (equal results, slower "
                "steps); more memory= avoids it"
            )

    def excess_bytes(self, to_come_bytes: int) -> int:
        """Return the bytes beyond the whole budget, pages of files given up; negative: below it."""
        return self.has_bytes() + to_come_bytes + self._kernel_bytes - self._budget_bytes

    def check_alone(self, to_come_bytes: int) -> None:
        """Raise ResourceError if one unit that will take so many bytes is too much even alone."""
        excess_bytes = self.excess_bytes(to_come_bytes)
        if excess_bytes <= 0:
            return
        has_bytes = self._budget_bytes - self._kernel_bytes + excess_bytes - to_come_bytes
        enough_bytes = has_bytes + to_come_bytes + self._budget_bytes - self.most_bytes
        raise ResourceError(
            f"this process has {has_bytes / 2**20:.0f} MiB, with no chunk in memory but those of one unit, "
            f"which needs {to_come_bytes / 2**20:.0f} MiB more; the budget is "
            f"{self._budget_bytes / 2**20:.0f} MiB, of which {self._kernel_bytes / 2**20:.0f} MiB are the "
            "kernel's: a library, a callback or another thread takes more than was predicted; the run stays "
            f"at its last commit; free what holds it, or go on with memory='{-(-enough_bytes >> 20)}MiB'"
        )
