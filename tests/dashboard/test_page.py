"""What needs no browser of the page: any number of people look at a run at once."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bokeh.core.validation import check_integrity
from bokeh.document import Document
from bokeh.models import Tabs
from bokeh.models.widgets import Div
from bokeh.plotting import figure

import oocdl
from oocdl.dashboard.page import Shown
from oocdl.dashboard.panels import step_panels
from oocdl.dashboard.panels.machine_panel import Rates
from oocdl.dashboard.panels.words import Settings
from oocdl.dashboard.view import View
from oocdl.optim import Cosine
from oocdl.report.figure import PHASES
from tests.kit import nets
from tests.kit.settings import QUICK


def test_several_browsers_look_at_one_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    shown, documents = Shown(View(tmp_path), print), (Document(), Document())
    for document in documents:
        shown.add_page(document)
    assert all(len(document.roots) == 1 for document in documents)


def test_a_browser_has_what_is_in_the_tab_that_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.json").write_text("{}")
    view, document = View(tmp_path), Document()
    view.steps.add([{"step": 1, "loss": 1.0, "seconds": 1.0, "lr": 0.1, "loss/y": 0.5}])
    Shown(view, print).add_page(document)
    (tabs,) = document.select({"type": Tabs})
    found = []
    for number in (1, 2, 0):
        tabs.active = number
        check_integrity(document.models)
        found.append({figure.title.text for figure in document.select({"type": figure})})
    assert "Losses of heads, and metrics" in found[0]
    assert found[1] == {"Layers × shards of the step", "Last whole pass, by thread"}
    assert len(found[2]) == 4
    assert not caplog.records  # Bokeh has nothing to complain of


def test_every_part_of_a_step_has_its_colour_however_few_layers_it_has() -> None:
    parts = ["forward"] * 20 + ["backward"] * 10 + ["update"]
    layers: list[Any] = [SimpleNamespace(phase=part) for part in parts]
    strip = step_panels._parts(layers)
    assert (strip["left"], strip["right"]) == ([0, 20, 30], [20, 30, 31])
    assert strip["part"] == ["forward", "backward", ""] and strip["color"] == list(PHASES.values())


def test_settings_and_what_is_empty_are_told_in_words(tmp_path: Path) -> None:
    job, lr = nets.write_job(tmp_path), Cosine(0.1, 3)
    given: dict[str, Any] = {**QUICK, "workdir": tmp_path / "run", "lr": lr}
    oocdl.fit(*job, **given, steps=2)
    view = View(tmp_path / "run")
    view.refresh()
    assert view.settings["steps"] == 2 and view.settings["memory_bytes"] == 4 << 30
    oocdl.fit(*job, **given | {"memory": "3GiB"}, steps=3)
    view.refresh()
    settings, rates = Settings(), Rates()
    for panel in (settings, rates):
        panel.update(view)
    (table,) = settings.root.select({"type": Div})
    assert "Adam(lr=Cosine(lr=0.1, steps=3))" in table.text and "3.0 GiB" in table.text
    assert "4.0 GiB" not in table.text
    names = re.findall("top'>([^<]*)<", table.text)
    assert names[2:5] == ["run", "steps", "engine, threads"] and names[7:10] == ["rates", "loss", "optimizer"]
    words = {div.text for div in rates.root.select({"type": Div})}
    assert any(text.startswith("Disk: nothing was spilled") for text in words)
    seen = {one.title.text for one in rates.root.select({"type": figure})}
    assert seen == {"Cores in use"}
