"""Exactness at the smallest budget: units as small as the planner makes them, nearly all of it spilled.

What the process itself takes is left out, so that small networks, too, get no more than they need. Steps of
thousands of units plan, or are refused by a sentence that names a budget which would do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.errors import BudgetError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops import RULES
from oocdl.planning import machine
from oocdl.planning.choice import budget
from oocdl.planning.machine import SLACK_BYTES
from oocdl.presets.unets import write_unet3d
from oocdl.report.plan_view import Plan
from oocdl.testing import run_graph
from tests.kit import nets
from tests.kit.commands import python
from tests.kit.jobs import EVEN, NETS, OPTIMIZERS, TOLERANCE, Job, check, prepare, train, unet
from tests.kit.machine import Small, plan
from tests.kit.settings import QUICK

PROCESS_BYTES = 300 << 20
SLOW = pytest.mark.slow
CASES = [*NETS, *(pytest.param(case, marks=SLOW) for case in EVEN[:2])]


def _id(case: Any) -> str:
    return case if isinstance(case, str) else f"unet-{case[0]}"


def named_mib(error: BudgetError) -> int:
    """The budget that would do."""
    named = re.search(r"memory='(\d+)MiB'", str(error))
    assert named is not None
    return int(named[1])


def smallest(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """The capacity that a refusal names."""
    monkeypatch.setattr(budget, "SEARCH_START_BYTES", 1 << 20)
    nothing = Small(capacity_bytes=1, process_bytes=PROCESS_BYTES)
    with pytest.raises(BudgetError) as refused:
        job.fit(folder / "refused", nothing, **options)
    base = nothing.job(job.model, job.data, **job.settings(**options)).machine.base_bytes
    return (named_mib(refused.value) << 20) - base - SLACK_BYTES


@pytest.mark.parametrize("case", CASES, ids=_id)
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_network_is_exact_at_the_smallest_budget(
    case: Any, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(NETS[case] if isinstance(case, str) else unet(*case), tmp_path)
    options = {"optimizer": OPTIMIZERS[optimizer][0]}
    capacity = smallest(job, tmp_path, monkeypatch, **options)
    run = job.fit(tmp_path / "run", Small(capacity, PROCESS_BYTES), **options)
    check(run, *train(job, optimizer), TOLERANCE[optimizer])


PLANS = """
import re, sys, oocdl
options = {"loss": "dice_ce", "optimizer": "adam", "steps": 1}
for memory in sys.argv[3:]:
    try:
        memory = f"{named + int(memory)}MiB" if memory[0] in "+-" else memory
        oocdl.plan(sys.argv[1], sys.argv[2], memory=memory, **options)
        print("accepted")
    except oocdl.errors.BudgetError as error:
        print(error)
        named = int(re.search(r"memory='(\\d+)MiB' would do", str(error))[1])
        print(named)
"""


@pytest.mark.parametrize(
    ("loading_bytes", "memory", "told"),
    [
        (9 << 30, "4GiB", r"a process takes 9216 MiB while it loads engine.* memory='92\d\dMiB'"),
        (0, "1MiB", r"nothing is left beside the process itself \(\d+ MiB .* memory='\d+MiB'"),
    ],
)
def test_a_process_without_room_for_itself_is_told_why(
    loading_bytes: int, memory: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nets.write_mlp(tmp_path / "net.onnx")
    data = nets.write_data(tmp_path / "data.zarr", {"x": np.ones((4, 6), "f4"), "y": np.zeros(4, "i8")})
    monkeypatch.setattr(machine, "loading_budget", lambda engine: loading_bytes)
    with pytest.raises(BudgetError, match=f"^{told} would do$"):
        oocdl.plan(model, data, **QUICK | {"memory": memory})


def test_a_budget_that_is_named_is_accepted_and_little_less_is_not(tmp_path: Path) -> None:
    """In one process and in the next, which parks a few MiB more or less of what it takes."""
    model = write_unet3d(tmp_path / "unet.onnx", base=16, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(samples=1, extent=32))

    def told(*budgets: str) -> list[str]:
        done = python("-c", PLANS, model, data, *budgets)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    nothing, named, little, again, accepted = told("16MiB", "-12", "+0")
    assert nothing.startswith(("nothing is left beside the process", "a process takes"))
    assert "beside the process" in little or "while it loads engine" in little
    assert named == again and accepted == "accepted"
    there, _, other = told(f"{named}MiB", f"{int(named) - 20}MiB")
    assert there == "accepted" and abs(int(other) - int(named)) <= 8


def test_an_accepted_plan_runs_when_partial_results_are_many() -> None:
    build = Builder(RULES)
    x = build.value("x", (4096, 256), "float64", Role.INPUT)
    y = build.value("y", (4096, 64), "float64", Role.INPUT)
    build.outputs = [build("Einsum", x, y, equation="na,nb->ab")]
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(4096, 256)), "y": random.normal(size=(4096, 64))}
    unit = 600_000
    ran = run_graph(build.graph(), RULES, arrays, unit_bytes=unit, capacity_bytes=3 * unit)
    found = next(iter(ran.outputs.values()))
    np.testing.assert_allclose(found, arrays["x"].T @ arrays["y"], rtol=1e-10, atol=1e-10)
    assert ran.peak_bytes <= 3 * unit


def thousands(folder: Path, capacity_bytes: int) -> Plan:
    """The plan of a step of thousands of units."""
    model = nets.write_conv(folder / "conv.onnx")
    data = nets.write_data(folder / "data.zarr", nets.volumes(samples=1, extent=32))
    cuts = {"space": (16, 16, 8)}
    return plan(model, data, machine=Small(capacity_bytes, PROCESS_BYTES), **QUICK, parallel=cuts)


def test_thousands_of_units_plan(tmp_path: Path) -> None:
    assert thousands(tmp_path, 1 << 30).kinds["main"].plan.tasks > 4096


def test_without_room_for_the_plan_a_budget_is_named(tmp_path: Path) -> None:
    """Memory for the units is not what is lacking."""
    with pytest.raises(BudgetError, match=r"a plan of so many finds no room .* would do") as refused:
        thousands(tmp_path, 32 << 20)
    assert 100 < named_mib(refused.value) - (PROCESS_BYTES >> 20) < 1000
