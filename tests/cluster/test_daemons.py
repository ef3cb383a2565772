"""Real batch systems of tests are one at a time, however many processes run tests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kit.daemons import alone


def test_one_at_a_time_whoever_waits_and_whoever_comes_later(tmp_path: Path) -> None:
    """Each takes its turn twice, so that some wait for a lock that its holder removes."""
    there: list[int] = []
    most = []

    def start() -> None:
        there.append(0)
        most.append(len(there))

    def turns(_: int) -> None:
        for _ in range(2):
            with alone(tmp_path / "system", start, there.pop):
                time.sleep(0.05)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(turns, range(3)))
    assert most == [1] * 6
    assert list(tmp_path.iterdir()) == []
