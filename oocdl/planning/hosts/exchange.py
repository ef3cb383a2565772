"""What travels between the workers of a cluster in a pass, and what each of them does.

A worker runs all its calls by itself. What others need of it travels in bundles: strips, whole chunks, and
pieces of weights on their way to where they are read. A bundle never waits for another of its own kind: of
what was made, all of it has crossed equally often between workers before (its *level*), so that workers
which wait for each other's bundles never wait in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import region_size
from oocdl.planning.calls import Call, CombineCall, PickCall, made_of
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.placement import Placed, Strip
from oocdl.planning.task_graph import TaskGraph
from oocdl.planning.task_key import TaskKey, TaskKind, result_key, stored_key

LARGEST_BUNDLE_BYTES = 8 << 20
"""A bundle is sent when it has grown to this: larger ones would take memory that nobody has reserved."""
MOST_GROUPS = 1024
"""A pass has at most so many groups of layers on all workers together; each is a task on the cluster."""
GROUPS_AHEAD = 4
"""A bundle is asked for when its reader is so many groups of layers behind: earlier it would take room."""
MOST_ASKED = 64
"""Bundles that a member asks for at once; the first that it needs is always among them."""
SMALL_BYTES = 64 << 10
"""A bundle of at most so much comes as soon as it is made; of larger ones one at a time."""
MOST_SHOWN, MOST_TASKS = 32, 4000
"""Tasks of Dask's of a pass that show at which layers a member works, and of all members together."""


