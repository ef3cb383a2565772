"""A step before it runs: the same tasks, tier and disk, with predicted seconds instead of arithmetic.

What comes out: seconds, bytes from and to the disk, and memory over time. How a process goes through its
tasks is ``simulation/process``; several of them, with a network between, are ``simulation/hosts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oocdl.graph.ir.array_layout import footprint
from oocdl.graph.ir.index import Region
from oocdl.planning.calls import PickCall, UnitCall, made_of
from oocdl.planning.cost_model import Costs
from oocdl.planning.simulation.network import Clock
from oocdl.planning.simulation.process import Process, Step
from oocdl.planning.simulation.tasks import Chunk, Tasks
from oocdl.planning.simulation.timeline import Simulated
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey


def simulate(
    graph: TaskGraph,
    tier_bytes: int,
    slots: int,
    workers: int,
    costs: Costs,
    keeps_old: bool = True,
    timeline: bool = True,
) -> Simulated:
    """One step after another has been: weights and state are where that left them.

    ``slots``: programs that run at once; ``workers``: units that are under way. ``keeps_old``: weights and
    state of before the step are there until its end. ``timeline``: whether each unit and moment is told.
    """
    process = Process(Clock(), tier_bytes, slots, workers, costs, timeline)
    tasks = Tasks([*((key, None) for key in graph.inputs), *((call.key, call) for call in graph.calls)])
    kept = {key for key in graph.inputs if keeps_old or key not in graph.replaced} | set(graph.outputs)
    held = before(process, graph, regions_of(graph), graph.inputs, graph.input_uses)
    for turn in range(2):
        step = Step(process, tasks, held, kept)
        process.step = step
        step.start()
        process.clock.run()
        process.end()
        if turn == 0:
            held = after(step, graph.inputs, graph.replaced, graph.input_uses)
    books = process.books
    del process.books  # which write by the process: this would be a circle
    return Simulated(
        process.now - process.begun,
        books.read_bytes,
        books.written_bytes,
        books.peak_bytes,
        process.peak_spilled,
        process.compute_seconds,
        tuple(process.moments),
        tuple(process.units),
        tuple(process.transfers),
    )


def stays(graph: TaskGraph, tier_bytes: int, workers: int) -> bool:
    """Whether a simulated step surely moves nothing: all of it has room at once, however its tasks are run.

    What it starts from, all that it makes, and ``workers`` times what the largest call reserves. False also
    where it starts from what no step makes anew, which may be read part by part in every step.
    """
    if not graph.replaced.keys() >= set(graph.inputs):
        return False
    held, largest = sum(map(footprint, graph.input_bytes.values())), 0
    for call in graph.calls:
        if not isinstance(call, PickCall):
            scratch = call.scratch_bytes if isinstance(call, UnitCall) else 0
            largest = max(largest, call.buffer_bytes + scratch)
            held += sum(footprint(made.nbytes) for made in made_of(call))
    return held + workers * largest <= tier_bytes


def regions_of(graph: TaskGraph) -> dict[TaskKey, Region]:
    """Return the region of each piece that a pass starts from or makes."""
    return {key: region for pieces in graph.pieces.values() for region, key in pieces}


def before(
    process: Process,
    graph: TaskGraph,
    regions: Mapping[TaskKey, Region],
    stored: Iterable[TaskKey],
    uses: Mapping[TaskKey, tuple[int, ...]],
) -> dict[TaskKey, Chunk]:
    """Return chunks of weights and state as they are before any step, by key: on the disk of a process."""
    held = {
        key: Chunk(regions[key], graph.input_bytes[key], uses.get(key, ()), spilled=True) for key in stored
    }
    process.spilled = sum(chunk.nbytes for chunk in held.values())
    return held


def after(
    step: Step,
    stored: Iterable[TaskKey],
    replaced: Mapping[TaskKey, TaskKey],
    uses: Mapping[TaskKey, tuple[int, ...]],
) -> dict[TaskKey, Chunk]:
    """Return the chunks that the next step starts from, by key, with new counts; all others are dropped.

    ``replaced``: what of ``stored`` is another chunk now; ``uses``: when each is read.
    """
    number, process = step.tasks.number, step.process
    found: dict[TaskKey, Chunk] = {key: step.chunks[number[replaced.get(key, key)]] for key in stored}
    kept = set(found.values())
    for chunk in step.chunks:
        if chunk is not None and chunk not in kept:
            process.drop(chunk)
    process.books.renew((chunk, uses.get(key, ())) for key, chunk in found.items())
    process.reset()
    return found
