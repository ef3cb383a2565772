"""The lines that the run told: warnings, commits, workers that came and went."""

from __future__ import annotations

import time

from bokeh.models import LayoutDOM

from oocdl.dashboard.panels.style import FAINT_CSS, GREEN, INK_CSS, ORANGE, RED, card, html, text
from oocdl.dashboard.view import View

COLORS = {"warning": ORANGE, "stopped": RED, "finished": GREEN, "notice": INK_CSS}
MOST_SHOWN = 60


class Log:
    """The last lines, the newest first; of commits that follow each other the last one."""

    def __init__(self) -> None:
        self._words = html(size="13px")
        self.root: LayoutDOM = card(self._words)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        rows: list[str] = []
        before = ""
        for note in reversed(view.notes):
            if note["kind"] == before == "commit":
                continue
            before = note["kind"]
            at = time.strftime("%d %b %H:%M:%S", time.localtime(note["at"]))
            color = COLORS.get(note["kind"], FAINT_CSS)
            rows.append(
                f"<div style='padding:3px 0'><span style='color:{FAINT_CSS};margin-right:12px'>{at}</span>"
                f"<span style='color:{color}'>{text(note['text'])}</span></div>"
            )
        self._words.text = "".join(rows[:MOST_SHOWN]) or "nothing yet"
