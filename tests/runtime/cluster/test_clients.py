"""What a user gives as ``client``: what is none is told at once, in a line, before anything is waited for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, LocalCluster

import oocdl
from oocdl.errors import DatasetError, InputError, OocdlError, ResourceError
from oocdl.events import Event, Notice
from oocdl.runtime.cluster import connecting, crew
from oocdl.runtime.cluster.scheduler_side import METRIC, Stay, set_complete
from oocdl.runtime.lost import MOST_LOSSES, WorkersLost
from tests.kit import nets, processes, searches
from tests.kit.commands import python
from tests.kit.faults import OPTIONS

NOBODY = "tcp://127.0.0.1:1"
"""Where no scheduler answers, which takes half a minute to find out."""
ONE: dict[str, Any] = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "no.onnx"}, InputError, r"no\.onnx"),
        ({"dataset": "no.zarr"}, DatasetError, r"no\.zarr"),
        ({"loss": "dise"}, InputError, "did you mean 'dice'"),
        ({"batch_size": 0}, InputError, "batch_size"),
        ({"targets": {"y": "z"}}, InputError, "'z'"),
        ({"memory": "much"}, InputError, "'much'"),
        ({"wait_seconds": "5"}, InputError, "wait_seconds must be a number of seconds"),
        ({"wait_seconds": float("nan")}, InputError, "wait_seconds"),
    ],
)
def test_what_is_wrong_is_told_before_workers_are_waited_for(
    job: tuple[Path, Path], tmp_path: Path, options: dict[str, Any], kind: type[OocdlError], words: str
) -> None:
    given = {"model": job[0], "dataset": job[1], **OPTIONS, "steps": 1, **options}
    with pytest.raises(kind, match=words):
        oocdl.fit(workdir=tmp_path / "run", client=NOBODY, **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [("{nope", "JSONDecodeError"), ("{}", "KeyError"), ("[1]", "TypeError"), ('{"address": 5}', "5")],
)
def test_a_scheduler_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"{file} names no scheduler .*{words}"), connecting.connected(file):
        pass


@pytest.mark.parametrize("given", ["no.json", "x" * 5000, "a\0b", b"tcp://a:1", 5])
def test_what_is_no_client(given: Any) -> None:
    with pytest.raises(InputError, match="client takes"), connecting.connected(given):
        pass


def test_an_address_that_wants_keys() -> None:
    """The process then ends at once: Dask would wait for a minute, and print a traceback."""
    code = (
        "from oocdl.runtime.cluster import connecting\n"
        "try:\n    with connecting.connected('tls://127.0.0.1:1'): pass\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    done = python("-c", code, seconds=50)
    assert done.stdout.startswith("ResourceError no scheduler answers at tls://127.0.0.1:1: TLS")
    assert done.stderr == ""


def test_what_is_closed() -> None:
    with LocalCluster(**ONE) as cluster:
        client = Client(cluster, set_as_default=False)
        client.close()
        with pytest.raises(InputError, match="the client is closed"), connecting.connected(client):
            pass
    with pytest.raises(ResourceError, match="closed or closing Cluster"), connecting.connected(cluster):
        pass


def test_in_the_event_loop_of_its_client_it_would_wait_for_itself() -> None:
    def connect(given: Any) -> str:
        with connecting.connected(given):
            return "connected"

    async def main() -> None:
        async with (
            LocalCluster(asynchronous=True, **ONE) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):
            for given in (client, cluster):
                with pytest.raises(InputError, match=re.escape("asyncio.to_thread")):
                    connect(given)
                assert await asyncio.to_thread(connect, given) == "connected"

    asyncio.run(main())


def test_a_call_that_is_over_leaves_the_workers_to_another_of_the_same_client() -> None:
    def plugins(dask_scheduler: Any) -> list[str]:
        return [name for name in dask_scheduler.plugins if name.startswith("oocdl-stay")]

    with LocalCluster(**ONE) as cluster, Client(cluster, set_as_default=False) as client:
        with connecting.connected(client):
            with connecting.connected(client):
                pass
            assert len(client.run_on_scheduler(plugins)) == 1
        assert client.run_on_scheduler(plugins) == []


def test_a_scheduler_that_lacks_oocdl(job: tuple[Path, Path], tmp_path: Path) -> None:
    expected = nets.files_of(oocdl.fit(*job, **OPTIONS))
    notices: list[Event] = []
    command, nannies = processes.WITHOUT_OOCDL, (True, False)
    with (
        processes.cluster(tmp_path, nannies, dashboard=True, scheduler_command=command) as cluster,
        Client(cluster.address, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        run = oocdl.fit(*job, workdir=tmp_path / "run", client=client, callbacks=[notices.append], **OPTIONS)
        assert nets.files_of(run) == expected
        assert processes.remains(client) == {}
        searched = {**searches.OPTIONS, "trials": 2, "client": client, "workdir": tmp_path / "search"}
        searched["metric"] = lambda run: run.history[-1]["loss"]  # as scripts have it: nobody can import it
        assert oocdl.search(*job, **searched).best_run.steps == searched["steps"]
    said = [one.text for one in notices if isinstance(one, Notice)]
    assert [text for text in said if "no page in Dask's dashboard" in text] == said


@pytest.mark.parametrize("error", [ImportError("No module named 'x'"), ValueError("pickle")])
def test_a_scheduler_that_cannot_unpickle(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    with LocalCluster(**ONE) as cluster, Client(cluster, set_as_default=False) as client:
        monkeypatch.setattr(client, "_register_scheduler_plugin", refuse)
        with pytest.raises(ResourceError, match=f"scheduler at .* cannot take part .*{error}"):
            connecting.keep_workers(client)


def test_of_an_adaptive_cluster_others_may_be_taken_away_once_a_crew_is_complete() -> None:
    stay = Stay("client")
    member, other = SimpleNamespace(metrics={METRIC: []}), SimpleNamespace(metrics={})
    scheduler: Any = SimpleNamespace(plugins={stay.name: stay})
    for complete, free in ((False, []), (True, [other]), (False, [])):
        set_complete(stay.name, complete, scheduler)
        assert stay.valid_workers_downscaling(scheduler, [member, other]) == free  # type: ignore[list-item]


@pytest.mark.parametrize("most", [3, 10])
def test_workers_that_are_lost_whenever_they_are_asked_are_not_asked_for_a_day(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As where the engine takes more memory than their job has: another one comes each time."""
    asked: list[str] = []

    def ask(*_: Any) -> tuple[list[Any], dict[str, Any]]:
        asked.append("worker")
        if len(asked) > most:
            return [], {}
        raise WorkersLost(f"worker {len(asked)} is gone")

    monkeypatch.setattr(crew, "_awaited", lambda *_: ["worker"])
    monkeypatch.setattr(crew, "ask", ask)
    monkeypatch.setattr(crew, "POLL_SECONDS", 0.0)
    client: Any = SimpleNamespace(status="running")
    told: list[str] = []
    if most < MOST_LOSSES:
        assert crew.gather(client, 86400.0, told.append) == ([], {})
    else:
        with pytest.raises(ResourceError, match="lost 10 times .*worker 10 is gone.* such as memory"):
            crew.gather(client, 86400.0, told.append)
    assert told[0] == "worker 1 is gone; asking anew who can take part" and len(told) == min(most, 9)
