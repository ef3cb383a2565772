"""Colours, sizes and figures that all panels share, and what a panel is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from bokeh.models import Column, ColumnDataSource, HoverTool, LayoutDOM, LinearColorMapper
from bokeh.models.widgets import Div, Select, Slider
from bokeh.plotting import figure

from oocdl.dashboard.view import View
from oocdl.errors import printable
from oocdl.report.figure import OKABE_ITO, PHASES

BLUE, RED, GREEN, PURPLE, ORANGE, SKY, YELLOW = OKABE_ITO
GREY = "#8a9099"
INK, FAINT, LINE, PAPER = "#1d2733", "#66717e", "#e3e7ec", "#ffffff"
INK_CSS, FAINT_CSS = f"var(--ink, {INK})", f"var(--faint, {FAINT})"
LINE_CSS, PAPER_CSS = f"var(--line, {LINE})", f"var(--paper, {PAPER})"
"""The same for HTML, where a page has other colours for the dark."""
LINK_CSS = f"var(--link, {BLUE})"
PHASE_COLORS = ("#e9ecf0", SKY, YELLOW, PURPLE, GREEN)
PART_COLORS = PHASES
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
HEIGHT = 236
"""Pixels of a figure in the overview."""
MOST_POINTS = 2000
"""Points of a line that a browser gets."""

# Style sheets are texts: a model of one could be part of a single browser's document only.
CARD = f""":host {{ background: {PAPER_CSS}; border: 1px solid {LINE_CSS}; border-radius: 10px;
  padding: 8px 10px; box-sizing: border-box; min-width: 0; }}"""
SCROLLED = ":host { overflow-x: auto; contain: inline-size; }"
"""Style of content that scrolls sideways on a phone instead of widening the page."""
DRAWN = ":host { filter: var(--drawn, none); color-scheme: light; color: black; }"
"""Style of what is drawn in light colours: a dark page inverts their lightness and keeps hues."""
THEME = """<style>
:root { --page: #f5f6f8; color-scheme: light dark; }
body { background: var(--page); }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1318; --ink: #e4e8ec; --faint: #98a3af; --line: #2c343d; --paper: #181d23;
    --link: #6db3e8; --drawn: invert(0.92) hue-rotate(180deg); }
}
</style>"""
"""Colours of a page by day and in the dark, as the browser says."""
WIDE = ".bk-clearfix { display: block; width: 100%; }"
GRID = """:host { display: grid !important; gap: 12px; align-items: stretch;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, WIDTHpx), 1fr)); }"""
CONTROL: Any = {"tags": ["control"], "stylesheets": [DRAWN]}
"""Look of what needs a server to do anything, and its tag."""


class Panel(ABC):
    """A part of the page: ``root`` is laid out, ``update`` is called when the view has something new."""

    root: LayoutDOM
    view: View | None = None
    _drawn: object = None

    def update(self, view: View) -> None:
        """Show what the view has now, unless it is what is shown."""
        self.view, basis = view, self.basis(view)
        if basis is not None and basis is not self._drawn:
            self._drawn = basis
            self.draw(view)

    def changed(self, _attr: str, _old: object, _new: object) -> None:
        """Draw anew: someone has used a control."""
        self._drawn = None
        if self.view is not None:
            self.update(self.view)

    def basis(self, view: View) -> object | None:
        """Return what is drawn: another object where it has changed, None where there is nothing yet."""
        return object()

    @abstractmethod
    def draw(self, view: View) -> None:
        """Show what the view has."""


class OfLastPass(Panel):
    """A panel that is drawn anew with each whole pass."""

    def basis(self, view: View) -> object | None:
        return view.last_pass if view.facts is not None else None


def text(words: object) -> str:
    """Write words for HTML: names come from files that others wrote."""
    return escape(printable(str(words)))


def plot(title: str, height: int = HEIGHT, tools: str = "pan,box_zoom,reset", **options: Any) -> Any:
    """Make an empty figure as all of them look."""
    options = {"stylesheets": [DRAWN], "background_fill_color": None, "border_fill_color": None} | options
    options |= {"height": height, "tools": tools, "toolbar_location": "above"}
    chart: Any = figure(title=title, sizing_mode="stretch_width", **options)
    chart.title.text_font, chart.title.text_font_size, chart.title.text_color = FONT, "13px", INK
    chart.toolbar.logo, chart.toolbar.autohide = None, True
    chart.outline_line_color = None
    chart.grid.grid_line_color = LINE
    chart.min_border_right = 12
    for axis in (*chart.xaxis, *chart.yaxis):
        axis.axis_line_color, axis.major_tick_line_color, axis.minor_tick_line_color = LINE, LINE, None
        axis.major_label_text_font = axis.axis_label_text_font = FONT
        axis.major_label_text_color = axis.axis_label_text_color = FAINT
        axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "11px"
    return chart


def source(*columns: str) -> ColumnDataSource:
    """Make a source of these columns, empty yet."""
    return ColumnDataSource({name: [] for name in columns})


def hover(chart: Any, tips: Mapping[str, str], *renderers: Any, **options: Any) -> None:
    """Show words and columns where a mouse rests on these renderers of a figure; on any if there are none."""
    options |= {"renderers": list(renderers)} if renderers else {}
    chart.add_tools(HoverTool(tooltips=list(tips.items()), **options))


def bare(chart: Any) -> Any:
    """Leave out axes and grid of a figure, and return it."""
    chart.axis.visible = False
    chart.grid.grid_line_color = None
    return chart


def class_colors(palette: Sequence[str], **options: Any) -> LinearColorMapper:
    """Map numbers from 0 on to the colours of a palette."""
    return LinearColorMapper(palette=list(palette), low=-0.5, high=len(palette) - 0.5, **options)


def with_legend(chart: Any, place: str = "top_left") -> None:
    """Style the legend of a figure that has one; a click on an entry hides its line."""
    legend = chart.legend[0]
    legend.location, legend.click_policy = place, "hide"
    legend.label_text_font, legend.label_text_font_size = FONT, "11px"
    legend.background_fill_alpha, legend.border_line_color = 0.75, None
    legend.padding, legend.spacing, legend.glyph_height = 4, 1, 14


def column(*children: Any, sheets: Sequence[Any] = ()) -> Column:
    """Put things below each other."""
    return Column(children=list(children), sizing_mode="stretch_width", stylesheets=list(sheets))


def card(*children: Any, sheets: Sequence[str] = ()) -> Column:
    """Put things on a white card."""
    return column(*children, sheets=[CARD, *sheets])


def grid(children: Sequence[Any], width: int = 480) -> Column:
    """Put cards of such a width side by side where there is room, below each other on a phone."""
    return column(*children, sheets=[GRID.replace("WIDTH", str(width))])


def chips(entries: Sequence[tuple[str, str]]) -> str:
    """Write a legend as HTML: (colour, words) of each entry."""
    return " ".join(
        f'<span style="white-space:nowrap;margin-right:12px"><span style="display:inline-block;width:10px;'
        f'height:10px;border-radius:2px;background:{color};margin-right:5px"></span>{text(words)}</span>'
        for color, words in entries
    )


def html(words: str = "", size: str = "12px", color: str = FAINT_CSS) -> Div:
    """A place for HTML whose names are escaped already (``text``)."""
    style: Any = {"color": color, "font-family": FONT, "font-size": size}
    return Div(text=words, styles=style, sizing_mode="stretch_width", disable_math=True, stylesheets=[WIDE])


def slider(title: str, end: float, value: float, **options: Any) -> Slider:
    """A slider from 0 on."""
    return Slider(title=title, start=0, end=end, value=value, **CONTROL, **options)


def choice(title: str, options: Any, width: int, changed: Callable[[str, Any, Any], None]) -> Select:
    """A list to choose from, of which the first is chosen; ``changed`` is called when another is."""
    select = Select(title=title, value=options[0], options=options, width=width, **CONTROL)
    select.on_change("value", changed)
    return select