@dataclass(frozen=True)
class Bundle:
    """Chunks that go from one worker to another at once."""

    key: TaskKey
    sender: int
    receiver: int
    items: tuple[TaskKey, ...]
    nbytes: int
    group: int
    """The group of layers that makes the items; -1: the pass starts from them."""
    reader: int
    """The first group of layers that reads one of them on the receiver."""
    position: int
    """The plan position of that call."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Exchange:
    """A pass over several workers, and what they give each other."""

    graph: TaskGraph
    placed: Placed
    bundles: tuple[Bundle, ...]
    groups: tuple[str, ...]
    """Names of the layers, in plan order; where there are many, of the first of each group."""
    group_of: tuple[int, ...]
    """The group of each of ``placed.calls``."""
    homes: Mapping[TaskKey, int]
    """Stored piece -> the worker that holds it between passes."""
    renewed: Mapping[TaskKey, TaskKey]
    """Stored piece -> the chunk of this pass that replaces it."""

    @property
    def crossing_bytes(self) -> int:
        """Bytes of the largest bundle."""
        return max((bundle.nbytes for bundle in self.bundles), default=0)


def shown_groups(groups: Collection[int], members: int) -> list[tuple[int, ...]]:
    """The groups of layers at which a member works, by the task of the cluster that shows them.

    >>> shown_groups(range(5), members=2000)
    [(0, 1, 2), (3, 4)]
    """
    mine = sorted(groups)
    size = -(-len(mine) // min(MOST_SHOWN, max(MOST_TASKS // members, 1))) or 1
    return [tuple(mine[first : first + size]) for first in range(0, len(mine), size)]


def renewed(compiled: CompiledPass) -> dict[TaskKey, TaskKey]:
    """Return, for each stored piece that a pass makes anew, the key of the chunk that replaces it."""
    factored, stored = compiled.plan.factored, {**compiled.pieces, **compiled.sums}
    found = {}
    for name, update in factored.graph.updates.items():
        pieces = dict(compiled.graph.pieces[factored.stored(update)])
        for number, region in enumerate(stored[name]):
            found[stored_key(name, number)] = pieces[region]
    return found


def homes_of(kinds: Mapping[str, CompiledPass], placed: Mapping[str, Placed]) -> dict[TaskKey, int]:
    """Return the worker that holds each stored piece between passes: the one that makes it anew.

    What no pass makes anew is with its first reader. The first of ``kinds`` decides.
    """
    homes: dict[TaskKey, int] = {}
    for name, compiled in kinds.items():
        for stored, made in renewed(compiled).items():
            homes.setdefault(stored, placed[name].worker_of[made])
    for name, compiled in kinds.items():
        wanted = dict.fromkeys(key for key in compiled.graph.inputs if key not in homes)
        for _, call in placed[name].calls if wanted else ():
            for argument in () if isinstance(call, PickCall) else call.arguments:
                if argument in wanted:
                    homes.setdefault(argument, placed[name].worker_of[call.key])
    for compiled in kinds.values():
        for key in compiled.graph.inputs:
            homes.setdefault(key, 0)
    return homes


def exchange(compiled: CompiledPass, placed: Placed, homes: Mapping[TaskKey, int], workers: int) -> Exchange:
    """List the bundles of a placed pass."""
    groups, group_of = _groups(placed.calls, max(MOST_GROUPS // workers, 1))
    replaced = renewed(compiled)
    crossings = _crossings(compiled.graph, placed, homes, replaced, group_of)
    return Exchange(
        graph=compiled.graph,
        placed=placed,
        bundles=tuple(_bundles(crossings)),
        groups=groups,
        group_of=group_of,
        homes=homes,
        renewed=replaced,
    )


def _groups(calls: Sequence[tuple[int, Call]], most: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names of the groups of layers, at most about so many, and the group of each call."""
    runs: list[str] = []
    run_of: list[int] = []
    last = None
    for _, call in calls:
        # Pieces that are cut anew come at the end of a pass, whatever layer made them.
        key = call.source if isinstance(call, PickCall) else call.key
        one = key.kind is TaskKind.RECUT, key.layer
        if one != last:
            runs.append(key.layer)
            last = one
        run_of.append(len(runs) - 1)
    size = -(-len(runs) // most)
    return tuple(runs[::size]), tuple(run // size for run in run_of)


@dataclass
class _Crossing:
    """Items that go together, as far as they are known."""

    sender: int
    receiver: int
    group: int
    reader: int
    items: list[tuple[TaskKey, int, int]] = field(default_factory=list)
    """(key, bytes, position of the call that reads it)."""


def _crossings(
    graph: TaskGraph,
    placed: Placed,
    homes: Mapping[TaskKey, int],
    replaced: Mapping[TaskKey, TaskKey],
    group_of: Sequence[int],
) -> Iterator[_Crossing]:
    """What crosses between two workers, by level, the group that makes it and the group that reads it."""
    level = dict.fromkeys(graph.inputs, 0)
    group = dict.fromkeys(graph.inputs, -1)
    sizes = dict(graph.input_bytes)
    where = {**homes, **placed.worker_of}
    strips: dict[TaskKey, list[Strip]] = {}
    for strip in placed.strips:
        strips.setdefault(strip.source, []).append(strip)
    found: dict[tuple[int, ...], _Crossing] = {}
    seen: set[tuple[TaskKey, int]] = set()

    def cross(item: TaskKey, receiver: int, reader: int, position: int) -> None:
        if where[item] == receiver or (item, receiver) in seen:
            return
        seen.add((item, receiver))
        key = level[item], group[item], where[item], receiver, reader
        crossing = found.setdefault(key, _Crossing(where[item], receiver, group[item], reader))
        crossing.items.append((item, sizes[item], position))

    def made(key: TaskKey, nbytes: int, at_level: int, number: int) -> None:
        level[key], group[key], sizes[key] = at_level, number, nbytes
        for strip in strips.get(key, ()):
            level[strip.key], group[strip.key] = at_level, number
            sizes[strip.key] = region_size(strip.region) * itemsize(dtypes[key])

    dtypes: dict[TaskKey, str] = {}
    position = 0
    for (_, call), number in zip(placed.calls, group_of, strict=True):
        if isinstance(call, PickCall):
            continue
        mine, position = where[call.key], call.position
        at = max((level[source] + (where[source] != mine) for source in call.arguments), default=0)
        for source in call.arguments:
            cross(source, mine, number, position)
        values = call.values if isinstance(call, CombineCall) else [name for name, _ in call.unit.makes]
        results = made_of(call)
        level[call.key], group[call.key], sizes[call.key] = at, number, sum(one.nbytes for one in results)
        for value, one, dtype in zip(values, results, call.dtypes, strict=True):
            key = result_key(call.key, value, len(values))
            dtypes[key] = dtype
            made(key, one.nbytes, at, number)
    for stored, key in replaced.items():
        cross(key, homes[stored], group_of[-1], position + 1)
    yield from found.values()


def _bundles(crossings: Iterator[_Crossing]) -> Iterator[Bundle]:
    """Bundles of at most about ``LARGEST_BUNDLE_BYTES``, or of one item that is larger."""
    count = 0
    for crossing in crossings:
        items: list[tuple[TaskKey, int, int]] = []
        total = 0
        for place, item in enumerate(crossing.items):
            items.append(item)
            total += item[1]
            if total < LARGEST_BUNDLE_BYTES and place + 1 < len(crossing.items):
                continue
            yield Bundle(
                TaskKey(TaskKind.BUNDLE, items[0][0].layer, "", count),
                crossing.sender,
                crossing.receiver,
                tuple(key for key, _, _ in items),
                total,
                crossing.group,
                crossing.reader,
                min(position for _, _, position in items),
            )
            items, total = [], 0
            count += 1
