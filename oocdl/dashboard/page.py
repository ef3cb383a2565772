"""The page of a run: a head with four answers, and tabs."""

from __future__ import annotations

from bokeh.core.templates import get_env
from bokeh.models import Column, LayoutDOM, TabPanel, Tabs
from bokeh.models.ui import UIElement

from oocdl.dashboard.panels.header import Header
from oocdl.dashboard.panels.layers import LayerTable, SlowestLayers
from oocdl.dashboard.panels.learning import Learning
from oocdl.dashboard.panels.log import Log
from oocdl.dashboard.panels.machine import Memory, Rates
from oocdl.dashboard.panels.network import Network
from oocdl.dashboard.panels.pictures import Pictures
from oocdl.dashboard.panels.step_map import StepMap
from oocdl.dashboard.panels.style import BLUE, FONT, INK, LINE, Panel, card, grid, html
from oocdl.dashboard.panels.timeline import Timeline
from oocdl.dashboard.view import View

# Texts: a model could be part of a single browser's document only.
TABS = f""".bk-tab {{ font-family: {FONT}; font-size: 13px; color: {INK}; padding: 6px 12px;
  border: none; outline: none; }}
.bk-tab.bk-active {{ color: {BLUE}; background: transparent; border-bottom: 2px solid {BLUE};
  font-weight: 600; }}
.bk-header {{ border-bottom: 1px solid {LINE}; margin-bottom: 8px; overflow-x: auto; }}"""
PAGE = """:host { max-width: 1500px; margin: 0 auto; padding: 10px 14px; box-sizing: border-box;
  overflow-x: clip; }"""


TEMPLATE = get_env().from_string("""{% extends base %}
{% block preamble %}<meta name="viewport" content="width=device-width, initial-scale=1">{% endblock %}
""")
"""A phone shows the page as wide as it is itself."""


class Page:
    """All panels of a run, for one browser. Lay out ``root``, and call ``update`` about once a second."""

    def __init__(self, view: View, tables: str = "") -> None:
        """Make the page; ``tables`` is HTML for a tab of its own, whose names are escaped."""
        self._view, self._version = view, -1
        self._header = Header()
        small = (Learning(small=True), StepMap(), Memory(small=True), SlowestLayers())
        self._panels: dict[str, tuple[Panel, ...]] = {
            "Overview": small,
            "Learning": (Learning(),),
            "Step": (StepMap(height=400), Timeline()),
            "Machine": (Memory(), Rates()),
            "Layers": (LayerTable(),),
            "Network": (Network(),),
            "Pictures": (Pictures(),),
            "Messages": (Log(),),
        }
        tabs = [
            TabPanel(title=title, child=self._laid(title, panels)) for title, panels in self._panels.items()
        ]
        if tables:
            tabs.append(TabPanel(title="Report", child=card(html(tables, color=INK))))
        self._tabs = Tabs(tabs=tabs, sizing_mode="stretch_width", stylesheets=[TABS])
        self._tabs.on_change("active", self._turned)
        parts: list[UIElement] = [self._header.root, self._tabs]
        self.root: LayoutDOM = Column(children=parts, sizing_mode="stretch_width", stylesheets=[PAGE])
        self._show(*(panel for panels in self._panels.values() for panel in panels))

    @staticmethod
    def _laid(title: str, panels: tuple[Panel, ...]) -> LayoutDOM:
        roots: list[UIElement] = [panel.root for panel in panels]
        return grid(roots) if title == "Overview" else Column(children=roots, sizing_mode="stretch_width")

    def _turned(self, _attr: str, _old: object, _new: object) -> None:
        self._show(*self._active())

    def update(self) -> None:
        """Show what the view has now, if it has something new; of the tabs, only the one that is seen."""
        if self._version != self._view.version:
            self._version = self._view.version
            self._show(*self._active())
        else:
            self._header.update(self._view)  # time goes on

    def _active(self) -> tuple[Panel, ...]:
        """The panels that are seen."""
        return list(self._panels.values())[int(self._tabs.active)]

    def _show(self, *panels: Panel) -> None:
        for panel in (self._header, *panels):
            panel.update(self._view)
