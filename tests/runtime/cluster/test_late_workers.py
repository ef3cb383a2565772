"""Workers that come while a run goes on join it; those that cannot, or lack room, are left out, and named."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

import oocdl
from oocdl.augmentation.preparation import Preparation
from oocdl.errors import BudgetError, ResourceError
from oocdl.events import Event, Notice, StepDone, WorkersChanged
from oocdl.host.limits import Limit, processor
from oocdl.runtime.cluster import cluster_session, crew, growth
from oocdl.runtime.cluster.cluster_session import ClusterSession
from oocdl.runtime.cluster.crew import Recruit
from oocdl.runtime.cluster.room import Room
from oocdl.runtime.cluster.watch import Seen
from tests.kit import nets, processes
from tests.kit.faults import OPTIONS

pytestmark = pytest.mark.usefixtures("planned_once")
MIB = 1 << 20
QUICK: dict[str, Any] = {**OPTIONS, "memory": "600MiB", "steps": 16, "commit_seconds": 0}
STEP_SECONDS = 0.25
"""What a step takes at least: between steps it is looked who has come."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that come join soon."""
    monkeypatch.setattr("oocdl.runtime.cluster.growth.GROW_SECONDS", 1.0)


PRELOADED = {
    "large": f"import numpy\nballast = numpy.ones({500 * MIB}, 'u1')",
    "without": """
import sys
class Nobody:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "oocdl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nobody())
""",
    "older": "import oocdl.host.limits as limits\nlimits.code_digest = lambda: 'of another version'",
    "oldest": "import oocdl.runtime.cluster.crew as crew\nvars(crew).pop('_present', None)",
    "blind": """
from dataclasses import replace
import oocdl.storage.dataset.dataset as dataset
real = dataset.real = getattr(dataset, "real", dataset.open_dataset)
dataset.open_dataset = lambda spec: real(replace(spec, source="/elsewhere/data.zarr"))
""",
    "unlike": "import oocdl.planning.machine as facts\nfacts.processor = lambda: 'Another 1'",
}
"""What makes a worker of this name what it is: it runs there first, or twice."""


class Late:
    """Workers that come after the second step, by name; the one that was there before leaves, if asked."""

    def __init__(self, folder: Path, address: str, limits: dict[str, str], leaves: bool = False) -> None:
        self.folder, self.limits, self.leaves = folder, limits, leaves
        self.client = Client(address, timeout=60, set_as_default=False)
        self.started: list[processes.Kept] = []
        self.addresses: dict[str, str] = {}
        self.texts: list[str] = []
        self.changed: list[WorkersChanged] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.texts.append(event.text)
        if isinstance(event, WorkersChanged):
            self.changed.append(event)
        if isinstance(event, StepDone):
            time.sleep(STEP_SECONDS)
            if event.row["step"] == 2 and not self.addresses:
                self.come()
            if event.row["step"] == 10 and self.leaves:
                self.client.retire_workers([min(self.workers().keys() - set(self.addresses.values()))])

    def come(self) -> None:
        """Start them; they are there, and as they are to be, when this returns."""
        here = ["--nthreads", "1", "--no-dashboard", "--no-nanny", "--host", "127.0.0.1"]
        for name, limit in self.limits.items():
            own = ["--name", name, "--memory-limit", limit, "--local-directory", str(self.folder / name)]
            if name in PRELOADED:
                (self.folder / f"{name}.py").write_text(PRELOADED[name])
                own += ["--preload", str(self.folder / f"{name}.py")]
            command = [*processes.DASK_WORKER, self.client.scheduler.address, *here, *own]  # type: ignore[union-attr]
            self.started.append(processes.Kept(command, self.folder / f"{name}.log"))
            self.started[-1].tend()
            pid = self.started[-1].pid()
            if name == "limited" and pid is not None:  # Linux does not enforce this limit; a run looks at it
                resource.prlimit(pid, resource.RLIMIT_RSS, (400 * MIB, resource.RLIM_INFINITY))
        self.client.wait_for_workers(1 + len(self.limits), timeout=200)
        self.addresses = {name: address for address, name in self.workers().items() if name in self.limits}

    def workers(self) -> dict[str, str]:
        """Names of all workers, by address."""
        found = self.client.scheduler_info(n_workers=-1)["workers"]
        return {address: str(one["name"]) for address, one in found.items()}

    def end(self) -> None:
        """End what was started."""
        self.client.close()  # type: ignore[no-untyped-call]
        for one in self.started:
            one.end()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[processes.Cluster]:
    """A scheduler and one worker, with room for the budget, that is not started again."""
    with processes.cluster(tmp_path, [False], ["--memory-limit", "2GiB"]) as found:
        with Client(found.address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=200)
        found.workers[0].tend = lambda: None  # type: ignore[method-assign]
        yield found


