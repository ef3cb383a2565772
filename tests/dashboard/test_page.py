"""What needs no browser of the page: any number of people look at a run at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from bokeh.core.validation import check_integrity
from bokeh.document import Document
from bokeh.models import Tabs
from bokeh.plotting import figure

from oocdl.dashboard.shown import Shown
from oocdl.dashboard.view import View


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
