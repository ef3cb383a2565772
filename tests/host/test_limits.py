"""What a process may use: every limit that applies, by files and variables made up, and once for real."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

import oocdl
from oocdl.errors import BudgetError, InputError
from oocdl.host import heap, limits
from oocdl.host.limits import Limit, available, check_budget, default_budget_bytes
from tests.kit import nets
from tests.kit.code import ROOT
from tests.kit.commands import python

HUGE = "9223372036854771712"
"""What version 1 says where there is no limit."""


def cgroups(mount: Path, files: dict[str, str], *lines: str) -> dict[int, str]:
    """The limits that are found in a made-up /sys/fs/cgroup: bytes -> name."""
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    return {limit.nbytes: limit.name for limit in limits._cgroup_limits(list(lines), mount)}


def test_the_peak_of_a_call_is_beside_what_was_there() -> None:
    held, made = np.ones(16 << 20, np.uint8), list[int]()

    def call() -> None:
        for size in (8 << 20, 3 << 20):
            made.append(int(np.ones(size, np.uint8)[-1]))

    heap.trim()  # or free memory that other tests have left would be taken
    taken = limits.most_taken_bytes(call)
    if taken is None:
        assert not made, "nothing is called where it is not told"
        return
    assert len(made) == 2 and len(held) == 16 << 20
    assert 7 << 20 < taken < 15 << 20, "the first array may be kept, what is held is not counted"


def test_version_2_counts_all_ancestors_and_both_kinds_of_limit(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max", "a/b/memory.high": "2000", "a/memory.max": "1000"}
    found = cgroups(tmp_path, files, "0::/a/b")
    assert set(found) == {1000, 2000}
    assert found[1000] == f"memory cgroup {tmp_path}/a/memory.max"


def test_version_1_counts_all_ancestors(tmp_path: Path) -> None:
    """Also in a container that does not see its own path."""
    name = "memory.limit_in_bytes"
    files = {f"memory/{name}": HUGE, f"memory/job/{name}": "500", f"memory/job/step/{name}": "700"}
    lines = ("9:cpu,cpuacct:/job", "4:memory:/job/step", "0::/")
    assert set(cgroups(tmp_path, files, *lines)) == {500, 700, int(HUGE)}
    assert set(cgroups(tmp_path, files, "4:memory:/docker/abc")) == {int(HUGE)}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, []),
        ({"MEM_PER_NODE": "4096"}, [4 << 30]),
        ({"MEM_PER_NODE": "0"}, []),  # all that the node has
        ({"MEM_PER_CPU": "1024", "CPUS_ON_NODE": "3"}, [3 << 30]),
        ({"MEM_PER_CPU": "1024"}, []),
    ],
)
def test_slurm_gives_a_job_mebibytes(given: dict[str, str], expected: list[int]) -> None:
    variables = {f"SLURM_{name}": text for name, text in given.items()}
    assert list(limits._slurm_limits(variables)) == []  # a login node may have them set for later
    found = list(limits._slurm_limits({"SLURM_JOB_ID": "77", **variables}))
    assert [limit.nbytes for limit in found] == expected
    assert all("Slurm job 77" in limit.name for limit in found)


def test_slurm_variables_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="SLURM_MEM_PER_NODE='4G' is not a number"):
        list(limits._slurm_limits({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "4G"}))


def test_the_least_limit_counts_and_the_default_is_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "50")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "2")
    assert available() == Limit(100 << 20, "Slurm job 12, SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE")
    assert default_budget_bytes() == int(0.7 * (100 << 20))
    check_budget(100 << 20)
    with pytest.raises(
        BudgetError, match=r"memory=101 MiB is more than the 100 MiB .*Slurm job 12.*give less"
    ):
        check_budget(101 << 20)


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_an_rlimit_counts_what_is_mapped_not_in_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    status = {"VmSize": 5 << 30, "VmRSS": 1 << 30, "VmData": 5 << 30, "RssAnon": 1 << 30}
    monkeypatch.setattr(limits, "_status_bytes", lambda: status)
    kind = getattr(resource, name)
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(
        resource, "getrlimit", lambda asked: (6 << 30, 6 << 30) if asked == kind else infinite
    )
    assert [(limit.nbytes, limit.name) for limit in limits._rlimits()] == [
        (2 << 30, f"{name} of {6 << 10} MiB")
    ]


def test_a_real_rlimit(tmp_path: Path) -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from oocdl.host.limits import available; print(available().nbytes, available().name)"
    )
    done = python("-c", code)
    nbytes, _, name = done.stdout.strip().partition(" ")
    assert 0 < int(nbytes) < 1 << 30 and name == "RLIMIT_AS of 1024 MiB", done.stderr


def test_a_real_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in a cgroup knows its limit, is refused more, and less than loading an engine takes."""
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    from cage import NoCage, cage

    model = nets.write_mlp(tmp_path / "mlp.onnx")
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    words = ("-m", "oocdl", "fit", model, data, "--steps", 1, "--memory")
    ask = "from oocdl.host.limits import available; a = available(); print(a.nbytes, a.name)"
    try:
        with cage(700 << 20) as folder:
            nbytes, _, name = python("-c", ask, group=folder).stdout.strip().partition(" ")
            done = python(*words, "701MiB", group=folder)
        with cage(130 << 20) as small_folder:
            small = python(*words, "130MiB", group=small_folder)
    except NoCage as error:
        pytest.skip(str(error))
    assert small.returncode == 4 and "before it holds an array, and this one may take 130 MiB" in small.stderr
    assert int(nbytes) == 700 << 20 and name.startswith(f"memory cgroup {folder}")
    assert done.returncode == 4 and not (tmp_path / "mlp.run").exists()
    (line,) = done.stderr.strip().splitlines()
    assert "--memory 701 MiB is more than the 700 MiB" in line and str(folder) in line


def test_a_plan_may_be_made_for_a_larger_machine(tmp_path: Path) -> None:
    model = nets.write_mlp(tmp_path / "mlp.onnx")
    data = nets.write_data(tmp_path / "data.zarr", nets.vectors())
    assert oocdl.plan(model, data, memory="1000TiB").spill_bytes == 0
    with pytest.raises(BudgetError, match="more than the .* MiB that this process may use"):
        oocdl.fit(model, data, memory="1000TiB", progress=False)
    assert not (tmp_path / "mlp.run").exists()
    oocdl.fit(model, data, memory="4GiB", steps=1, progress=False)
    with pytest.raises(BudgetError, match="more than the .* MiB that this process may use"):
        oocdl.open(tmp_path / "mlp.run").evaluate(data, memory="1000TiB")


FORKED = """
import os
from oocdl.host.limits import anonymous_bytes
before = anonymous_bytes()
if not (child := os.fork()):
    held = b"x" * (64 << 20)
    os._exit(anonymous_bytes() - before < len(held) // 2)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_measures_itself() -> None:
    assert python("-c", FORKED).returncode == 0
