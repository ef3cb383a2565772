"""Panels of words: the head with four answers and a line of facts, the settings, and messages."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from oocdl.dashboard.answers import Answer, bottleneck, learning, remaining, worst_layer
from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.view import View
from oocdl.report.units import DEFAULTS, clock_time, size_text, value_text

QUESTIONS = (
    ("Is it learning?", learning),
    ("When is it done?", remaining),
    ("What limits it?", bottleneck),
    ("Which layer is worst?", worst_layer),
)
CARDS_STYLE = f"""<style>
.answers {{ display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); }}
.answer {{ background: {style.PAPER_CSS}; border: 1px solid {style.LINE_CSS};
  border-left: 4px solid {style.BLUE}; border-radius: 10px; padding: 6px 12px; min-width: 0; }}
.answer.good {{ border-left-color: {style.GREEN}; }} .answer.bad {{ border-left-color: {style.RED}; }}
.answer .asked {{ color: {style.FAINT_CSS}; font-size: 12px; }}
.answer .short {{ color: {style.INK_CSS}; font-size: 20px; font-weight: 600; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }}
.answer .long {{ color: {style.FAINT_CSS}; font-size: 12px; line-height: 1.3; min-height: 2.6em; }}
.bar {{ height: 6px; background: {style.LINE_CSS}; border-radius: 3px; overflow: hidden;
  margin: 10px 0 4px; }}
.bar div {{ height: 100%; background: {style.BLUE}; }}
.facts {{ display: flex; flex-wrap: wrap; column-gap: 18px; }}
.facts span {{ white-space: nowrap; }} .facts b {{ color: {style.INK_CSS}; font-weight: 600; }}
</style>"""
COLORS = {"warning": style.ORANGE, "stopped": style.RED, "finished": style.GREEN, "notice": style.INK_CSS}
MOST_SHOWN = 60


class Header(Panel):
    """Title, answers, progress: with each update, as time goes on."""

    def __init__(self) -> None:
        self._title, self._cards = style.html(size="18px", color=style.INK_CSS), style.html()
        self.root = style.column(self._title, self._cards)

    def draw(self, view: View) -> None:
        facts = view.facts
        model = style.text(facts.model) if facts else "…"
        self._title.text = (
            f"<b>oocdl</b> &nbsp;{model} <span style='color:{style.FAINT_CSS}'>{style.text(view.run)}</span>"
        )
        cards = "".join(_card(asked, answer(view)) for asked, answer in QUESTIONS)
        self._cards.text = f"{CARDS_STYLE}<div class='answers'>{cards}</div>{_progress(view)}{_line(view)}"


def _card(asked: str, answer: Answer) -> str:
    short, long = style.text(answer.short), style.text(answer.long)
    return (
        f"<div class='answer {answer.mood}'><div class='asked'>{asked}</div>"
        f"<div class='short' title='{short}'>{short}</div><div class='long'>{long}</div></div>"
    )


def _progress(view: View) -> str:
    done = float(view.done)
    total = view.total if view.facts else 0
    if view.now is not None and view.now.step > done:
        done += (view.now.pass_number - 1 + view.done_share()) / view.now.passes
    share = min(done / total, 1.0) if total else 0.0
    return f"<div class='bar'><div style='width:{share:.2%}'></div></div>"


def _line(view: View) -> str:
    """A line of facts: step, learning rate, seconds, memory, last commit."""
    steps, facts = view.steps, view.facts
    words: list[tuple[str, str]] = []
    if facts is not None:
        words.append(("step", f"{view.done} of {view.total}"))
    if len(steps):
        words.append(("loss", f"{steps['loss'][-1]:.4g}"))
        words.append(("learning rate", f"{steps['lr'][-1]:.3g}"))
        words.append(("a step", f"{np.nanmedian(steps['seconds'][-20:]):.3g} s"))
    if facts is not None and (present := view.present):
        most = max(float(table["process_bytes"][-1]) for table in present.values())
        words.append(("memory", f"{size_text(most)} of {size_text(facts.budget_bytes)}"))
        if len(present) > 1:
            words.append(("processes", str(len(present))))
    if commit := view.commit:
        ago = clock_time(max(time.time() - commit["at"], 0))
        words.append(("last commit", f"step {commit['step']}, {ago} ago"))
    inner = " ".join(f"<span>{style.text(name)} <b>{style.text(value)}</b></span>" for name, value in words)
    return f"<div class='facts'>{inner}</div>"


class Words(Panel):
    """A card of words."""

    def __init__(self) -> None:
        self._words = style.html(size="13px")
        self.root = style.card(self._words)


class Settings(Words):
    """A table of what the run was started with: its model, data and settings."""

    def draw(self, view: View) -> None:
        facts = _of_facts(view)
        # In the order of both; where epochs are given, only facts know the steps.
        rows = facts | settings_text(view) | facts
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
        rows: list[str] = []
        before, first = "", f"color:{style.FAINT_CSS};margin-right:12px"
        for note in reversed(view.notes):
            if note["kind"] == before == "commit":
                continue
            before = note["kind"]
            at = time.strftime("%d %b %H:%M:%S", time.localtime(note["at"]))
            color = COLORS.get(note["kind"], style.FAINT_CSS)
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
    """Write the settings of a run, others in other words: but for sizes, numbers have all their digits."""
    return {name: _setting(name, value) for name, value in view.settings.items()}


def _setting(name: str, value: Any) -> str:
    """Write a setting of a run, without what is as by default.

    >>> _setting("memory_bytes", 2 << 30), _setting("inputs", None), _setting("parallel", {"space": [2, 2]})
    ('2.0 GiB', 'by default', 'space: (2, 2)')
    >>> _setting("inputs", {"x": "image", "y": None})
    'x: image'
    >>> _setting("optimizer", {"type": "Adam", "lr": {"type": "Own", "peak": 12345.678, "steps": None}})
    'Adam(lr=Own(peak=12345.678))'
    """
    if value is None:
        return "by default"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return size_text(value)
    if isinstance(value, Mapping) and "type" not in value:
        known = {key: held for key, held in value.items() if held is not None}
        return ", ".join(f"{key}: {value_text(held, DEFAULTS, exact=True)}" for key, held in known.items())
    return "none" if value == [] else value_text(value, DEFAULTS, exact=True)
