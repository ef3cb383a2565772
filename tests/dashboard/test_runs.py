"""The page of a folder: its runs in a table, their losses in one picture, each a link."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from bokeh.document import Document
from bokeh.models import Tabs
from bokeh.models.widgets import Div

from oocdl.dashboard.page import Shown
from oocdl.dashboard.runs import Runs, RunsPage
from oocdl.dashboard.server import ShownRuns
from oocdl.dashboard.view import View
from oocdl.errors import StoreError
from oocdl.storage.checksums import sealed

EVIL = "<img src=x onerror=alert(1)>"


def adam(lr: float) -> dict[str, Any]:
    return {"optimizer": {"type": "Adam", "lr": lr}}


def write_run(folder: Path, lr: float, *losses: float, **others: Any) -> None:
    (folder / "history").mkdir(parents=True)
    settings = {**adam(lr), "batch_size": 2, **others}
    (folder / "run.json").write_text(sealed("run", {"settings": settings}))
    rows = [{"step": n, "loss": loss, "seconds": 0.5, "lr": lr} for n, loss in enumerate(losses, 1)]
    (folder / "history" / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "one", 0.1, *(1 / n for n in range(1, 20)))
    write_run(tmp_path / "deeper" / EVIL.replace("/", ""), 0.2, *(2 / n for n in range(1, 30)))
    return tmp_path


def page_of(folder: Path) -> RunsPage:
    runs = Runs(folder)
    runs.refresh()
    return RunsPage(runs)


def test_runs_are_listed_with_what_differs(folder: Path) -> None:
    page = page_of(folder)
    table = next(div.text for div in page.root.select({"type": Div}) if "<table" in div.text)
    assert "Adam(lr=0.1)" in table and "Adam(lr=0.2)" in table and "batch_size" not in table
    assert "href='?run=one'" in table and "<img" not in table
    curves = dict(zip(page._source.data["name"], page._source.data["ys"], strict=True))
    assert len(curves) == 2 and len(curves["one"]) == 19


@pytest.mark.parametrize(
    ("one", "two", "texts"),
    [
        (adam(0.00123456), adam(0.00123457), ["Adam(lr=0.00123456)", "Adam(lr=0.00123457)"]),
        ({"memory_bytes": 2 << 30}, {"memory_bytes": (2 << 30) + 4096}, [">memory_bytes<"]),
        ({"scale": {"x": 0.5, "y": None}}, {"scale": {"x": 0.25}}, [">x: 0.5<", ">x: 0.25<"]),
    ],
)
def test_settings_that_are_close_differ(
    tmp_path: Path, one: dict[str, Any], two: dict[str, Any], texts: list[str]
) -> None:
    for name, settings in (("one", one), ("two", two)):
        write_run(tmp_path / name, 0.1, 1.0, **settings)
    table = next(div.text for div in page_of(tmp_path).root.select({"type": Div}) if "<table" in div.text)
    assert [text for text in texts if text not in table] == []


def test_a_run_that_comes_is_seen_and_one_that_is_damaged_hides_none(folder: Path) -> None:
    runs = Runs(folder)
    runs.refresh()
    assert not runs.refresh()
    write_run(folder / "later", 0.3, 1.0)
    (folder / "later" / "live").mkdir()
    write_run(folder / "damaged", 0.3, 1.0)
    (folder / "damaged" / "live").mkdir()
    (folder / "damaged" / "live" / "facts.json").write_text("{")
    assert runs.refresh() and len(runs.views) == 3 and "later" in runs.views
    assert not runs.refresh()
    (folder / "damaged" / "live" / "facts.json").unlink()
    assert runs.refresh() and "damaged" in runs.views
    with pytest.raises(StoreError, match="no run in"):
        Runs(folder / "one" / "history")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("now.json", b""),
        ("now.json", b"[]"),
        ("last_pass.npz", b""),
        ("last_pass.npz", b"PK"),
        ("pictures.npz", b"PK"),
        ("pictures.npz", b"PK\x03\x04"),
        ("resources.jsonl", b'{"at": 1.0}\n'),
    ],
)
def test_a_damaged_file_is_told_of_and_ends_no_page(folder: Path, name: str, data: bytes) -> None:
    live = folder / "one" / "live"
    live.mkdir()
    (live / name).write_bytes(data)
    told: list[str] = []
    shown = Shown(View(folder / "one"), told.append)
    for _ in range(2):
        asyncio.run(shown.refresh())
    assert len(told) == 1 and f"{live}" in told[0] and " is damaged (" in told[0]
    assert shown.view.done == 19 and shown.view.version and shown.page(Document()).root
    runs = Runs(folder)
    assert runs.refresh() and list(runs.views) == [f"deeper/{EVIL.replace('/', '')}"]


@pytest.mark.parametrize(("asked", "tabs"), [([b"one"], 1), ([b"none"], 0), ([], 0)])
def test_a_link_leads_to_a_run(folder: Path, asked: list[bytes], tabs: int) -> None:
    class Context:
        class request:
            arguments = {"run": asked}

    shown, document = ShownRuns(Runs(folder)), Document()
    asyncio.run(shown.refresh())
    document._session_context = lambda: Context  # type: ignore[assignment]
    shown.add_page(document)
    assert len(list(document.select({"type": Tabs}))) == tabs and len(document.roots) == 1
