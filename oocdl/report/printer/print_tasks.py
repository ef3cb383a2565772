"""Prints the tasks of a pass in plan order, with the chunks that each reads and makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from oocdl.graph.ir.index import Region
from oocdl.graph.partition.unit import Unit
from oocdl.planning.calls import CombineCall, PickCall, UnitCall
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey
from oocdl.report.printer.notation import aligned, counted, key_text, labelled, name_text, noted, region_text
from oocdl.report.printer.print_program import programs_of

Row = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Names:
    """Looks up the names that the texts of tasks need."""

    plan: PassPlan
    results: Mapping[TaskKey, Mapping[int, TaskKey]]
    """Task that makes several values -> the key of each."""
    programs: Mapping[Unit, int]
    """Unit of a layer -> number of its program there."""

    def place(self, value: str, region: Region) -> str:
        """Print a region of a value; colons stand for whole axes."""
        return f"{name_text(value)}{region_text(region, self.plan.factored.shapes[value])}"

    def shard(self, call: UnitCall) -> str:
        """Print which piece a unit has along each class that its layer is cut along."""
        if call.unit not in self.programs:  # it only cuts results anew, after all layers
            return ""
        grid = self.plan.layers[call.unit.layer].grid
        pieces = zip(grid.items(), call.unit.shard, strict=True)
        return "".join(f"{self.plan.classes.names[cut]}={n}, " for (cut, count), n in pieces if count > 1)

    def result(self, key: TaskKey, index: int) -> str:
        """Print the key of a task's result."""
        return key_text(self.results[key][index] if key in self.results else key)


def task_lines(plan: PassPlan, graph: TaskGraph) -> list[str]:
    """Print the chunks that a pass starts from, all of its tasks, and the chunks that are kept."""
    tasks = list(_tasks(graph))
    combines = sum(isinstance(call, CombineCall) for _, call in tasks)
    lines = [f"{counted(len(tasks) - combines, 'unit')}, {combines} combining", "", "starts from"]
    lines += aligned([_input_row(graph, key) for key in graph.inputs])
    names = _names(plan, graph)
    for _, call in tasks:
        lines += ["", *_call_lines(names, call)]
    return [*lines, "", "keeps", *aligned([(key_text(key),) for key in graph.outputs])]


def _input_row(graph: TaskGraph, key: TaskKey) -> Row:
    after = f"replaced by {key_text(graph.replaced[key])}" if key in graph.replaced else ""
    return key_text(key), f"{graph.input_bytes[key]:,} B", after


def layer_task_lines(plan: PassPlan, graph: TaskGraph, planned: LayerPlan) -> list[str]:
    """Print the tasks of one layer."""
    names = _names(plan, graph)
    blocks = [_call_lines(names, call) for layer, call in _tasks(graph) if layer == planned.layer.index]
    return [line for block in blocks for line in ("", *block)][1:]


def _tasks(graph: TaskGraph) -> Iterator[tuple[int, UnitCall | CombineCall]]:
    """Yield the layer of each task, and the task; those that combine follow the units of their layer."""
    layer = 0
    for call in graph.calls:
        if isinstance(call, UnitCall):
            layer = call.unit.layer
        if not isinstance(call, PickCall):
            yield layer, call


def _names(plan: PassPlan, graph: TaskGraph) -> _Names:
    results: dict[TaskKey, dict[int, TaskKey]] = {}
    for call in graph.calls:
        if isinstance(call, PickCall):
            results.setdefault(call.source, {})[call.number] = call.key
    programs = {
        planned.units[number]: index
        for planned in plan.layers
        for index, numbers in enumerate(programs_of(planned))
        for number in numbers
    }
    return _Names(plan, results, programs)


def _call_lines(names: _Names, call: UnitCall | CombineCall) -> list[str]:
    if isinstance(call, CombineCall):
        return [_combine_head(call), *aligned(_combine_rows(names, call))]
    return [_unit_head(names, call), *aligned(_unit_rows(names, call))]


def _unit_head(names: _Names, call: UnitCall) -> str:
    program = names.programs.get(call.unit)
    runs = "puts parts together" if program is None else f"program {program}"
    memory = f"{call.buffer_bytes:,} B + {call.scratch_bytes:,} B scratch"
    return f"{key_text(call.key)}  {names.shard(call)}{runs}, {memory}"


def _unit_rows(names: _Names, call: UnitCall) -> list[Row]:
    values = names.plan.factored.graph.values
    reads: list[Row] = []
    for read in call.reads:
        note = "overwritten" if read.overwritten else ""
        parts = [(part, key_text(call.arguments[number])) for number, part in read.chunks]
        for part, source in parts or [(read.region, f"({values[read.value].role})")]:
            reads.append((names.place(read.value, part), noted(source, [note])))
    adds: list[Row] = []
    makes: list[Row] = []
    for index, (value, region) in enumerate(call.unit.makes):
        place, combine, count = names.place(value, region), call.combines[index], call.unit.counts[index]
        partial_sum = call.partial_sums[index]
        if partial_sum is not None:
            argument, before = partial_sum
            adds.append((place, noted(key_text(call.arguments[argument]), [f"over {before}"])))
            count += before
        partial = f"{combine} over {count}" if combine else ""
        makes.append((place, noted(names.result(call.key, index), [partial])))
    return [*labelled("reads", reads), *labelled("adds to", adds), *labelled("makes", makes)]


def _combine_head(call: CombineCall) -> str:
    parts = counted(len(call.arguments) // len(call.values), "partial result")
    return f"{key_text(call.key)}  combines {parts}: {call.combine}, {call.buffer_bytes:,} B"


def _combine_rows(names: _Names, call: CombineCall) -> list[Row]:
    width = len(call.values)
    reads = [
        (
            names.place(call.values[number % width], call.region),
            noted(key_text(key), [f"over {call.counts[number // width]}"]),
        )
        for number, key in enumerate(call.arguments)
    ]
    makes = [
        (names.place(value, call.region), names.result(call.key, index))
        for index, value in enumerate(call.values)
    ]
    return [*labelled("reads", reads), *labelled("makes", makes)]
