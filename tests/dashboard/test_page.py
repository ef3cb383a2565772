"""What needs no browser of the page: any number of people look at a run at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from bokeh.document import Document

from oocdl.dashboard.shown import Shown
from oocdl.dashboard.view import View


@pytest.mark.filterwarnings("ignore::bokeh.util.warnings.BokehUserWarning")
def test_several_browsers_look_at_one_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    shown, documents = Shown(View(tmp_path), print), (Document(), Document())
    for document in documents:
        shown.add_page(document)
    assert all(len(document.roots) == 1 for document in documents)