@pytest.fixture
def train(there: processes.Cluster, job: tuple[Path, Path], tmp_path: Path) -> Any:
    """Train while workers come; nothing of the run is left on them."""

    def fit(limits: dict[str, str], leaves: bool = False, **options: Any) -> tuple[oocdl.Run, Late]:
        late = Late(tmp_path, there.address, limits, leaves)
        how = {**QUICK, "workdir": tmp_path / "run", "callbacks": [late], **options}
        try:
            with pytest.raises(ResourceError, match=LEFT) if leaves else nullcontext():
                oocdl.fit(*job, client=there.address, **how)
            assert processes.remains(late.client) == {}
        finally:
            late.end()
        return oocdl.open(tmp_path / "run"), late

    return fit


LEFT = r"there \(2\) can take part .* needs 600 MiB\).*committed.*start it"


def one_joined(run: oocdl.Run, late: Late, words: dict[str, tuple[str, ...]]) -> None:
    """All steps are done, with one more worker; why each of the others is left out is told in these words."""
    assert [row["step"] for row in run.history] == list(range(1, 17))
    assert [(one.reason, one.members) for one in late.changed] == [("workers have come", 2)]
    told = [text for text in late.texts if "is left out" in text]
    assert len(told) == len(words) and not any("\n" in text for text in told)
    for name, parts in words.items():
        (text,) = (text for text in told if text.startswith(f"worker {late.addresses[name]} is left out: "))
        assert all(part in text for part in parts), text
        assert text.count(late.addresses[name]) == 1, text


@pytest.mark.slow
def test_late_workers_without_room_are_left_out(train: Any, job: tuple[Path, Path], tmp_path: Path) -> None:
    """Each by a limit of another kind; one that has room joins, although every step is committed."""
    small = {"small": "512MiB", "limited": "0", "large": "0"}
    run, late = train({**small, "roomy": "2GiB"})
    roomy = {**QUICK, "memory": "3GiB"}  # this process may be large, after other tests
    alone = oocdl.fit(*job, workdir=tmp_path / "alone", plan=run.path, **roomy)
    assert nets.files_of(run) == nets.files_of(alone)
    numbers = {
        "small": ("limit is 512 MiB", "needs 600 MiB"),
        "limited": ("400 MiB (RLIMIT_RSS", "needs 600 MiB"),
        "large": ("MiB of the budget are left", "a unit needs"),
    }
    one_joined(run, late, numbers)


