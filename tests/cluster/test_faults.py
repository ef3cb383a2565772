"""A few random faults; the hundreds are run by ``python -m tests.kit.faults``."""

from __future__ import annotations

import pytest

from tests.kit import faults


def test_a_run_survives_workers_and_drivers_that_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "1", "--faults", "2", "--steps", "30", "--seed", "3"]
    words += ["--only", "kill a worker", "kill the driver"]
    assert faults.main(words) == 0, capsys.readouterr().out
