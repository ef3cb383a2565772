"""``oocdl fit --cluster slurm`` as a user starts it: the same bits on any nodes, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import oocdl
from tests.kit import slurm as real
from tests.kit.slurm_runs import equal, finished, fit, in_step, log_of, over, write_job

pytestmark = [pytest.mark.usefixtures("slurm"), pytest.mark.timeout(900)]
STEPS = 16
PLANNED = ("--steps", STEPS, "--plan", "alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small U-Net, volumes, and what one process makes of them by the plan that all others repeat."""
    root = tmp_path_factory.mktemp("fit")
    write_job(root)
    with fit(root, "alone", "--steps", STEPS, "--parallel", "space=3") as started:
        finished(started, root / "alone", STEPS)
    return root


SLOW = pytest.mark.slow


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
def test_one_plan_makes_the_same_bits_on_any_number_of_nodes(folder: Path, nodes: int) -> None:
    run = folder / f"nodes{nodes}"
    with fit(folder, run.name, *PLANNED, "--cluster", "slurm", "--nodes", nodes) as started:
        finished(started, run, STEPS)
    assert equal(run, folder / "alone")
    assert oocdl.verify(run).sound
    over()


def cancel() -> None:
    real.run("scancel", real.jobs()[0][0])


def down() -> None:
    real.run("scontrol", "update", f"NodeName={real.jobs()[0][2]}", "State=DOWN", "Reason=test")


@pytest.mark.parametrize("fault", [cancel, pytest.param(down, marks=SLOW)])
def test_what_clusters_do_in_mid_step(folder: Path, fault: Callable[[], None]) -> None:
    run = folder / fault.__name__
    try:
        with fit(folder, run.name, *PLANNED, "--cluster", "slurm", "--nodes", 2) as started:
            in_step(run)
            fault()
            finished(started, run, STEPS)
    finally:
        for node, state in real.states().items():
            if "down" in state:
                real.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert equal(run, folder / "alone")
    said = log_of(run).read_text()
    assert "to go on from step" in said and "is gone; it is submitted again" in said
    over()
