"""The disk: refused before a run that needs more, and when it is full, the last commit stays.

Where the tests run as root, the disk is a small ext4 of its own; the faults are also made by hand.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.cli import app
from oocdl.errors import InputError, ResourceError, StoreError
from oocdl.events import Committed, StepDone
from oocdl.presets.unets import write_unet3d
from oocdl.report import disk_check
from oocdl.storage import files
from oocdl.storage.cache import direct_io
from oocdl.storage.cache.spill_store import own_folders
from tests.kit import machine, nets
from tests.kit.machine import Small

pytestmark = pytest.mark.usefixtures("planned_once")

STEPS = 3
OPTIONS: dict[str, Any] = {
    "engine": "onnxruntime", "threads": 1, "loss": "dice_ce", "progress": False, "steps": STEPS,
    "seed": 5, "commit_seconds": 0, "parallel": {"space": (8,)}, "machine": Small(process_bytes=300 << 20),
}  # fmt: skip
Job = tuple[Path, Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A U-Net that makes 8 MB a step, of which 3 live at once."""
    folder = tmp_path_factory.mktemp("disk")
    model = write_unet3d(folder / "unet.onnx", base=8, depth=2, classes=2)
    return model, nets.write_data(folder / "data.zarr", nets.volumes(1, 24))


@pytest.fixture
def tight(job: Job) -> dict[str, Any]:
    """Options under which most of a step is spilled."""
    plan = machine.plan(*job, **OPTIONS, memory="4GiB")
    return {**OPTIONS, "memory": plan.machine.base_bytes + 3 * plan.compiled.plan.peak_unit_bytes // 2}


WHOLE: dict[int, dict[str, bytes]] = {}
"""By budget: equal budgets are cut equally here."""


@pytest.fixture
def whole(job: Job, tight: dict[str, Any], tmp_path: Path) -> dict[str, bytes]:
    """What comes out of the same plan where nothing is short."""
    if tight["memory"] not in WHOLE:
        WHOLE[tight["memory"]] = nets.files_of(machine.fit(*job, workdir=tmp_path / "whole", **tight))
    return WHOLE[tight["memory"]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 128 MiB."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4 to make a small disk")
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=60)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(place)], capture_output=True, text=True, timeout=60
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, timeout=60)


class Filler:
    """Fills a disk, but for ``left`` bytes, when a run gets to an event; makes room again."""

    def __init__(self, place: Path, left: int, when: Callable[[Any], bool]) -> None:
        self.path, self.left, self.when = place / "filler", left, when

    def __call__(self, event: Any) -> None:
        if self.when(event) and not self.path.exists():
            with self.path.open("wb") as file:
                os.fsync(file)  # what was deleted before counts as free from now on, not seconds later
                os.posix_fallocate(file.fileno(), 0, files.free_bytes(self.path) - self.left)

    def make_room(self) -> None:
        self.path.unlink()


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def spilled(place: Path) -> list[Path]:
    return [path for path in place.rglob("spill-*") if path.is_dir()]


def go_on(job: Job, run: Path, options: dict[str, Any], whole: dict[str, bytes], committed: int) -> None:
    """The run is at its last commit, has no spill, and goes on to the bits of an undisturbed one."""
    left = oocdl.open(run)
    assert left.steps == committed and len(left.history) == committed and not spilled(run)
    assert all(np.isfinite(array[...]).all() for array in left.weights.values())
    assert nets.files_of(machine.fit(*job, workdir=run, **options)) == whole
    assert not list(run.rglob("*.partial"))


# --- before the run --------------------------------------------------------------------------


def test_a_plan_counts_its_disk(job: Job, tight: dict[str, Any], tmp_path: Path) -> None:
    roomy, plan = machine.plan(*job, **{**tight, "memory": "4GiB"}), machine.plan(*job, **tight)
    assert machine.plan(*job, **tight).compiled is plan.compiled, "planned_once does not"
    assert roomy.spill_bytes == 0 and roomy.disk_bytes == roomy.store_bytes >= 3 * roomy.weight_bytes
    assert plan.spill_bytes > 2 * plan.compiled.plan.peak_unit_bytes
    most = {"spill": 0, "store": 0}

    def watched(real: Callable[..., None]) -> Callable[..., None]:
        def write(*args: Any, **options: Any) -> None:
            real(*args, **options)
            stored = [tmp_path / "run" / "weights", tmp_path / "run" / "state"]
            for name, found in {"spill": own_folders(tmp_path / "run" / "spill"), "store": stored}.items():
                most[name] = max(most[name], sum(map(disk_check._bytes_in, found)))

        return write

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oocdl.storage.cache.spill_store.write_array", watched(direct_io.write_array))
        patch.setattr("oocdl.storage.run.commit.write_parts", watched(files.write_parts))
        machine.fit(*job, workdir=tmp_path / "run", **{**tight, "steps": 2})
    assert 0 < most["spill"] <= plan.spill_bytes and 0 < most["store"] <= plan.store_bytes


