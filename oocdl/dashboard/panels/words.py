"""Panels of words: the settings of a run, and its messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.view import View
from oocdl.report.units import size_text

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
        rows = {**_of_facts(view), **{name: in_words(name, value) for name, value in view.settings.items()}}
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


def in_words(name: str, value: Any) -> str:
    """Write a setting as it is written in Python.

    >>> in_words("optimizer", {"type": "Adam", "lr": {"type": "Cosine", "lr": 0.1}, "betas": [0.9, 0.99]})
    'Adam(lr=Cosine(lr=0.1), betas=(0.9, 0.99))'
    >>> in_words("memory_bytes", 2 << 30), in_words("inputs", None), in_words("scale", {"image": 2.0})
    ('2.0 GiB', 'by default', 'image: 2.0')
    """
    if value is None:
        return "by default"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return size_text(value)
    if isinstance(value, Mapping):
        known = {key: held for key, held in value.items() if key != "type" and held is not None}
        fields = [(key, in_words("", held)) for key, held in known.items()]
        if "type" in value:
            return f"{value['type']}({', '.join(f'{key}={held}' for key, held in fields)})"
        return ", ".join(f"{key}: {held}" for key, held in fields)
    if isinstance(value, list):
        return f"({', '.join(in_words('', one) for one in value)})" if value else "none"
    return str(value)
