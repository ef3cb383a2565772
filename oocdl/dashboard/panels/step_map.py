"""The map of the running step: a column a layer, in the order in which they run, and in it its tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    HoverTool,
    LayoutDOM,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import BoxAnnotation, Label

from oocdl.dashboard.facts import LayerFacts
from oocdl.dashboard.panels.style import (
    HEIGHT,
    PART_COLORS,
    PHASE_COLORS,
    PHASE_NAMES,
    card,
    chips,
    html,
    plot,
)
from oocdl.dashboard.view import View
from oocdl.report.units import size_text

SHARDS_SHOWN = 48
"""Places of a layer's column; a layer of fewer tasks has larger ones."""
BAND_PIXELS = 16
"""Height of the band above, which says what is forward, backward and update."""


class StepMap:
    """Layers from left to right, their tasks from top to bottom."""

    def __init__(self, height: int = HEIGHT) -> None:
        self._image = ColumnDataSource({"image": [], "dw": []})
        names = ("left", "right", "name", "about", "done")
        self._layers = ColumnDataSource({name: [] for name in names})
        self._figure = plot("Layers × shards of the step", height - 22, tools="xpan,xbox_zoom,reset")
        self._band = BAND_PIXELS * SHARDS_SHOWN / (height - 110)
        """Height of the band above, in places."""
        self._figure.y_range = Range1d(start=0, end=SHARDS_SHOWN + self._band)
        self._figure.x_range.range_padding = 0
        mapper = LinearColorMapper(palette=list(PHASE_COLORS), low=-0.5, high=4.5)
        self._figure.image(
            "image", x=0, y=0, dw="dw", dh=SHARDS_SHOWN, source=self._image, color_mapper=mapper
        )
        boxes = self._figure.quad(
            left="left", right="right", top=SHARDS_SHOWN, bottom=0, source=self._layers,
            fill_alpha=0.0, line_color="#ffffff", line_width=1, hover_line_color="#1d2733",
        )  # fmt: skip
        self._figure.add_tools(
            HoverTool(
                tooltips=[("layer", "@name"), ("", "@about"), ("done", "@done{0%}")],
                renderers=[boxes],
                point_policy="follow_mouse",
            )
        )
        self._figure.yaxis.visible = False
        self._figure.grid.grid_line_color = None
        self._figure.xaxis.axis_label = "layers, in the order in which they run"
        self._legend = chips(list(zip(PHASE_COLORS, PHASE_NAMES, strict=True)))
        self._where = html(self._legend)
        self._banded = ""
        self.root: LayoutDOM = card(self._figure, self._where)

    def update(self, view: View) -> None:
        """Show what the view has now."""
        image, now, facts = view.phase_map(SHARDS_SHOWN), view.now, view.facts
        if image is None or now is None or facts is None:
            self._where.text = f"{self._legend} no step has begun yet"
            return
        layers = facts.passes[now.plan_id].layers
        if self._banded != now.plan_id:
            self._banded = now.plan_id
            self._bands(layers)
            self._layers.data = {
                "left": np.arange(len(layers)),
                "right": np.arange(1, len(layers) + 1),
                "name": [layer.name for layer in layers],
                "about": [about(layer) for layer in layers],
                "done": np.zeros(len(layers), np.float32),
            }
        self._image.data = {"image": [image.T[::-1].copy()], "dw": [len(layers)]}
        # The one column that changes: names of hundreds of layers would be sent again each time.
        self._layers.data["done"] = (image == len(PHASE_NAMES) - 1).mean(axis=1, dtype=np.float32)
        running = np.flatnonzero(((image > 0) & (image < len(PHASE_NAMES) - 1)).any(axis=1))
        parts = dict.fromkeys(layers[index].phase for index in running)
        of_pass = f", pass {now.pass_number} of {now.passes}" if now.passes > 1 else ""
        where = " and ".join(parts) or "between two passes"
        share = view.done_share()
        words = "done" if view.ended == "finished" and share == 1 else f"{where}, {share:.0%} done"
        self._where.text = f"{self._legend} step {now.step}{of_pass}: {words}"

    def _bands(self, layers: tuple[LayerFacts, ...]) -> None:
        """Draw forward, backward and update above the layers."""
        kept = [one for one in self._figure.center if not isinstance(one, BoxAnnotation | Label)]
        self._figure.center = kept
        low, high = SHARDS_SHOWN + 0.15 * self._band, SHARDS_SHOWN + self._band
        start = 0
        for index in range(1, len(layers) + 1):
            if index < len(layers) and layers[index].phase == layers[start].phase:
                continue
            part = layers[start].phase
            common: dict[str, Any] = {"fill_color": PART_COLORS[part], "line_color": None}
            self._figure.add_layout(
                BoxAnnotation(left=start, right=index, top=high, bottom=low, fill_alpha=0.85, **common)
            )
            if (index - start) / len(layers) > 0.1:
                self._figure.add_layout(
                    Label(
                        x=(start + index) / 2,
                        y=(low + high) / 2,
                        text=part,
                        text_color="white",
                        text_align="center",
                        text_baseline="middle",
                        text_font_size="11px",
                    )  # fmt: skip
                )
            start = index


def about(layer: LayerFacts) -> str:
    """Write a line on a layer: its part of the step, cuts, shape and bytes."""
    cut = f"{layer.units} units ({layer.cuts})" if layer.cuts else "1 unit"
    return f"{layer.phase}, {layer.shape or 'scalars'}, {cut}, largest {size_text(layer.unit_bytes)}"
