"""What the run was started with: its model, data and settings, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bokeh.models import LayoutDOM

from oocdl.dashboard.panels.style import FAINT_CSS, card, html, text
from oocdl.dashboard.view import View
from oocdl.report.units import size_text


class Settings:
    """A table of names and values."""

    def __init__(self) -> None:
        self._words = html(size="13px")
        self.root: LayoutDOM = card(self._words)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        rows = {**_of_facts(view), **{name: in_words(name, value) for name, value in view.settings.items()}}
        cells = "".join(
            f"<tr><td style='padding:2px 18px 2px 0;color:{FAINT_CSS};vertical-align:top'>{text(name)}</td>"
            f"<td style='overflow-wrap:anywhere'>{text(value)}</td></tr>"
            for name, value in rows.items()
        )
        self._words.text = f"<table>{cells}</table>"


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
