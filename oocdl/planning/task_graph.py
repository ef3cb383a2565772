"""Turns a plan into the tasks of one step: the structure of the Dask graph.

Compiled once; each step only fills in its number. A call is a unit, the combining
of partial results, or a piece of a unit's result on its own (so that it lives and
dies by itself). Partial results go to a fixed number of partial sums: a unit adds its own
to the sum so far, one call then combines the sums in order. What is added
to what is fixed by the plan, never by who was first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from oocdl.graph.ir.array_layout import footprint, itemsize
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.index import Region, grid_of, region_shape, region_size, whole
from oocdl.graph.ir.program import Operand, make_program
from oocdl.graph.ir.region_index import Parts, RegionIndex
from oocdl.graph.partition.unit import Unit, combined_together
from oocdl.graph.transforms.factorize import Cell
from oocdl.planning.calls import Call, CombineCall, PickCall, Read, UnitCall
from oocdl.planning.partial_sums import PartialSums
from oocdl.planning.pass_plan import LayerPlan, PassPlan
from oocdl.planning.task_key import TaskKey, TaskKind, result_keys, stored_key
from oocdl.planning.tile_search import combine_buffer_bytes, unit_buffer_bytes

Piece = tuple[Region, TaskKey]

SOURCES = (Role.INPUT, Role.TARGET, Role.RANDOM, Role.SCALAR, Role.CONSTANT, Role.SUM)
"""Roles of values that a unit reads from elsewhere than from chunks (sums: where there are none yet)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskGraph:
    """All calls in plan order, and where every value's pieces are."""

    calls: tuple[Call, ...]
    pieces: Mapping[str, tuple[Piece, ...]]
    inputs: tuple[TaskKey, ...]
    """Chunks of weights, state and sums that the step starts from."""
    outputs: tuple[TaskKey, ...]
    """Chunks to be kept when the step is over."""
    input_uses: Mapping[TaskKey, tuple[int, ...]]
    """Positions of the calls that read each input."""
    input_bytes: Mapping[TaskKey, int]
    replaced: Mapping[TaskKey, TaskKey]
    """Input -> what the next step starts from instead."""
    hosts: int | None = None
    """Maximum number of workers of a cluster that get work; None: all that there are."""


class _Found(NamedTuple):
    """A region that units of a layer read."""

    keys: list[TaskKey]
    """Chunks that have a part of it."""
    parts: Parts
    reads: dict[tuple[int, bool], Read]
    """(number of the first argument, whether it is overwritten) -> the read of those units: one object."""


