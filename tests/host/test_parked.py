"""Memory that is parked in a file: the same bytes, less of the process, and only where nobody else writes."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oocdl.engines.engine_registry import ENGINES
from oocdl.fusion.jit import address_of
from oocdl.host.parked import VARIABLE, park, returning_bytes
from oocdl.planning.own_memory import LOCAL_DISKS, disk_folder
from oocdl.presets.unets import write_unet3d
from oocdl.storage.files import filesystem
from tests.kit.code import ROOT
from tests.kit.commands import python
from tests.kit.nets import write_data

BEGIN = """
import ctypes, gc, hashlib, os, sys, threading, time
from pathlib import Path
import numpy as np
from oocdl.fusion.jit import address_of
from oocdl.host.heap import trim
from oocdl.host.limits import anonymous_bytes
from oocdl.host.parked import park
from oocdl.host import parked

folder = Path(sys.argv[1])
random = np.random.default_rng(0)
blocks = [random.bytes(40_000 + 1000 * i) for i in range(600)]  # of the heap
words = {f"word {i}": [i, str(i)] for i in range(100_000)}  # of Python's own arenas

def digest():
    told = hashlib.sha256()
    for block in blocks:
        told.update(block)
    told.update(repr(words).encode())
    return told.hexdigest()

before = digest()
"""
NOWHERE = """
for place, value in ((folder, "off"), (Path("/proc"), "on"), (folder / "nowhere", "on")):
    os.environ[parked.VARIABLE] = value
    assert park(place, address_of) == 0, (place, value)
"""
SAME = """
had = anonymous_bytes()
parked_bytes = park(folder, address_of)
assert parked_bytes > 180 << 20, parked_bytes
assert had - anonymous_bytes() > 0.9 * parked_bytes, (had, anonymous_bytes())
assert not list(folder.iterdir())
assert digest() == before

if not (child := os.fork()):  # a child's writes are its own
    words["word 1"][0] = -1
    blocks.clear()
    os._exit(words["word 1"][0] != -1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and digest() == before

words["word 7"].append("written")
blocks[3:300] = []  # holes in what is parked, which the C library takes again
gc.unfreeze()
gc.collect()
trim()
for size in [1 << power for power in range(6, 25)] * 4:  # memory that is to be zero is
    assert not np.zeros(size, np.uint8).any()
assert words["word 7"] == [7, "7", "written"] and words["word 99999"] == [99999, "99999"]

largest = parked.MOST_BYTES
grown = [random.bytes(50_000) for _ in range(1000)]
again = park(folder, address_of)  # what has been written since goes there, too
assert 40 << 20 < again < largest, again
assert hashlib.sha256(b"".join(grown)).digest() and words["word 7"] == [7, "7", "written"]
"""
BUSY = """
begun = threading.Event()

def work(wait):
    begun.set()
    wait()

for wait, parks in ((threading.Event().wait, True), (lambda: time.sleep(100), False)):
    begun.clear()
    threading.Thread(target=work, args=(wait,), daemon=True).start()
    begun.wait()
    time.sleep(0.2)
    assert bool(park(folder, address_of)) == parks, wait
assert digest() == before
"""


def in_process(script: str, *arguments: str | Path, group: Path | None = None, **variables: str) -> str:
    """What a script prints that runs in a process of its own, in a cgroup if given, and is to succeed."""
    done = python("-W", "error", "-c", script, *arguments, group=group, **variables)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_nothing_is_parked_where_it_may_not_be_and_what_is_parked_stays_as_it_is(tmp_path: Path) -> None:
    in_process(BEGIN + NOWHERE + SAME, tmp_path)


def test_nothing_is_parked_beside_a_thread_that_may_wake(tmp_path: Path) -> None:
    in_process(BEGIN + BUSY, tmp_path)


def test_the_folder_is_on_a_disk(tmp_path: Path) -> None:
    missing, memory = tmp_path / "missing", Path("/dev/shm")
    assert disk_folder((missing, memory, Path("/proc"))) is None
    if filesystem(tmp_path) in LOCAL_DISKS:
        assert disk_folder((missing, memory, tmp_path)) == tmp_path


def test_nothing_is_parked_by_another_thread_than_the_first(tmp_path: Path) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(park(tmp_path, address_of)))
    thread.start()
    thread.join()
    assert found == [0] and returning_bytes() == 0


FIT = """
import json, sys, oocdl
from oocdl.events import StepDone
from oocdl.host.limits import anonymous_bytes

model, dataset, run, *budgets = sys.argv[1:]
for memory in budgets:
    peaks, how = [0], dict(memory=memory, batch_size=2)

    def listen(event):
        if isinstance(event, StepDone):
            peaks.append(anonymous_bytes())

    try:
        base = oocdl.plan(model, dataset, **how).machine.base_bytes
        more = dict(steps=3, progress=False, callbacks=[listen])
        made = oocdl.fit(model, dataset, workdir=run + memory, **how, **more)
        print(json.dumps([[row["loss"] for row in made.history], base >> 20, max(peaks) >> 20]))
    except oocdl.errors.BudgetError as refused:
        print(json.dumps(str(refused)))
"""


def test_a_run_has_more_room_and_makes_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a cgroup of exactly a budget that would be too small if nothing were parked."""
    monkeypatch.syspath_prepend(str(ROOT / "perf"))
    from cage import NoCage, cage

    random, model = np.random.default_rng(0), tmp_path / "unet.onnx"
    write_unet3d(model, base=4, depth=1, size=(16, 16, 16))
    image = random.normal(size=(4, 1, 16, 16, 16)).astype("float32")
    label = random.integers(0, 4, (4, 16, 16, 16)).astype("uint8")
    data = write_data(tmp_path / "brain.zarr", {"image": image, "label": label})

    def fit(value: str, *budgets: str, group: Path | None = None) -> list[Any]:
        """Losses, size and peak for each budget, or why it is refused, one after the other in a process."""
        given = model, data, tmp_path / f"{value}{group is None}", *budgets
        told = in_process(FIT, *given, group=group, **{VARIABLE: value})
        return [json.loads(line) for line in told.splitlines()]

    refused, (same, less, _) = fit("on", "1MiB", "700MiB")
    named = re.search(r"memory='(\d+)MiB' would do", refused)
    loading = ENGINES["torch"].least_loading_bytes("torch") >> 20
    assert named is not None and int(named[1]) >= loading + 80, "a process begins with all loaded"
    tight_mib = int(named[1])
    refused, (losses, base, _) = fit("off", f"{tight_mib}MiB", "700MiB")
    assert "would do" in refused and same == losses and less < base - 60
    try:
        with cage(tight_mib << 20) as group:
            ((losses, _, peak),) = fit("on", f"{tight_mib}MiB", group=group)
    except NoCage as error:
        pytest.skip(str(error))
    assert losses == same and peak <= tight_mib
