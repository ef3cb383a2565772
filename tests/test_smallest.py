"""Exactness at the smallest budget: units as small as the planner makes them, nearly all of it spilled.

What the process itself takes is left out, so that small networks, too, get no more than they need.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_exact_networks import EVEN, NETS, OPTIMIZERS, TOLERANCE, Job, check, prepare, train, unet

from oocdl import planning
from oocdl.errors import BudgetError
from oocdl.planning import SLACK_BYTES, Machine, machine_for

SLOW = pytest.mark.slow
CASES = [*NETS, *(pytest.param(case, marks=SLOW) for case in EVEN[:2])]


def _id(case: Any) -> str:
    return case if isinstance(case, str) else f"unet-{case[0]}"


def squeezed(monkeypatch: pytest.MonkeyPatch, capacity_bytes: int) -> None:
    """Have runs begun from now on find so much for arrays and programs, whatever ``memory`` says."""

    def machine(*args: Any) -> Machine:
        return replace(machine_for(*args), capacity_bytes=capacity_bytes)

    monkeypatch.setattr("oocdl.train.machine_for", machine)


def smallest(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """The capacity that a refusal names."""
    bases: list[int] = []

    def machine(*args: Any) -> Machine:
        found = replace(machine_for(*args), capacity_bytes=1)
        bases.append(found.base_bytes)
        return found

    monkeypatch.setattr("oocdl.train.machine_for", machine)
    monkeypatch.setattr(planning, "LARGEST_TRIED_BYTES", 1 << 20)
    with pytest.raises(BudgetError) as refused:
        job.fit(folder / "refused", **options)
    named = re.search(r"memory='(\d+)MiB'", str(refused.value))
    assert named is not None
    return (int(named[1]) << 20) - bases[0] - SLACK_BYTES


@pytest.mark.parametrize("case", CASES, ids=_id)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_network_is_exact_at_the_smallest_budget(
    case: Any, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    monkeypatch.setattr(planning, "anonymous_bytes", lambda: 300 << 20)
    job = prepare(NETS[case] if isinstance(case, str) else unet(*case), tmp_path)
    options = {"optimizer": OPTIMIZERS[optimizer][0]}
    capacity = smallest(job, tmp_path, monkeypatch, **options)
    squeezed(monkeypatch, capacity)
    run = job.fit(tmp_path / "run", **options)
    check(run, *train(job, optimizer), TOLERANCE[optimizer])
