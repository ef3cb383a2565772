"""A few random faults; the hundreds are run by ``python -m tests.kit.faults``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import faults
from tests.kit.fault_trial import Fault, Ledger


@pytest.mark.slow
def test_a_run_survives_workers_and_drivers_that_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--runs", "1", "--faults", "2", "--steps", "30", "--seed", "3"]
    words += ["--only", "kill a worker", "kill the driver"]
    assert faults.main(words) == 0, capsys.readouterr().out


def test_every_commit_that_was_told_is_checked() -> None:
    book = Ledger()
    told = [("RunStarted", 0), ("Committed", 0), ("StepDone", 1), ("StepDone", 2), ("Committed", 2)]
    for event, step in told:
        book.hear({"event": event, "step": step})
    book.hear({"event": "WorkersChanged", "step": 2, "text": "a worker is gone"})
    book.hear({"event": "StepDone", "step": 3})
    assert not book.lost and book.checked == 2
    book.hear({"event": "StepDone", "step": 5})
    book.hear({"event": "Committed", "step": 5})
    book.next_step = None  # the next driver
    book.hear({"event": "RunStarted", "step": 4})
    book.check(4, "the end")
    assert len(book.lost) == 3 and "step 5 was done where 4 was to come" in book.lost[0]
    assert "RunStarted: step 5 was committed, and only 4 are there" in book.lost[1]


def test_a_fault_is_told_went_on_or_was_overtaken() -> None:
    def judged(*events: str) -> Fault:
        said = [(float(when), {"event": event}) for when, event in enumerate(events, 1)]
        driver: Any = SimpleNamespace(said=said)
        fault = Fault("kill a worker", 0.5, driver, True)
        fault.judge()
        return fault

    told = judged("StepDone", "Notice", "WorkersChanged", "StepDone")
    assert told.told == 1.5 and told.resumed == 3.5 and not told.went_on and not told.overtaken
    assert judged("StepDone", "StepDone", "StepDone").went_on and judged("RunFinished").went_on
    assert judged("StepDone").overtaken
