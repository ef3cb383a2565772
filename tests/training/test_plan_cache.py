"""Plans that were found before: what hits, what does not, and what is never trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oocdl.planning.choice import host_search
from oocdl.report.plan_view import Plan
from oocdl.training import plan_cache
from tests.kit import nets
from tests.kit.machine import Small, fit
from tests.kit.runs import losses_of
from tests.kit.settings import QUICK

MACHINE = Small(24 << 20, 300 << 20)
OPTIONS = {**QUICK, "batch_size": 2}
Files = tuple[Path, Path]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(plan_cache.VARIABLE)
    return tmp_path / "cache" / "oocdl" / "plans"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One item for each search for cuts."""
    calls: list[str] = []

    def noted(draft: Any, *rest: Any) -> Any:
        calls.append(draft.request.kind)
        return search(draft, *rest)

    from oocdl.planning.choice import budget

    search: Callable[..., Any] = budget._fastest
    monkeypatch.setattr(budget, "_fastest", noted)
    return calls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    place = tmp_path_factory.mktemp("plans")
    model = nets.write_conv(place / "conv.onnx", channels=6, layers=3)
    return model, nets.write_data(place / "data.zarr", nets.volumes(samples=5, extent=48))


@pytest.fixture(scope="module")
def known(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan, and a cache that has it."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place))
        patch.delenv(plan_cache.VARIABLE)
        return planned(files), place / "oocdl"


@pytest.fixture
def first(known: tuple[Plan, Path], folder: Path) -> Plan:
    """The plan that the cache of this test has."""
    shutil.copytree(known[1], folder.parent)
    return known[0]


def planned(files: Files, machine: Small = MACHINE, **options: Any) -> Plan:
    return machine.job(*files, **{**OPTIONS, **options}).plan()


def text(plan: Plan) -> str:
    kinds = "\n".join(plan.show(what, kind=kind) for kind in plan.kinds for what in ("layers", "tasks"))
    return f"{kinds}\n{plan.seconds}"


def test_the_second_plan_is_the_first_without_a_search(files: Files, searched: list[str]) -> None:
    options: dict[str, Any] = {"accumulate": 2, "keep": ["grad/w0"], "optimizer": "adam"}
    first = planned(files, **options)
    assert len(searched) == 3, "full, ragged and earlier passes"
    assert first.tasks > 4
    again = planned(files, steps=7, seed=3, **options)  # these make no other plan
    assert len(searched) == 3 and text(again) == text(first)
    for name, kind in first.kinds.items():
        other = again.kinds[name]
        assert repr(other.graph) == repr(kind.graph)
        assert (other.feeds, other.labels, other.pieces) == (kind.feeds, kind.labels, kind.pieces)


def test_a_plan_for_fewer_workers_than_there_are(
    files: Files, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_search, "MIN_HOST_SECONDS", 0)
    machine = replace(MACHINE, capacity_bytes=1 << 30, slots=(2, 8))
    options: dict[str, Any] = {"threads": None, "parallel": "auto"}
    first = planned(files, machine, **options)
    before = len(searched)
    again = planned(files, machine, **options)
    assert len(searched) == before
    for plan in (first, again):
        hosts = {one.plan.hosts for one in plan.kinds.values()}
        assert hosts == {one.graph.hosts for one in plan.kinds.values()} and hosts < {1, 2, 4}
    assert text(again) == text(first)


@pytest.mark.parametrize("change", [{"batch_size": 1}, {"lr": 0.5}, {"loss": "dice"}, {"threads": 2}])
def test_other_settings_are_searched_for(
    change: dict[str, Any], files: Files, searched: list[str], folder: Path, first: Plan
) -> None:
    planned(files, **change)
    assert searched and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("capacity", "hits"), [(1.0, True), (0.99, True), (1.05, True), (0.9, False), (2, False)]
)
def test_about_the_same_room(
    capacity: float, hits: bool, files: Files, searched: list[str], first: Plan
) -> None:
    planned(files, replace(MACHINE, capacity_bytes=int(capacity * (24 << 20))))
    assert (not searched) == hits


@pytest.mark.usefixtures("first")
def test_another_model_other_rates_and_other_code(
    files: Files, tmp_path: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.onnx"
    other.write_bytes(files[0].read_bytes() + b"\x3a\x00")  # an empty doc_string of the graph, to protobuf
    job = MACHINE.job(*files, **OPTIONS)
    facts = job.binding, job.settings, job.machine
    key = plan_cache.plan_key(job.model, *facts, job.course, None)
    assert plan_cache.plan_key(replace(job.model, path=other), *facts, job.course, None) != key
    crews = [replace(job.machine, workers=8, sharing=there) for there in (1, 8)]  # each may have more units
    assert len({plan_cache.plan_key(job.model, *facts[:2], crew, job.course, None) for crew in crews}) == 2
    monkeypatch.setattr(plan_cache, "code_digest", lambda: "another version")
    planned(files)
    assert searched


def entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def body_of(path: Path) -> Any:
    return json.loads(plan_cache.KEPT.read(path.name) or b"")


def test_a_damaged_entry_does_not_count(files: Files, searched: list[str], folder: Path, first: Plan) -> None:
    path = entry(folder)
    whole = path.read_text()
    path.write_text(whole.replace('"cuts": [', '"cuts": [1, '))
    with pytest.warns(UserWarning, match="does not count, and is made anew") as caught:
        again = planned(files)
    assert len(caught) == 1 and searched and text(again) == text(first)
    assert body_of(path)["frozen"] == json.loads(whole.partition("\n")[2])["frozen"]


def test_cuts_that_give_other_numerics_do_not_count(
    files: Files, searched: list[str], folder: Path, first: Plan
) -> None:
    path = entry(folder)
    body = body_of(path)
    grids = body["frozen"]["main"]["grids"]
    grids[0] = {name: count + 1 for name, count in grids[0].items()}
    plan_cache.KEPT.write(path.name, json.dumps(body).encode())
    assert text(planned(files)) == text(first)
    assert searched


def test_off_is_off(files: Files, folder: Path, searched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan_cache.VARIABLE, "off")
    for count in (2, 4):
        planned(files)
        assert len(searched) == count
    assert not folder.exists()


def test_a_run_of_a_plan_from_the_cache_has_the_same_bits(
    files: Files, tmp_path: Path, searched: list[str]
) -> None:
    runs = [fit(*files, machine=MACHINE, workdir=tmp_path / name, **OPTIONS) for name in ("a", "b")]
    assert len(searched) == 2
    assert losses_of(runs[0]) == losses_of(runs[1])
    assert runs[0].plan.compiled.plan.numerics() == runs[1].plan.compiled.plan.numerics()
    stored = [json.loads((tmp_path / name / "plan.json").read_text())["plan"] for name in ("a", "b")]
    assert stored[0] == stored[1]
