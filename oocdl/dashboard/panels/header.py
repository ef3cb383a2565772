"""The head of the page: four answers, and a line of facts."""

from __future__ import annotations

import time

import numpy as np
from bokeh.models import Column

from oocdl.dashboard.answers import Answer, bottleneck, learning, remaining, worst_layer
from oocdl.dashboard.panels import style
from oocdl.dashboard.panels.style import Panel
from oocdl.dashboard.view import View
from oocdl.report.units import clock_time, size_text

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


class Header(Panel):
    """Title, answers, progress: with each update, as time goes on."""

    def __init__(self) -> None:
        self._title, self._cards = style.html(size="18px", color=style.INK_CSS), style.html()
        self.root = Column(children=[self._title, self._cards], sizing_mode="stretch_width")

    def draw(self, view: View) -> None:
        """Show what the view has now."""
        facts = view.facts
        model = style.text(facts.model) if facts else "…"
        self._title.text = (
            f"<b>oocdl</b> &nbsp;{model} <span style='color:{style.FAINT_CSS}'>{style.text(view.run)}</span>"
        )
        cards = "".join(_card(asked, answer(view)) for asked, answer in QUESTIONS)
        self._cards.text = f"{CARDS_STYLE}<div class='answers'>{cards}</div>{_progress(view)}{_facts(view)}"


def _card(asked: str, answer: Answer) -> str:
    short, long = style.text(answer.short), style.text(answer.long)
    return (
        f"<div class='answer {answer.mood}'><div class='asked'>{asked}</div>"
        f"<div class='short' title='{short}'>{short}</div><div class='long'>{long}</div></div>"
    )


def _progress(view: View) -> str:
    done = float(view.steps["step"][-1]) if len(view.steps) else 0.0
    total = view.facts.steps if view.facts else 0
    if view.now is not None and view.now.step > done:
        done += (view.now.pass_number - 1 + view.done_share()) / view.now.passes
    share = min(done / total, 1.0) if total else 0.0
    return f"<div class='bar'><div style='width:{share:.2%}'></div></div>"


def _facts(view: View) -> str:
    """A line of facts: step, learning rate, seconds, memory, last commit."""
    steps, facts = view.steps, view.facts
    words: list[tuple[str, str]] = []
    if facts is not None:
        done = int(steps["step"][-1]) if len(steps) else 0
        words.append(("step", f"{done} of {facts.steps}"))
    if len(steps):
        words.append(("loss", f"{steps['loss'][-1]:.4g}"))
        words.append(("learning rate", f"{steps['lr'][-1]:.3g}"))
        words.append(("a step", f"{np.nanmedian(steps['seconds'][-20:]):.3g} s"))
    if facts is not None and view.resources:
        most = max(float(table["process_bytes"][-1]) for table in view.resources.values())
        words.append(("memory", f"{size_text(most)} of {size_text(facts.budget_bytes)}"))
        if len(view.resources) > 1:
            words.append(("processes", str(len(view.resources))))
    commits = [note for note in view.notes if note["kind"] == "commit"]
    if commits:
        ago = clock_time(max(time.time() - commits[-1]["at"], 0))
        words.append(("last commit", f"step {commits[-1]['step']}, {ago} ago"))
    inner = " ".join(f"<span>{style.text(name)} <b>{style.text(value)}</b></span>" for name, value in words)
    return f"<div class='facts'>{inner}</div>"