@dataclass
class _Draft:
    """The growing step."""

    plan: PassPlan
    calls: list[Call] = field(default_factory=list)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    readers: defaultdict[TaskKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    position: int = 0
    found: dict[tuple[str, Region], _Found] = field(default_factory=dict)
    """Value and region that the layer reads -> what is found of them."""
    parts: dict[Parts, Parts] = field(default_factory=dict)
    """Parts of all layers; equal ones are one object."""
    indexes: dict[str, tuple[int, RegionIndex]] = field(default_factory=dict)
    """Value -> number of its pieces when they were indexed, and their index."""

    def add(self, call: UnitCall | CombineCall) -> None:
        """Add the call at ``position``, which moves on."""
        readers, position = self.readers, self.position
        for argument in dict.fromkeys(call.arguments):
            readers[argument].append(position)
        self.calls.append(call)
        self.position += 1

    def index(self, name: str) -> RegionIndex:
        """The pieces of a value so far, by their regions."""
        found = self.pieces[name]
        if name not in self.indexes or self.indexes[name][0] != len(found):
            self.indexes[name] = len(found), RegionIndex([region for region, _ in found])
        return self.indexes[name][1]


def versioned_pieces(
    plan: PassPlan, roles: Sequence[Role] = (Role.WEIGHT, Role.STATE)
) -> dict[str, tuple[Region, ...]]:
    """Return the stored pieces of weights and state (or other ``roles``), as the updating layers make them.

    What no layer updates is cut by the grid of its largest reader: a unit that fits has room for each piece.
    """
    factored, graph = plan.factored, plan.factored.graph
    versioned = {factored.stored(value.name) for value in graph.of_role(*roles)}
    made: dict[str, dict[Region, None]] = {}
    largest: dict[str, Region] = {}
    for planned in plan.layers:
        for unit in planned.units:
            for name, region in unit.makes[: len(planned.layer.stores)]:
                made.setdefault(name, {})[region] = None
            for name, region in unit.reads:
                if name in versioned and region_size(region) > region_size(largest.get(name, ((0, 0),))):
                    largest[name] = region
    found: dict[str, tuple[Region, ...]] = {}
    for value in graph.of_role(*roles):
        stored = factored.stored(value.name)
        if stored not in factored.shapes:
            continue
        new, shape = graph.updates.get(value.name), factored.shapes[stored]
        regions = made.get(factored.stored(new)) if new else None
        tile = region_shape(largest.get(stored, whole(shape)))
        found[value.name] = tuple(sorted(regions)) if regions else grid_of(shape, tile)
    return found


def expand_pass(
    plan: PassPlan, pieces: Mapping[str, Sequence[Region]], absent: Collection[str] = ()
) -> TaskGraph:
    """All calls of one step. ``pieces`` says how weights and state are stored.

    Of these, ``absent`` are not there yet (sums of gradients, in the first pass of a step).
    """
    draft = _Draft(plan)
    inputs: list[TaskKey] = []
    sizes: dict[TaskKey, int] = {}
    for name, regions in pieces.items():
        if name in absent:
            continue
        for number, region in enumerate(regions):
            key = stored_key(name, number)
            inputs.append(key)
            value = plan.factored.graph.values.get(name)
            # A pass that makes no update has no optimizer state; it only hands it on.
            sizes[key] = region_size(region) * itemsize(value.dtype) if value is not None else 0
            draft.pieces.setdefault(name, []).append((region, key))
    for planned in plan.layers:
        _expand_layer(draft, planned)
    graph, stored = plan.factored.graph, plan.factored.stored
    outputs = [key for name in graph.updates for key in _stored(draft, name, pieces)]
    outputs += [key for name in graph.outputs for _, key in draft.pieces.get(stored(name), [])]
    replaced = _read_in_next_step(draft, pieces)
    input_uses = {key: tuple(draft.readers.pop(key, ())) for key in inputs}
    for number, call in enumerate(draft.calls):  # one by one: both kinds of all of them are large
        draft.calls[number] = _with_uses(call, draft.readers)
    return TaskGraph(
        calls=tuple(draft.calls),
        pieces={name: tuple(found) for name, found in draft.pieces.items()},
        inputs=tuple(inputs),
        outputs=tuple(dict.fromkeys(outputs)),
        input_uses=input_uses,
        input_bytes=sizes,
        replaced=replaced,
        hosts=plan.hosts,
    )


def _read_in_next_step(draft: _Draft, pieces: Mapping[str, Sequence[Region]]) -> dict[TaskKey, TaskKey]:
    """Return what replaces weights and state, to be read where these were, a step later."""
    replaced: dict[TaskKey, TaskKey] = {}
    factored = draft.plan.factored
    for name, update in factored.graph.updates.items():
        made = dict(draft.pieces[factored.stored(update)])
        for number, region in enumerate(pieces.get(name, ())):
            before = stored_key(name, number)
            readers = draft.readers.get(before, ())
            draft.readers[made[region]] += [draft.position + reader for reader in readers]
            replaced[before] = made[region]
    return replaced


def _expand_layer(draft: _Draft, planned: LayerPlan) -> None:
    layer, values = planned.layer, draft.plan.factored.graph.values
    cell_of = {view.value: cell for cell in layer.cells for view in cell.outputs}
    names = [*layer.stores, *layer.partials]
    combines = tuple(cell_of[name].combine if name in layer.partials else None for name in names)
    dtypes = tuple(values[name].dtype for name in names)
    buffer_bytes: dict[str, int] = {}  # by program: units with equal programs have equal arrays
    draft.found.clear()
    sums, alone = PartialSums(draft.plan, planned), (None,) * len(names)
    for number, unit in enumerate(planned.units):
        key = TaskKey(TaskKind.UNIT, layer.name, "", number)
        made = result_keys(key, names)
        arguments: list[TaskKey] = []
        scratch, program = planned.scratch[unit.program.key], unit.program.key
        reads = tuple(
            _read(draft, pair, arguments, place in scratch.overwrites)
            for place, pair in enumerate(unit.reads)
        )
        added_to: list[tuple[int, int] | None] = [None] * len(names)
        for index in range(len(layer.stores), len(names)):
            previous = sums.join(*unit.makes[index], unit.counts[index], made[index])
            if previous is not None:
                added_to[index] = (len(arguments), previous[1])
                arguments.append(previous[0])
        if program not in buffer_bytes:
            buffer_bytes[program] = unit_buffer_bytes(unit, layer, draft.plan.factored)
        draft.add(
            UnitCall(
                key=key,
                position=draft.position,
                unit=unit,
                arguments=tuple(arguments),
                reads=reads,
                partial_sums=tuple(added_to) if layer.partials else alone,
                combines=combines,
                dtypes=dtypes,
                buffer_bytes=buffer_bytes[program],
                scratch_bytes=scratch.scratch_bytes,
            )
        )
        for index, (name, region) in enumerate(unit.makes):
            if made[index] != key:
                draft.calls.append(PickCall(made[index], key, index))
            if name not in layer.partials or sums.alone(name, region):
                draft.pieces.setdefault(name, []).append((region, made[index]))
    for cell in {id(cell_of[name]): cell_of[name] for name in layer.partials}.values():
        for group in combined_together(cell, layer.partials):
            _combine(draft, layer.name, cell, group, sums)


def _stored(draft: _Draft, name: str, pieces: Mapping[str, Sequence[Region]]) -> list[TaskKey]:
    """Keys of the new pieces of a weight or state, cut anew where this plan cuts otherwise than it is stored.

    Several plans share what is stored (a full and a ragged batch, say), and each cuts as suits its own size.
    """
    factored = draft.plan.factored
    update = factored.stored(factored.graph.updates[name])
    made = dict(draft.pieces[update])
    missing = [region for region in pieces[name] if region not in made]
    anew: list[Piece] = []
    for number, region in enumerate(missing, len(made)):
        key = TaskKey(TaskKind.RECUT, draft.pieces[update][0][1].layer, update, number)
        _cut_anew(draft, update, region, key)
        anew.append((region, key))
    draft.pieces[update] += anew  # not before: each is cut from what layers make
    fresh = dict(draft.pieces[update])
    return [fresh[region] for region in pieces[name]]


def _cut_anew(draft: _Draft, name: str, region: Region, key: TaskKey) -> None:
    """A call that only puts parts of other pieces together: its program has no instructions."""
    arguments, parts, _ = _find(draft, name, region)
    dtype, shape = draft.plan.factored.graph.values[name].dtype, region_shape(region)
    read = Read(name, region, dtype, parts)
    program = make_program((0,), (shape,), (dtype,), (), (Operand(0, None, shape, None),))
    unit = Unit(len(draft.plan.layers), (key.number,), ((name, region),), program, ((name, region),), (1,))
    draft.add(
        UnitCall(
            key=key,
            position=draft.position,
            unit=unit,
            arguments=tuple(arguments),
            reads=(read,),
            partial_sums=(None,),
            combines=(None,),
            dtypes=(dtype,),
            buffer_bytes=2 * footprint(region_size(region) * itemsize(dtype)),
            scratch_bytes=0,
        )
    )


def _read(draft: _Draft, pair: tuple[str, Region], arguments: list[TaskKey], overwritten: bool) -> Read:
    """Return a read of a unit; ``arguments`` grows by the chunks that have a part of the region."""
    found, first = draft.found.get(pair), len(arguments)
    if found is None:
        found = draft.found[pair] = _find(draft, *pair)
    arguments += found.keys
    read = found.reads.get((first, overwritten))
    if read is None:
        factored, (name, region) = draft.plan.factored, pair
        dtype, order = factored.graph.values[name].dtype, factored.orders.get(name, ())
        read = Read(name, region, dtype, found.parts, first, order, overwritten)
        found.reads[first, overwritten] = read
    return read


def _find(draft: _Draft, name: str, region: Region) -> _Found:
    """Find the chunks that have a part of a region, and what to read of each."""
    if name not in draft.pieces and draft.plan.factored.graph.values[name].role in SOURCES:
        return _Found([], Parts(), {})
    pieces = draft.pieces[name]
    numbers, parts = draft.index(name).overlaps(region)
    return _Found([pieces[number][1] for number in numbers], draft.parts.setdefault(parts, parts), {})


def _combine(draft: _Draft, layer: str, cell: Cell, names: Sequence[str], sums: PartialSums) -> None:
    """One call for each piece of results of a partial node that several units share.

    Of many partial sums those of each worker of the plan are combined by a call of their own.
    """
    regions = [region for name, region in sums.groups if name == names[0]]
    first = len(regions)  # the number of the next call that combines some of the sums
    for number, region in enumerate(regions):
        if sums.alone(names[0], region):
            continue
        groups = [sums.ends(name, region) for name in names]
        ends: list[tuple[tuple[TaskKey, ...], int]] = []
        for members in zip(*groups, strict=True):
            found = [(tuple(key for key, _ in each), each[0][1]) for each in zip(*members, strict=True)]
            if len(groups[0]) > 1 and len(found) > 1:
                key = TaskKey(TaskKind.COMBINE, layer, names[0], first)
                first += 1
                elements = sum(count for _, count in found)
                found = [(_add_combine(draft, key, cell, names, region, found), elements)]
            ends += found
        key = TaskKey(TaskKind.COMBINE, layer, names[0], number)
        made = _add_combine(draft, key, cell, names, region, ends)
        for name, result in zip(names, made, strict=True):
            draft.pieces.setdefault(name, []).append((region, result))


def _add_combine(
    draft: _Draft,
    key: TaskKey,
    cell: Cell,
    names: Sequence[str],
    region: Region,
    ends: Sequence[tuple[tuple[TaskKey, ...], int]],
) -> tuple[TaskKey, ...]:
    """Add the call that combines ``ends``, each a partial result of every name and its elements.

    Returns the keys of its results.
    """
    dtypes = tuple(draft.plan.factored.graph.values[name].dtype for name in names)
    sizes = [region_size(region) * itemsize(dtype) for dtype in dtypes]
    assert cell.combine is not None
    draft.add(
        CombineCall(
            key=key,
            position=draft.position,
            combine=cell.combine,
            arguments=tuple(one for keys, _ in ends for one in keys),
            values=tuple(names),
            counts=tuple(count for _, count in ends),
            region=region,
            dtypes=dtypes,
            buffer_bytes=combine_buffer_bytes(sizes, cell.combine),
        )
    )
    made = result_keys(key, names)
    draft.calls += [PickCall(one, key, index) for index, one in enumerate(made) if one != key]
    return tuple(made)


def _with_uses(call: Call, readers: dict[TaskKey, list[int]]) -> Call:
    """The call, told when each of its results will be read; ``readers`` forget it."""
    if isinstance(call, PickCall):
        return call
    keys = result_keys(call.key, call.values)
    return replace(call, uses=tuple(tuple(sorted(readers.pop(key, ()))) for key in keys))
