"""A real browser looks at a run in each of the three ways, while the run goes on."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from onnx import load as load_onnx
from onnx import save as save_onnx

import oocdl
from oocdl.dashboard import dask_plugin
from oocdl.events import Event, Notice, StepDone
from oocdl.runtime.measured import Board
from oocdl.training import loop
from tests.kit import nets, settings
from tests.kit.browser import CHROMIUM, DESKTOP, FRAME, PHONE, Seen, browser
from tests.kit.code import ROOT

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="needs Debian's chromium: apt-get install chromium"
)
EVIL = "<img src=x onerror=alert(1)>"
QUICK: dict[str, Any] = {**settings.QUICK, "engine": "numpy", "steps": 30, "loss": "dice_ce"}
QUICK |= {"memory": "2GiB", "parallel": {"space": (2,)}}
TABS = ("Overview", "Learning", "Step", "Machine", "Layers", "Network", "Settings", "Messages")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A network whose file, nodes and values have names that are HTML."""
    folder = tmp_path_factory.mktemp("job")
    path = nets.write_conv(folder / f"{EVIL}.onnx")
    model = load_onnx(str(path))
    inner = {name for node in model.graph.node for name in node.output} - {"y"}
    for node in model.graph.node:
        node.name = f"{EVIL}{node.name}"
        for names in (node.input, node.output):
            names[:] = [f"{EVIL}{name}" if name in inner else name for name in names]
    save_onnx(model, str(path))
    return path, nets.write_data(folder / "data.zarr", nets.volumes(3, 8))


