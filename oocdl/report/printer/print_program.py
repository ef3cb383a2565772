"""Prints the programs of a layer: what an engine runs, and for which units."""

from __future__ import annotations

from collections.abc import Mapping

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction
from oocdl.graph.partition.unit import Unit
from oocdl.planning.pass_plan import LayerPlan
from oocdl.report.printer.notation import (
    aligned,
    attributes_text,
    counted,
    labelled,
    name_text,
    noted,
    operand_text,
    order_text,
    shape_text,
    title_text,
    type_text,
)


def programs_of(planned: LayerPlan) -> list[list[int]]:
    """Group the numbers of the units that run the same program on the same values, in order of units."""
    found: dict[object, list[int]] = {}
    for number, unit in enumerate(planned.units):
        names = tuple(tuple(name for name, _ in regions) for regions in (unit.reads, unit.makes))
        found.setdefault((unit.program.key, names), []).append(number)
    return list(found.values())


def program_lines(planned: LayerPlan) -> list[str]:
    """Print the distinct programs of a layer. Slots are numbered: inputs first, then what is computed."""
    programs = programs_of(planned)
    counts = f"{counted(len(planned.units), 'unit')}, {counted(len(programs), 'program')}"
    lines = [f"{title_text(planned)}  {counts}"]
    for index, numbers in enumerate(programs):
        runs = " ".join(f"#{number}" for number in numbers)
        lines += ["", f"program {index}, run by {counted(len(numbers), 'unit')}: {runs}"]
        lines += aligned(_rows(planned.units[numbers[0]], planned))
    return lines


def _rows(unit: Unit, planned: LayerPlan) -> list[tuple[str, ...]]:
    program = unit.program
    shapes = dict(zip(program.inputs, program.input_shapes, strict=True))
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    for item in program.instructions:
        shapes |= zip(item.outputs, item.shapes, strict=True)
        dtypes |= zip(item.outputs, item.dtypes, strict=True)
    orders, own = dict(program.orders), planned.scratch[program.key].overwrites
    reads = [
        (
            f"%{slot}",
            type_text(dtypes[slot], shapes[slot]),
            noted(name_text(name), [order_text(orders.get(slot, ())), "overwritten" * (place in own)]),
        )
        for place, (slot, (name, _)) in enumerate(zip(program.inputs, unit.reads, strict=True))
    ]
    runs = [_instruction_row(item, shapes, orders) for item in program.instructions]
    makes = [
        (
            operand_text(item, shapes[item.slot], 0.0),
            type_text(dtypes[item.slot], item.shape),
            noted(name_text(name), [order_text(orders.get(item.slot, ()))]),
        )
        for item, (name, _) in zip(program.outputs, unit.makes, strict=True)
    ]
    return [*labelled("reads", reads), *labelled("runs", runs), *labelled("makes", makes)]


def _instruction_row(
    item: Instruction, shapes: Mapping[int, Shape], orders: Mapping[int, Order]
) -> tuple[str, ...]:
    operands = (operand_text(operand, shapes[operand.slot], item.fill) for operand in item.operands)
    seen = zip(item.kernel_shapes, item.shapes, strict=True)
    views = [f"made as {shape_text(own)}" for own, stored in seen if own != stored]
    return (
        ", ".join(f"%{slot}" for slot in item.outputs),
        ", ".join(map(type_text, item.dtypes, item.shapes)),
        noted(
            f"= {item.op}({', '.join(operands)}){attributes_text(item.attrs)}",
            [*views, *(order_text(orders.get(slot, ())) for slot in item.outputs)],
        ),
    )
