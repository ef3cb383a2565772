"""A digest of all that a plan decides: layers, cuts, tasks, regions and reservations."""

from __future__ import annotations

import hashlib
from typing import Any

from oocdl.planning.calls import PickCall, UnitCall
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.pass_plan import LayerPlan
from oocdl.planning.task_graph import TaskGraph
from oocdl.report.plan_view import Plan
from tests.kit.placed import calls_of, strips_of, worker_of


def _layer(planned: LayerPlan) -> object:
    layer = planned.layer
    cells = [cell.node.name for cell in layer.cells]
    values = layer.name, layer.index, cells, layer.reads, layer.stores, layer.partials, sorted(layer.touched)
    nbytes = planned.buffer_bytes, planned.scratch_bytes, planned.read_bytes, planned.written_bytes
    return values, sorted(planned.grid.items()), nbytes, planned.flops, len(planned.units)


def _call(call: Any) -> object:
    if not isinstance(call, UnitCall):
        return repr(call)
    unit = call.unit
    made = unit.layer, unit.shard, unit.reads, unit.program.key, unit.makes, unit.counts
    tasks = call.key, call.position, call.arguments, call.reads, call.partial_sums, call.uses
    return made, tasks, call.combines, call.dtypes, call.buffer_bytes, call.scratch_bytes


def _graph(graph: TaskGraph) -> object:
    mappings = graph.pieces, graph.input_uses, graph.input_bytes, graph.replaced
    return graph.inputs, graph.outputs, [sorted(found.items()) for found in mappings]


def plan_digest(plan: Plan) -> dict[str, str]:
    """Kind of pass -> a digest, in hexadecimal, of its plan; ``seconds`` -> those that are predicted."""
    found = {"seconds": repr(plan.seconds)}
    for name, kind in plan.kinds.items():
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((kind.plan.cuts, sorted(kind.pieces.items()), _graph(kind.graph))).encode())
        for planned in kind.plan.layers:
            digest.update(repr(_layer(planned)).encode())
        for call in kind.graph.calls:
            digest.update(repr(_call(call)).encode())
        found[name] = digest.hexdigest()
    return found


def placement_digest(made: Exchange) -> str:
    """A digest, in hexadecimal, of who does what in a pass, and of all that travels."""
    digest, placed = hashlib.blake2b(digest_size=8), made.placed
    maker = worker_of(placed)
    for number, call in calls_of(placed):
        arguments = () if isinstance(call, PickCall) else call.arguments
        digest.update(repr((number, call.key, arguments, maker[call.key])).encode())
    for strip in strips_of(placed):
        digest.update(repr((strip, maker[strip.key])).encode())
    for bundle in made.bundles:
        digest.update(repr(bundle).encode())
    digest.update(repr((made.groups, tuple(made.group_of.tolist()), sorted(made.homes.items()))).encode())
    return digest.hexdigest()