@pytest.mark.slow
def test_more_than_disk_allows_is_refused(job: Job, tight: dict[str, Any], tmp_path: Path) -> None:
    need = machine.plan(*job, **tight).disk_bytes
    said = r"of disk \(.* of spill, .* disk= allows .* smaller batch"
    with pytest.raises(ResourceError, match=said) as caught:
        machine.fit(*job, workdir=tmp_path / "run", disk=need - 1, **tight)
    one_line(caught.value)
    assert not (tmp_path / "run").exists()
    machine.fit(*job, workdir=tmp_path / "run", disk=need, **{**tight, "steps": 1})
    for bad in ("much", 0, float("nan")):
        with pytest.raises(InputError, match="size"):
            oocdl.plan(*job, disk=bad)


def test_disk_is_a_word_of_the_command_line(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", *map(str, job), "--loss=dice_ce", "--disk=20KiB", f"--workdir={tmp_path / 'run'}"]
    assert app.run_command(words, False) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--disk allows 20480 bytes" in line and "--workdir on another disk" in line


@pytest.mark.parametrize(
    "short", ["both", *(pytest.param(one, marks=pytest.mark.slow) for one in ("run", "spill"))]
)
def test_each_file_system_is_checked_on_its_own(
    job: Job, tight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    plan = machine.plan(*job, **tight)
    run, spill = tmp_path / "run", tmp_path / "fast" / "spill"
    (tmp_path / "fast").mkdir()
    free = {"both": plan.disk_bytes - 1, "run": plan.store_bytes - 1, "spill": plan.spill_bytes - 1}[short]
    where = {"both": tmp_path, "run": run, "spill": spill}[short]
    monkeypatch.setattr(
        disk_check, "free_bytes", lambda path: free if path.is_relative_to(where) else 1 << 60
    )
    if short != "both":  # two file systems

        def stat(path: Path) -> Any:
            found = os.stat(path)
            return os.stat_result((*found[:2], found.st_dev + ("fast" in str(path)), *found[3:10]))

        # only where disks are told apart: other modules need whole times
        monkeypatch.setattr(disk_check, "os", SimpleNamespace(**{**vars(os), "stat": stat}))
    with pytest.raises(ResourceError, match="not enough disk") as caught:
        machine.fit(*job, workdir=run, spill=spill, **tight)
    text = one_line(caught.value)
    assert (str(run) in text, str(spill) in text) == (short != "spill", short != "run")
    assert ("spill= on another disk" in text) == (short != "run") and not run.exists()


@pytest.mark.slow
def test_a_resumed_run_needs_only_what_is_not_there_yet(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS, "steps": 2}
    plan = machine.fit(*job, workdir=tmp_path / "run", **options).plan
    monkeypatch.setattr(disk_check, "free_bytes", lambda path: plan.store_bytes * 6 // 10)
    with pytest.raises(ResourceError, match="weights and state"):
        machine.fit(*job, workdir=tmp_path / "other", **options)
    assert machine.fit(*job, workdir=tmp_path / "run", **{**options, "steps": 3}).steps == 3


# --- where the spill is ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_argument_wins_over_the_variable(
    job: Job, tight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOCDL_SPILL", str(tmp_path / "variable"))
    run = machine.fit(*job, workdir=tmp_path / "run", **{**tight, "steps": 1})
    assert run.history[0]["written_bytes"] > 0
    assert list((tmp_path / "variable").glob("LOCK-*")) and not (tmp_path / "run" / "spill").exists()
    machine.fit(*job, workdir=tmp_path / "two", spill=tmp_path / "argument", **{**tight, "steps": 1})
    assert list((tmp_path / "argument").glob("LOCK-*")) and not (tmp_path / "two" / "spill").exists()
    run.evaluate(job[1], memory="4GiB")
    assert not spilled(tmp_path)


@pytest.mark.skipif(files.filesystem(Path("/dev/shm")) != "tmpfs", reason="no tmpfs to refuse")
@pytest.mark.parametrize("way", ["argument", "variable"])
def test_a_spill_in_memory_is_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    place = Path("/dev/shm") / f"oocdl-test-{os.getpid()}"
    monkeypatch.setenv("OOCDL_SPILL", str(place) if way == "variable" else "")
    options = {**OPTIONS, **({"spill": place} if way == "argument" else {})}
    with pytest.raises(StoreError, match="tmpfs, which is memory; choose a folder on a disk"):
        machine.fit(*job, workdir=tmp_path / "run", **options)
    assert not place.exists() and not (tmp_path / "run").exists()


# --- during the run --------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["spill", pytest.param("commit", marks=pytest.mark.slow)])
def test_a_write_that_fails_ends_the_run_at_its_last_commit(
    job: Job, tight: dict[str, Any], tmp_path: Path, whole: dict[str, bytes], part: str
) -> None:
    """ENOSPC by hand, in the middle of the third step or of its commit."""
    run, done, tore = tmp_path / "run", 0, 0
    real, real_at = os.write, os.pwrite

    def listen(event: Any) -> None:
        nonlocal done
        done = event.step if isinstance(event, Committed) else done

    def tear(handle: int, data: Any) -> Any:
        """What of ``data`` is written."""
        nonlocal tore
        path = os.readlink(f"/proc/self/fd/{handle}")
        if done == 2 and ("/spill/" in path) == (part == "spill") and path.startswith(str(run)):
            tore += 1
            if tore > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            if tore == 3:
                return data[: len(data) // 2 // 4096 * 4096]
        return data

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ResourceError, match="no space left") as caught:
        patch.setattr(os, "write", lambda handle, data: real(handle, tear(handle, data)))
        patch.setattr(os, "pwrite", lambda handle, data, at: real_at(handle, tear(handle, data), at))
        machine.fit(*job, workdir=run, callbacks=[listen], **tight)
    assert tore > 3 and one_line(caught.value)
    go_on(job, run, tight, whole, committed=2)


def test_a_full_disk_in_a_step(
    job: Job, tight: dict[str, Any], small_disk: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The spill has its own disk, full before the first step: later ones find their files there."""
    run, options = tmp_path / "run", {**tight, "spill": small_disk / "spill"}
    filler = Filler(small_disk, 1 << 18, lambda event: isinstance(event, Committed) and event.step == 0)
    with pytest.raises(ResourceError, match=f"no space left for {small_disk}/spill") as caught:
        machine.fit(*job, workdir=run, callbacks=[filler], **options)
    assert "free some or choose another folder" in one_line(caught.value) and not spilled(small_disk)
    with pytest.raises(ResourceError, match="not enough disk: the run needs .* for spill"):
        machine.fit(*job, workdir=run, **options)
    filler.make_room()
    go_on(job, run, options, whole, committed=0)


@pytest.mark.parametrize(
    "seen",
    [pytest.param(True, id="before it", marks=pytest.mark.slow), pytest.param(False, id="in the middle")],
)
def test_a_full_disk_at_a_commit(
    job: Job, tight: dict[str, Any], small_disk: Path, tmp_path: Path, whole: dict[str, bytes],
    seen: bool,
) -> None:  # fmt: skip
    """Whether it is seen before anything is written, or something else takes the room meanwhile."""
    run, options = small_disk / "run", {**tight, "spill": tmp_path / "spill"}
    filler = Filler(small_disk, 40 << 10, lambda one: isinstance(one, StepDone) and one.row["step"] == 3)
    with pytest.MonkeyPatch.context() as patch:
        if not seen:
            patch.setattr(disk_check, "free_bytes", lambda path: 1 << 60)
        with pytest.raises(ResourceError, match="not enough disk" if seen else "no space left") as caught:
            machine.fit(*job, workdir=run, callbacks=[filler], **options)
    one_line(caught.value)
    with pytest.raises(ResourceError, match="not enough disk" if seen else "no space left"):
        machine.fit(*job, workdir=run, **options)  # there is no room for the resume either
    filler.make_room()
    go_on(job, run, options, whole, committed=2)


def test_disk_is_watched_at_commits(
    job: Job, tight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something that no plan knew of takes more than ``disk=`` allows."""
    run, need = tmp_path / "run", machine.plan(*job, **tight).disk_bytes

    def grow(event: Any) -> None:
        if isinstance(event, Committed) and event.step == 1:
            (run / "kept" / "large").write_bytes(bytes(need))

    said = "the next commit would take the run to .* disk= allows"
    with pytest.raises(ResourceError, match=said) as caught:
        machine.fit(*job, workdir=run, callbacks=[grow], disk=need, **tight)
    assert "the last commit stays" in one_line(caught.value) and oocdl.open(run).steps == 1


def test_kept_values_on_a_full_disk(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("oocdl.storage.run.kept_values.zarr.create_array", full)
    with pytest.raises(ResourceError, match="no space left for .*kept: the disk is full"):
        machine.fit(*job, workdir=tmp_path / "run", **OPTIONS, keep="down1.conv1")