@pytest.mark.slow
def test_late_workers_that_cannot_take_part_are_left_out(
    train: Any, job: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a reason of its own each: the run goes on with those it has, and with one that can.

    That one has another processor: it is said that results are not equal now. This process computes nothing,
    so what it runs on does not count.
    """
    monkeypatch.setattr("oocdl.planning.machine.processor", lambda: "Login 1")
    words = {
        "without": ("it cannot import what it needs", "install the same versions"),
        "older": ("it has another version of oocdl", "install the one of this process"),
        "oldest": ("it fails (", "AttributeError", "whether it has the same versions"),
        "blind": ("/elsewhere/data.zarr", "the run goes on without it"),
    }
    run, late = train(dict.fromkeys([*words, "unlike"], "2GiB"))
    one_joined(run, late, words)
    assert [text for text in late.texts if "not of one kind" in text] == [
        f"workers are not of one kind (processor {' or '.join(sorted(['Another 1', processor()]))}): results "
        "are close to those of workers of one kind, not equal; for equal ones ask for nodes of one kind, "
        "with one version of all packages"
    ]
    with pytest.warns(UserWarning, match=f"not equal: processor was {re.escape(processor())}, is Login 1"):
        oocdl.fit(*job, workdir=run.path, **{**QUICK, "memory": "3GiB"})


@pytest.mark.slow
@pytest.mark.parametrize(("expected", "wait_seconds"), [(0, 3.0), (2, 1000.0)])
def test_a_run_ends_where_only_workers_without_room_are_left(
    train: Any, monkeypatch: pytest.MonkeyPatch, expected: int, wait_seconds: float
) -> None:
    """After it has waited for others, or at once where all that are expected are there."""
    monkeypatch.setattr(crew, "expected", lambda client: expected)
    run, late = train({"small": "512MiB", "limited": "0"}, leaves=True, wait_seconds=wait_seconds)
    assert run.steps >= 9
    assert sum("is left out" in text for text in late.texts) == 2


def worker(name: str, host: str = "a", megabytes: int = 1000, shared: bool = True) -> Recruit:
    """A worker whose host or process may use so much."""
    return Recruit(name, host, 1, 1, None, Limit(megabytes * MIB, "its limit", shared), 0)


def test_workers_of_a_host_share_what_it_has() -> None:
    """As many as a run was planned for stay, whatever they share; members of the last crew come first."""
    told: list[str] = []
    first = [worker("b"), worker("c"), worker("d", "other")]
    room = Room(400 * MIB, first, told.append)
    assert room.fitting(first) == first
    room.enlist(first)
    late = [worker("a"), *first, worker("e", "other"), worker("f", "other")]
    assert room.fitting(late) == [*first, worker("e", "other")]
    assert len(told) == 2 and room.fitting(late) == [*first, worker("e", "other")] and len(told) == 2
    assert told[0].startswith("worker a is left out: 3 workers of a share 1000 MiB")
    assert "the run needs 400 MiB of each" in told[0]
    assert room.fitting(late[:2]) == late[:2]  # another has left
    own = [worker(name, shared=False) for name in "bcde"]
    assert room.fitting(own) == own

    tight = Room(800 * MIB, first, told.append)  # two on a host of 1000 MiB, as the user has it
    tight.enlist(first)
    assert tight.fitting([*first[1:], worker("x")]) == [*first[1:], worker("x")]


def test_who_had_no_room_is_tried_again_among_more() -> None:
    """Its share of the work is smaller then."""
    told: list[str] = []
    room = Room(100 * MIB, [worker("a")], told.append)
    assert room.fitting([worker("a")]) == [worker("a")]
    room.enlist([worker("a")])
    pair = [worker("a"), worker("b")]
    assert room.fitting(pair) == pair
    room.refuse({"b": BudgetError("worker b: 3 MiB are left")})
    assert room.fitting(pair) == [worker("a")] and room.fitting([worker("b")]) == []
    more = [*pair, worker("c")]
    assert room.fitting(more) == more
    assert told == ["worker b is left out: 3 MiB are left; the run goes on without it"]


@pytest.mark.parametrize(("pid", "hosts", "joining"), [(2, None, 1), (2, 2, 1), (2, 1, 0), (1, None, 0)])
def test_who_comes_while_a_crew_is_gathered_joins_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, hosts: int | None, joining: int
) -> None:
    """After it was seen who is there, before all of these have answered.

    Not one of a member's process, nor one for which the plan has no work.
    """
    member, late = worker("a"), replace(worker("b"), pid=pid)
    monkeypatch.setattr(growth, "roll", lambda _: {one: Seen(0.0, None) for one in "ab"})
    monkeypatch.setattr(growth, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(growth, "GROW_SECONDS", -1.0)
    monkeypatch.setattr(crew, "gather", lambda *_: ([member], {}))
    monkeypatch.setattr(crew, "ask", lambda *_: ([late], {}))
    monkeypatch.setattr(cluster_session, "exchanges_of", lambda *_: {})
    monkeypatch.setattr(ClusterSession, "_set_up", lambda *_: {})
    dataset = SimpleNamespace(spec=lambda: None, stored={})
    compiled = {"main": SimpleNamespace(plan=SimpleNamespace(hosts=hosts), graph=None)}
    session: Any = ClusterSession(
        client=None, planned=[member], compiled=compiled, dataset=dataset, threads=1,
        settings=SimpleNamespace(engine="torch"), preparation=Preparation(),
        store=SimpleNamespace(path=tmp_path), wait_seconds=1.0, say=print,
    )  # type: ignore[arg-type]  # fmt: skip
    session.room = Room(1 * MIB, [member], print)
    assert session._gather(1.0)
    assert session.newcomers() == joining
    assert session.newcomers() == joining


def test_it_is_said_once_that_workers_have_no_work() -> None:
    told: list[str] = []
    room = Room(100 * MIB, [worker("a")], told.append)
    four = [worker(name) for name in "abcd"]
    room.enlist(four[:2], 2)
    room.enlist(four)
    assert told == []
    room.enlist(four, 2)
    room.enlist(four, 2)
    assert len(told) == 1 and told[0].startswith("work goes to 2 of 4 workers:")


def test_workers_that_a_run_is_planned_for_end_it_at_its_start() -> None:
    """What they lack is told as an error; of one that comes meanwhile, before the first step, it is not."""
    told: list[str] = []
    room = Room(2000 * MIB, [worker("a")], told.append)
    assert room.fitting([worker("a"), worker("b")]) == [worker("a")] and len(told) == 1
    room.refuse({"b": BudgetError("no")})
    with pytest.raises(BudgetError, match="2 MiB"):
        room.refuse({"a": BudgetError("2 MiB are left"), "b": BudgetError("no")})


def test_one_of_the_first_workers_that_cannot_take_part_is_left_out_and_the_last_ends_the_run() -> None:
    told: list[str] = []
    room = Room(100 * MIB, [worker("a"), worker("b")], told.append)
    room.refuse({"a": ResourceError("worker a: its disk is full")})
    assert told == ["worker a is left out: its disk is full; the run goes on without it"]
    with pytest.raises(ResourceError, match="worker b cannot"):
        room.refuse({"b": ResourceError("worker b cannot use its files")})
