"""Panels of words: the settings of a run, and its messages."""

from __future__ import annotations

import time
from typing import Any

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.view import View
from oocdl.report.units import DEFAULTS, size_text, value_text

COLORS = {"warning": style.ORANGE, "stopped": style.RED, "finished": style.GREEN, "notice": style.INK_CSS}
MOST_SHOWN = 60


class Words(Panel):
    """A card of words."""

    def __init__(self) -> None:
        self._words = style.html(size="13px")
        self.root = style.card(self._words)


class Settings(Words):
    """A table of what the run was started with: its model, data and settings."""

    def draw(self, view: View) -> None:
        """Show what the view has now."""
        rows = _of_facts(view) | settings_text(view)
        first = f"padding:2px 18px 2px 0;color:{style.FAINT_CSS};vertical-align:top"
        cells = "".join(
            f"<tr><td style='{first}'>{style.text(name)}</td>"
            f"<td style='overflow-wrap:anywhere'>{style.text(value)}</td></tr>"
            for name, value in rows.items()
        )
        self._words.text = f"<table>{cells}</table>"


class Log(Words):
    """The last messages, the newest first; of commits that follow each other the last one."""

    def draw(self, view: View) -> None:
        """Show what the view has now."""
        rows: list[str] = []
        before = ""
        for note in reversed(view.notes):
            if note["kind"] == before == "commit":
                continue
            before = note["kind"]
            at = time.strftime("%d %b %H:%M:%S", time.localtime(note["at"]))
            color, first = (
                COLORS.get(note["kind"], style.FAINT_CSS),
                f"color:{style.FAINT_CSS};margin-right:12px",
            )
            words = f"<span style='color:{color}'>{style.text(note['text'])}</span>"
            rows.append(f"<div style='padding:3px 0'><span style='{first}'>{at}</span>{words}</div>")
        self._words.text = "".join(rows[:MOST_SHOWN]) or "nothing yet"


def _of_facts(view: View) -> dict[str, str]:
    facts = view.facts
    if facts is None:
        return {}
    rates = "measured on this machine" if facts.rates_measured else "nominal (oocdl info --machine measures)"
    return {
        "model": facts.model,
        "dataset": facts.dataset + (f", group {facts.group}" if facts.group else ""),
        "run": str(view.run.absolute()),
        "steps": str(facts.steps),
        "engine, threads": f"{facts.engine}, {facts.threads}",
        "budget": f"{size_text(facts.budget_bytes)}, {size_text(facts.base_bytes)} of it the process itself",
        "predicted": f"{facts.predicted_seconds:.3g} s a step, peak {size_text(facts.predicted_peak_bytes)}, "
        f"{size_text(facts.predicted_spill_bytes)} to and from the spill",
        "rates": rates,
    }


def settings_text(view: View) -> dict[str, str]:
    """Write the settings of a run."""
    return {name: _setting(name, value) for name, value in view.settings.items()}


def _setting(name: str, value: Any) -> str:
    """Write a setting of a run, without what is as by default.

    >>> _setting("memory_bytes", 2 << 30), _setting("inputs", None), _setting("betas", [0.9, 0.99])
    ('2.0 GiB', 'by default', '(0.9, 0.99)')
    """
    if value is None:
        return "by default"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return size_text(value)
    return value_text(value, DEFAULTS)
