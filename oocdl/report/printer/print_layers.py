"""Prints the layers of a pass: how each is cut, what it reads, runs and stores, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from textwrap import wrap

from oocdl.graph.ir.index import Region, region_shape, region_size
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.report.printer.notation import (
    INDENT,
    aligned,
    counted,
    labelled,
    name_text,
    shape_text,
    title_text,
    type_text,
)
from oocdl.report.printer.print_program import programs_of

LINE_COLUMNS = 110


def layer_lines(plan: PassPlan, planned: LayerPlan) -> list[str]:
    """Print one layer; each value has its stored type, and the largest shape that a unit has of it."""
    layer = planned.layer
    combines = {view.value: str(cell.combine) for cell in layer.cells for view in cell.outputs}
    roles = {name: str(plan.factored.graph.values[name].role) for name in layer.reads}
    read = _largest(unit.reads for unit in planned.units)
    made = _largest(unit.makes for unit in planned.units)
    rows = labelled("reads", _rows(plan, roles, read))
    rows += labelled("stores", _rows(plan, dict.fromkeys(layer.stores, ""), made))
    rows += labelled("partial", _rows(plan, {name: combines[name] for name in layer.partials}, made))
    return [_head(plan, planned), *aligned(rows), *_operators(planned), INDENT + _costs(planned)]


def _head(plan: PassPlan, planned: LayerPlan) -> str:
    names = plan.classes.names
    cuts = " x ".join(f"{names[cut]}:{count}" for cut, count in planned.grid.items() if count > 1)
    units = counted(len(planned.units), "unit") + (f" = {cuts}" if cuts else "")
    programs = counted(len(programs_of(planned)), "program")
    return f"{title_text(planned)}  {units}, {programs}"


def _rows(plan: PassPlan, notes: dict[str, str], largest: dict[str, Region]) -> list[tuple[str, ...]]:
    values, shapes = plan.factored.graph.values, plan.factored.shapes
    return [
        (
            name_text(name),
            type_text(values[name].dtype, shapes[name]),
            f"unit {shape_text(region_shape(largest[name]))}" if name in largest else "no unit",
            note,
        )
        for name, note in notes.items()
    ]


def _largest(units: Iterable[tuple[tuple[str, Region], ...]]) -> dict[str, Region]:
    """Find the largest region of each value; of equals the first."""
    found: dict[str, Region] = {}
    for regions in units:
        for name, region in regions:
            if name not in found or region_size(region) > region_size(found[name]):
                found[name] = region
    return found


def _operators(planned: LayerPlan) -> list[str]:
    """Print all operators in order; equal ones that follow each other are counted."""
    runs = ((op, len(list(cells))) for op, cells in groupby(cell.node.op for cell in planned.layer.cells))
    text = ", ".join(op if count == 1 else f"{op} x{count}" for op, count in runs)
    lead = f"{INDENT}runs     "
    return wrap(text, LINE_COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead))


def _costs(planned: LayerPlan) -> str:
    moved = f"{planned.read_bytes:,} B read, {planned.written_bytes:,} B written"
    return (
        f"costs    {planned.flops:,} FLOP, {moved}; "
        f"largest unit {planned.buffer_bytes:,} B + {planned.scratch_bytes:,} B scratch"
    )
