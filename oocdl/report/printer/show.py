"""Prints a pass, or a layer of it, in one of its forms: its graph, layers, their programs, or its tasks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import Literal, get_args

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Node
from oocdl.graph.ir.index import Region, region_shape, region_size
from oocdl.graph.partition.unit import Unit
from oocdl.graph.transforms.factorize import Factored
from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKind, result_key
from oocdl.report.printer.notation import (
    INDENT,
    MOST_NUMBERS,
    Row,
    aligned,
    attribute_text,
    attributes_text,
    key_text,
    name_text,
    noted,
    operand_text,
    order_text,
    region_text,
    sections,
    shape_text,
    title_text,
    type_text,
)
from oocdl.report.units import counted

LINE_COLUMNS = 110
What = Literal["graph", "layers", "program", "tasks"]
"""The texts that there are of a pass."""


def pass_text(plan: PassPlan, graph: TaskGraph, what: What, layer: str | int | None = None) -> str:
    """Print a pass: all its layers, or one that is given by its name or index.

    Raises InputError where there is no such text or layer.
    """
    if what not in get_args(What):
        raise InputError(f"show takes {', '.join(get_args(What))}; got '{what}'")
    chosen = None if layer is None else find_layer(plan, str(layer))
    layers = plan.layers if chosen is None else (chosen,)
    if what == "tasks":
        blocks = [task_lines(plan, graph, chosen)]
    elif what == "graph":
        blocks = [graph_lines(plan.factored) if chosen is None else layer_graph_lines(plan.factored, chosen)]
    elif what == "layers":
        blocks = [layer_lines(plan, planned) for planned in layers]
    else:
        blocks = [program_lines(planned) for planned in layers]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def find_layer(plan: PassPlan, wanted: str) -> LayerPlan:
    """Find a layer by its name or, where none has that name, by its index.

    Raises InputError, which lists close names, if there is none.
    """
    for planned in plan.layers:
        if planned.layer.name == wanted:
            return planned
    if wanted.isascii() and wanted.isdecimal() and int(wanted) < len(plan.layers):
        return plan.layers[int(wanted)]
    near = difflib.get_close_matches(wanted, [planned.layer.name for planned in plan.layers])
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "--show layers lists them"
    raise InputError(f"there is no layer '{wanted}' among layers 0 to {len(plan.layers) - 1}; {hint}")


# --- graph -----------------------------------------------------------------------------------


def graph_lines(factored: Factored) -> list[str]:
    """Print the values that are given, the nodes in order, outputs, and what replaces weights and state."""
    graph = factored.graph
    made = {name for node in graph.nodes for name in node.outputs}
    lines = [f"{len(graph.values)} values, {len(graph.nodes)} nodes", "", "given"]
    lines += _given_lines(factored, [name for name in graph.values if name not in made])
    for role, nodes in groupby(graph.nodes, lambda node: graph.values[node.outputs[0]].role):
        lines += ["", f"made: {role}", *aligned([_node_row(factored, node) for node in nodes])]
    lines += ["", "outputs", *aligned([(name_text(name),) for name in graph.outputs])]
    updates = [(name_text(name), f"<- {name_text(new)}") for name, new in graph.updates.items()]
    return [*lines, "", "updates", *aligned(updates)]


def layer_graph_lines(factored: Factored, planned: LayerPlan) -> list[str]:
    """Print what a layer reads, and its nodes in order; nodes whose values leave it are marked."""
    layer = planned.layer
    leaving = dict.fromkeys(layer.stores, "stored") | dict.fromkeys(layer.partials, "partial result")
    rows = [
        _node_row(factored, cell.node, [leaving.get(view.value, "") for view in cell.outputs])
        for cell in layer.cells
    ]
    given = _given_lines(factored, layer.reads)
    return [title_text(planned), "", "given", *given, "", "made", *aligned(rows)]


def _given_lines(factored: Factored, names: Iterable[str]) -> list[str]:
    values, constants = factored.graph.values, factored.graph.constants
    rows = []
    for name in names:
        array, numbers = constants.get(name), ""
        if array is not None and array.size <= MOST_NUMBERS:
            numbers = attribute_text(tuple(array.ravel()) if array.ndim else array[()])
        note = noted(values[name].role, [_storage_text(factored, name), numbers])
        rows.append((name_text(name), type_text(values[name].dtype, values[name].shape), note))
    return aligned(rows)


def _node_row(factored: Factored, node: Node, notes: Iterable[str] = ()) -> Row:
    values = [factored.graph.values[name] for name in node.outputs]
    call = f"= {node.op}({', '.join(map(name_text, node.inputs))}){attributes_text(node.attrs)}"
    return (
        ", ".join(map(name_text, node.outputs)),
        ", ".join(type_text(value.dtype, value.shape) for value in values),
        noted(call, [*notes, *(_storage_text(factored, name) for name in node.outputs)]),
    )


def _storage_text(factored: Factored, name: str) -> str:
    """Print how a value is stored, where its shape does not say it."""
    stored, notes = factored.alias.get(name, name), []
    if stored != name:
        notes.append(f"stored as {name_text(stored)}")
    elif factored.shapes[name] != factored.graph.values[name].shape:
        notes.append(f"stored as ({','.join(map(str, factored.shapes[name]))})")
    notes.append(order_text(factored.orders.get(name, ())))
    return ", ".join(filter(None, notes))


# --- layers ----------------------------------------------------------------------------------


def layer_lines(plan: PassPlan, planned: LayerPlan) -> list[str]:
    """Print one layer; each value has its stored type, and the largest shape that a unit has of it."""
    layer, values = planned.layer, plan.factored.graph.values
    combines = {view.value: str(cell.combine) for cell in layer.cells for view in cell.outputs}
    read = _largest(unit.reads for unit in planned.units)
    made = _largest(unit.makes for unit in planned.units)
    cuts = " x ".join(f"{plan.classes.names[cut]}:{n}" for cut, n in planned.grid.items() if n > 1)
    units = counted(len(planned.units), "unit", ",") + (f" = {cuts}" if cuts else "")
    runs = ((op, len(list(cells))) for op, cells in groupby(cell.node.op for cell in layer.cells))
    operators = ", ".join(op if count == 1 else f"{op} x{count}" for op, count in runs)
    lead = f"{INDENT}runs     "
    return [
        f"{title_text(planned)}  {units}, {counted(len(programs_of(planned)), 'program', ',')}",
        *sections(
            {
                "reads": [_value_row(plan, name, read, values[name].role) for name in layer.reads],
                "stores": [_value_row(plan, name, made, "") for name in layer.stores],
                "partial": [_value_row(plan, name, made, combines[name]) for name in layer.partials],
            }
        ),
        *wrap(operators, LINE_COLUMNS, initial_indent=lead, subsequent_indent=" " * len(lead)),
        f"{INDENT}costs    {planned.flops:,} FLOP, "
        f"{planned.read_bytes:,} B read, {planned.written_bytes:,} B written; "
        f"largest unit {planned.buffer_bytes:,} B + {planned.scratch_bytes:,} B scratch",
    ]


def _value_row(plan: PassPlan, name: str, largest: Mapping[str, Region], note: str) -> Row:
    stored = type_text(plan.factored.graph.values[name].dtype, plan.factored.shapes[name])
    unit = f"unit {shape_text(region_shape(largest[name]))}" if name in largest else "no unit"
    return name_text(name), stored, unit, note


def _largest(units: Iterable[tuple[tuple[str, Region], ...]]) -> dict[str, Region]:
    """Find the largest region of each value; of equals the first."""
    largest: dict[str, Region] = {}
    for regions in units:
        for name, region in regions:
            if name not in largest or region_size(region) > region_size(largest[name]):
                largest[name] = region
    return largest


# --- programs --------------------------------------------------------------------------------


def programs_of(planned: LayerPlan) -> list[list[int]]:
    """Group the numbers of the units that run the same program on the same values, in order of units."""
    groups: dict[object, list[int]] = {}
    for number, unit in enumerate(planned.units):
        names = tuple(tuple(name for name, _ in regions) for regions in (unit.reads, unit.makes))
        groups.setdefault((unit.program.key, names), []).append(number)
    return list(groups.values())


def program_lines(planned: LayerPlan) -> list[str]:
    """Print the distinct programs of a layer. Slots are numbered: inputs first, then what is computed."""
    programs = programs_of(planned)
    counts = f"{counted(len(planned.units), 'unit', ',')}, {counted(len(programs), 'program', ',')}"
    lines = [f"{title_text(planned)}  {counts}"]
    for index, numbers in enumerate(programs):
        runs = " ".join(f"#{number}" for number in numbers)
        lines += ["", f"program {index}, run by {counted(len(numbers), 'unit', ',')}: {runs}"]
        lines += sections(_program_rows(planned.units[numbers[0]], planned))
    return lines


def _program_rows(unit: Unit, planned: LayerPlan) -> Mapping[str, Sequence[Row]]:
    program = unit.program
    shapes = dict(zip(program.inputs, program.input_shapes, strict=True))
    dtypes = dict(zip(program.inputs, program.input_dtypes, strict=True))
    orders = {slot: order_text(order) for slot, order in program.orders}
    overwritten = planned.scratch[program.key].overwrites
    reads = [
        (
            f"%{slot}",
            type_text(dtypes[slot], shapes[slot]),
            noted(name_text(name), [orders.get(slot, ""), "overwritten" * (place in overwritten)]),
        )
        for place, (slot, (name, _)) in enumerate(zip(program.inputs, unit.reads, strict=True))
    ]
    runs = []
    for item in program.instructions:
        operands = (operand_text(operand, shapes[operand.slot], item.fill) for operand in item.operands)
        call = f"= {item.op}({', '.join(operands)}){attributes_text(item.attrs)}"
        kernels = zip(item.kernel_shapes, item.shapes, strict=True)
        views = [f"made as {shape_text(kernel)}" for kernel, stored in kernels if kernel != stored]
        slots = ", ".join(f"%{slot}" for slot in item.outputs)
        types = ", ".join(map(type_text, item.dtypes, item.shapes))
        runs.append((slots, types, noted(call, [*views, *(orders.get(slot, "") for slot in item.outputs)])))
        shapes |= zip(item.outputs, item.shapes, strict=True)
        dtypes |= zip(item.outputs, item.dtypes, strict=True)
    makes = [
        (
            operand_text(item, shapes[item.slot], 0.0),
            type_text(dtypes[item.slot], item.shape),
            noted(name_text(name), [orders.get(item.slot, "")]),
        )
        for item, (name, _) in zip(program.outputs, unit.makes, strict=True)
    ]
    return {"reads": reads, "runs": runs, "makes": makes}


# --- tasks -----------------------------------------------------------------------------------


def task_lines(plan: PassPlan, graph: TaskGraph, layer: LayerPlan | None = None) -> list[str]:
    """Print the tasks of a layer; or all of a pass, with the chunks it starts from and those it keeps."""
    tasks = [call for call in graph.calls if not isinstance(call, PickCall)]
    if layer is not None:
        own = layer.layer.name
        tasks = [call for call in tasks if call.key.layer == own and call.key.kind is not TaskKind.RECUT]
    programs = {
        planned.units[number]: index
        for planned in (plan.layers if layer is None else [layer])
        for index, numbers in enumerate(programs_of(planned))
        for number in numbers
    }
    blocks = [line for call in tasks for line in ("", *_call_lines(plan, call, programs))]
    if layer is not None:
        return blocks[1:]
    combines = sum(isinstance(call, CombineCall) for call in tasks)
    inputs = [
        (
            key_text(key),
            f"{graph.input_bytes[key]:,} B",
            f"replaced by {key_text(graph.replaced[key])}" if key in graph.replaced else "",
        )
        for key in graph.inputs
    ]
    head = [f"{counted(len(tasks) - combines, 'unit', ',')}, {combines} combining", "", "starts from"]
    kept = aligned([(key_text(key),) for key in graph.outputs])
    return [*head, *aligned(inputs), *blocks, "", "keeps", *kept]


def _call_lines(plan: PassPlan, call: UnitCall | CombineCall, programs: Mapping[Unit, int]) -> list[str]:
    key = key_text(call.key)
    if isinstance(call, CombineCall):
        parts = counted(len(call.arguments) // len(call.values), "partial result", ",")
        head = f"{key}  combines {parts}: {call.combine}, {call.buffer_bytes:,} B"
        return [head, *sections(_combine_rows(plan, call))]
    runs = "puts parts together"  # only cuts results anew, after all layers
    if call.key.kind is not TaskKind.RECUT:
        pieces = zip(plan.layers[call.unit.layer].grid.items(), call.unit.shard, strict=True)
        shard = (f"{plan.classes.names[cut]}={n}, " for (cut, count), n in pieces if count > 1)
        runs = f"{''.join(shard)}program {programs[call.unit]}"
    head = f"{key}  {runs}, {call.buffer_bytes:,} B + {call.scratch_bytes:,} B scratch"
    return [head, *sections(_unit_rows(plan, call))]


def _unit_rows(plan: PassPlan, call: UnitCall) -> Mapping[str, Sequence[Row]]:
    values, unit = plan.factored.graph.values, call.unit
    rows: dict[str, list[Row]] = {"reads": [], "adds to": [], "makes": []}
    for read in call.reads:
        note = "overwritten" if read.overwritten else ""
        parts = [(part, key_text(call.arguments[number])) for number, part in read.chunks]
        for part, source in parts or [(read.region, f"({values[read.value].role})")]:
            rows["reads"].append((_place(plan, read.value, part), noted(source, [note])))
    made = zip(unit.makes, call.combines, unit.counts, call.partial_sums, strict=True)
    for (value, region), combine, count, partial_sum in made:
        place, before = _place(plan, value, region), 0
        if partial_sum is not None:
            argument, before = partial_sum
            rows["adds to"].append((place, noted(key_text(call.arguments[argument]), [f"over {before}"])))
        partial = f"{combine} over {count + before}" if combine else ""
        result = key_text(result_key(call.key, value, len(unit.makes)))
        rows["makes"].append((place, noted(result, [partial])))
    return rows


def _combine_rows(plan: PassPlan, call: CombineCall) -> Mapping[str, Sequence[Row]]:
    places = [_place(plan, value, call.region) for value in call.values]
    width = len(places)
    reads = [
        (places[number % width], noted(key_text(key), [f"over {call.counts[number // width]}"]))
        for number, key in enumerate(call.arguments)
    ]
    results = [key_text(result_key(call.key, value, width)) for value in call.values]
    return {"reads": reads, "makes": list(zip(places, results, strict=True))}


def _place(plan: PassPlan, value: str, region: Region) -> str:
    """Print a region of a value; colons stand for whole axes."""
    return f"{name_text(value)}{region_text(region, plan.factored.shapes[value])}"