@dataclass
class Going:
    """A run that goes on in a thread, slowly until someone has seen enough of it."""

    fit: Callable[..., oocdl.Run]
    notices: list[str] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def listen(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(event.text)
        if isinstance(event, StepDone):
            self.enough.wait(0.2)

    def address(self) -> str:
        """The page's, once it is told."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            for line in self.notices:
                if line.startswith("dashboard: "):
                    return line.split()[1]
            time.sleep(0.1)
        raise AssertionError(f"no address was told: {self.notices}")


@contextmanager
def going(fit: Callable[..., oocdl.Run], monkeypatch: pytest.MonkeyPatch) -> Iterator[Going]:
    """A run whose tasks take a while, so that the map can be seen to change; it is over at the end."""
    made, done = Going(fit), Board.done

    def slowly(self: Board, number: int, times: tuple[float, ...]) -> None:
        made.enough.wait(0.6)
        done(self, number, times)

    monkeypatch.setattr(Board, "done", slowly)
    monkeypatch.setattr(loop, "LOOK_SHARE", 1.0)  # a busy machine takes long for a look
    made.thread = threading.Thread(target=lambda: fit(callbacks=[made.listen]))
    made.thread.start()
    try:
        yield made
    finally:
        made.enough.set()
        made.thread.join(120)
        assert not made.thread.is_alive()


def sees_it_go_on(seen: Seen) -> None:
    """The loss line grows, and the map of the step changes."""
    seen.awaits(lambda: steps_on(seen) > 1)
    steps = steps_on(seen)
    seen.awaits(lambda: any(seen.column("dw", "image")))
    images = sorted(seen.column("dw", "image"))
    seen.awaits(lambda: steps_on(seen) > steps)
    seen.awaits(lambda: sorted(seen.column("dw", "image")) != images)


def steps_on(seen: Seen) -> int:
    """How many steps the loss line has."""
    return max(map(len, seen.column("smooth", "loss")))


def is_sound(seen: Seen) -> None:
    """Nothing came from outside, nothing was complained of, and no name became HTML."""
    assert seen.outside == [] and seen.complaints == []
    assert seen.page.locator('img[src="x"]').count() == 0


def test_beside_fit(job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(callbacks: Any) -> oocdl.Run:
        return oocdl.fit(*job, workdir=tmp_path / "my run", dashboard=True, callbacks=callbacks, **QUICK)

    with going(fit, monkeypatch) as run, browser() as seen:
        address = run.address()
        assert "MiB" in run.notices[0] and f"`oocdl dashboard '{tmp_path}/my run'`" in run.notices[0]
        seen.open(address)
        sees_it_go_on(seen)
        is_sound(seen)
        run.enough.set()
        seen.awaits(lambda: "\ndone\n" in seen.page.locator(".answers").inner_text())
    with pytest.raises(urllib.error.URLError):  # it has ended with the run
        urllib.request.urlopen(address, timeout=10)


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, memory_limit=None,
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


@pytest.mark.parametrize("shares_disk", [pytest.param(True, marks=pytest.mark.slow), False])
def test_in_the_dashboard_of_dask(
    client: Client, job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares_disk: bool
) -> None:
    def fit(callbacks: Any) -> oocdl.Run:
        options = {**QUICK, "workdir": tmp_path / "run", "client": client, "dashboard": True}
        return oocdl.fit(*job, callbacks=callbacks, **options)

    if not shares_disk:
        monkeypatch.setattr(dask_plugin, "mark_of", lambda run: "")
    scheduler = client.cluster.scheduler
    dask_pages = list(scheduler.http_application.applications)
    status = f"http://127.0.0.1:{scheduler.http_server.port}/status"
    with going(fit, monkeypatch) as run, browser() as seen:
        assert run.address().endswith("/oocdl")
        seen.open(status)
        seen.page.locator('a[href="oocdl"]').click()  # its link in the bar
        seen.page.wait_for_url("**/oocdl")
        (shown,) = scheduler.plugins["oocdl-page"].runs.values()
        assert shown.is_copy is not shares_disk
        seen.awaits(lambda: shown.shown is not None)
        seen.open(status.replace("status", "oocdl"))
        sees_it_go_on(seen)
        is_sound(seen)
        run.enough.set()
        seen.awaits(lambda: steps_on(seen) == QUICK["steps"])  # and what was last
    assert shown.folder.exists() is shares_disk
    assert "oocdl-page" not in scheduler.plugins
    assert scheduler.http_application.applications == dask_pages
    assert "oocdl" not in urllib.request.urlopen(status, timeout=10).read().decode()


@pytest.fixture(scope="module")
def finished(job: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    return oocdl.fit(*job, workdir=tmp_path_factory.mktemp("done") / "run", **QUICK)


@pytest.fixture(scope="module")
def address(finished: oocdl.Run) -> Iterator[str]:
    """Of the page that ``oocdl dashboard RUN`` shows."""
    command = [sys.executable, "-m", "oocdl", "dashboard", str(finished.path)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    found = process.stdout.readline().strip()
    port = found.rstrip("/").rpartition(":")[2]
    assert f"ssh -L {port}:127.0.0.1:{port} " in process.stderr.readline()
    try:
        yield found
    finally:
        process.send_signal(2)
        assert process.wait(30) == 0
        assert "bokeh.core.validation" not in process.stderr.read()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_run_directory(address: str, size: tuple[int, int]) -> None:
    with browser(size) as seen:
        seen.open(address)
        assert steps_on(seen) == QUICK["steps"]
        assert seen.column("middle", "part")[0] == ["forward", "backward", "update"]
        assert "loss" in seen.tooltip("Loss")
        assert EVIL in seen.tooltip("Layers × shards of the step")
        for tab in TABS[1:]:
            seen.page.locator(".bk-tab", has_text=tab).click()
            seen.awaits(lambda tab=tab: seen.page.locator(".bk-tab.bk-active").inner_text() == tab)
            seen.awaits(lambda: seen.page.evaluate("() => Bokeh.documents[0].is_idle"))
            wide = seen.page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= size[0], f"{tab} is {wide} wide"
        is_sound(seen)
        assert seen.warnings == []


@pytest.mark.parametrize(("origin", "code"), [("http://evil.example", 403), (None, 101)])
def test_other_origins_get_no_connection(address: str, origin: str | None, code: int) -> None:
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=10)
    token = re.search(r'"token":"([^"]+)"', urllib.request.urlopen(address, timeout=10).read().decode())
    assert token is not None
    connection.request("GET", "/ws", headers={
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Origin": origin or address.rstrip("/"),
        "Sec-WebSocket-Protocol": f"bokeh, {token[1]}",
    })  # fmt: skip
    assert connection.getresponse().status == code
    connection.close()


def test_the_dark_is_dark(address: str) -> None:
    colors = """() => {
        const root = Bokeh.index.get_by_id(Bokeh.documents[0].roots()[0].id)
        const style = getComputedStyle(root.el)
        return [getComputedStyle(document.body).backgroundColor, style.getPropertyValue('--ink').trim()]
    }"""
    with browser() as seen:
        seen.open(address)
        day = seen.page.evaluate(colors)
        seen.page.emulate_media(color_scheme="dark")
        night = seen.page.evaluate(colors)
        assert day == ["rgb(245, 246, 248)", ""] and night == ["rgb(15, 19, 24)", "#e4e8ec"]


def test_a_report_fits_a_phone(finished: oocdl.Run, tmp_path: Path) -> None:
    finished.report(tmp_path / "report.html")
    with browser(PHONE) as seen:
        seen.open((tmp_path / "report.html").as_uri())
        wide = seen.page.evaluate(FRAME, "Loss")
        assert wide["x"] + wide["width"] <= PHONE[0]
        is_sound(seen)
        assert seen.warnings == []
