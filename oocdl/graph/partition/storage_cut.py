"""Chooses the cheap values that are stored, so that few bytes move between layers.

Every layer recomputes its cheap values from what is stored. Storing one more
value costs its bytes once, and pays where several layers would otherwise each
read more than that to recompute it. A heavy output that is no longer read by
another layer is then not stored at all: a residual stream is stored as
``x + f(x)`` instead of ``f(x)``. This is the minimum cut that PyTorch's
partitioner takes between forward and backward, but by bytes and between all
layers, found by local search: values are tried in order until none pays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

from oocdl.graph.partition.layers import Group, Grouping
from oocdl.graph.partition.wiring import Wiring
from oocdl.graph.transforms.factorize import Cell

SWEEPS = 3
"""Sweeps of the local search; the models measured settle in two."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """Nodes that run together, as one task for each shard."""

    name: str
    index: int
    cells: tuple[Cell, ...]
    """The nodes that a shard computes, in order."""
    reads: tuple[str, ...]
    """The stored values and sources that it reads."""
    stores: tuple[str, ...]
    """Values of which each shard makes its piece; together the pieces are the value."""
    partials: tuple[str, ...]
    """Values of which each shard makes a partial result."""
    touched: frozenset[int]
    """Cut classes along which it may be cut."""
    members: tuple[str, ...] = ()
    """Names of the layers that were joined to it, in order; empty if it is one layer."""

    @cached_property
    def makes(self) -> frozenset[str]:
        """Values that it stores, or makes partial results of."""
        return frozenset((*self.stores, *self.partials))

    @cached_property
    def sinks(self) -> tuple[Cell, ...]:
        """The nodes that make these."""
        return tuple([c for c in self.cells if any([v.value in self.makes for v in c.outputs])])


def phase_of(layer: str) -> str:
    """Return the part of a pass that a layer belongs to, by its name."""
    return {"grad": "backward", "update": "update"}.get(layer.partition("/")[0], "forward")


class _Search:
    """The current choice of stored values, with what each layer then reads and computes.

    Of each layer it counts how many of the nodes that it computes read a value. So storing a value, or not,
    touches only what a layer needs for this value alone, and not all that it reads and computes.
    """

    def __init__(self, wiring: Wiring, grouping: Grouping) -> None:
        self.wiring, self.grouping = wiring, grouping
        self.costs, self.first_costs, self.maker = wiring.costs, wiring.first_costs, wiring.maker
        self.cheap: dict[str, tuple[str, ...]] = {}
        """Value that is not an anchor's -> what it is computed from."""
        self.inside: dict[str, int] = {}
        """Complete value that an anchor makes -> the layer of the anchor, which need not read it."""
        for name, sources in wiring.sources.items():
            if self.maker[name].node.name not in grouping.anchors:
                self.cheap[name] = sources
            elif name not in grouping.partial:
                self.inside[name] = grouping.layer_of[name]
        self.home: dict[str, int] = {}
        """Stored cheap value -> the layer that stores it."""
        self.finals = set(wiring.finals)
        self.counts: list[dict[str, int]] = [{} for _ in grouping.groups]
        """Layer -> {value -> number of the layer's anchors, results and computed values that need it}."""
        self.users: defaultdict[str, set[int]] = defaultdict(set)
        """Cheap value -> layers that compute it."""
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        self.moved_bytes = 0
        """Bytes that all layers read, and that are written for them."""
        self.walked: list[str] = []
        """Values that the change at hand looked at: all that it depends on, and all that it changes."""
        self.changed: dict[str, int] = {}
        """Value -> number of the last change that was made where it was looked at."""
        self.refused: dict[str, tuple[int, Sequence[str]]] = {}
        """Value -> how many changes there were when it was tried in vain, and what that looked at."""
        self.changes = 0

    def begin(self) -> None:
        """Store values of several readers where they are made: else every cone would reach the inputs."""
        for value in self.cheap:
            if self.wiring.uses.get(value, 0) > 1 and (ready := self.made_where_ready(value)) is not None:
                self.home[value] = ready
        for group in self.grouping.groups:
            self._need(group.index, [view.value for anchor in group.anchors for view in anchor.inputs])
            self._need(group.index, group.finals)
        for value, home in self.home.items():
            self._need(home, (value,))

    def _need(self, layer: int, values: Iterable[str]) -> None:
        """Something in a layer needs ``values``, which it reads, or computes from what these need."""
        walked, counts, moved = list(values), self.counts[layer], 0
        cheap, home, inside = self.cheap, self.home, self.inside
        for value in walked:  # which grows
            count = counts.get(value, 0)
            counts[value] = count + 1
            if count:
                continue
            sources = cheap.get(value)
            if sources is None:
                if inside.get(value) == layer:
                    continue
            elif home.get(value, layer) >= layer:
                self.users[value].add(layer)
                walked += sources
                continue
            readers = self.readers[value]
            moved += self.costs[value] if readers else self.first_costs[value]
            readers.add(layer)
        self.moved_bytes += moved
        self.walked += walked

    def _forgo(self, layer: int, values: Iterable[str]) -> None:
        """Something in a layer no longer needs ``values``: the reverse of ``_need``."""
        walked, counts, moved = list(values), self.counts[layer], 0
        cheap, inside, users = self.cheap, self.inside, self.users
        for value in walked:  # which grows
            counts[value] -= 1
            if counts[value]:
                continue
            del counts[value]
            sources = cheap.get(value)
            if sources is None:
                if inside.get(value) == layer:
                    continue
            elif layer in users[value]:
                users[value].discard(layer)
                walked += sources
                continue
            readers = self.readers[value]
            readers.discard(layer)
            moved += self.costs[value] if readers else self.first_costs[value]
        self.moved_bytes -= moved
        self.walked += walked

    def is_written(self, value: str) -> bool:
        """Whether some layer has to write the value."""
        return value in self.maker and (value in self.finals or bool(self.readers.get(value)))

    def improve(self, value: str) -> bool:
        """Store a value where it is best stored, or no longer if it is stored, if that lowers the traffic."""
        changes, walked = self.refused.get(value, (0, ()))
        if walked and max(map(self.changed.get, walked, repeat(0))) <= changes:
            return False  # as before: nothing that it depends on has changed
        old, before = self.home.get(value), self.moved_bytes
        home = self.best_home(value) if old is None and value not in self.finals else None
        self.walked = walked = [value]
        if home != old:
            self._move(value, home)
        if self.moved_bytes < before:
            self.changes += 1
            self.changed |= dict.fromkeys(walked, self.changes)
            return True
        self.walked = []
        if home != old:
            self._move(value, old)
        self.refused[value] = self.changes, walked
        return False

    def _move(self, value: str, home: int | None) -> None:
        """Store a value that is not stored in layer ``home``; None: store one that is stored no longer."""
        readers = self.readers[value]
        if home is not None:
            self.home[value] = home
            self._need(home, (value,))
            for index in [index for index in self.users[value] if index > home]:
                self.users[value].discard(index)
                self.moved_bytes += self.costs[value] if readers else self.first_costs[value]
                readers.add(index)
                self._forgo(index, self.cheap[value])
            return
        old = self.home.pop(value)
        for index in list(readers):
            readers.discard(index)
            self.moved_bytes -= self.costs[value] if readers else self.first_costs[value]
            self.users[value].add(index)
            self._need(index, self.cheap[value])
        self._forgo(old, (value,))

    def made_where_ready(self, value: str) -> int | None:
        """Return the layer that makes all that the value is computed from, if it can store the value."""
        maker, inside = self.grouping.ready[value]
        same = inside and self.grouping.groups[maker].touched == self._touched(value)
        return maker if same else None

    def best_home(self, value: str) -> int | None:
        """Return the first layer that can store the value for another: the one that makes it, else a user.

        None: there is none, or no other layer would read the value, so that storing it never pays.
        """
        users = self.users.get(value)
        if not users:
            return None
        home = self.made_where_ready(value)
        if home is None and len(users) > 1:
            ready, touched, groups = self.grouping.ready[value][0], self._touched(value), self.grouping.groups
            able = [index for index in users if index > ready and groups[index].touched == touched]
            home = min(able, default=None)
        return home if home is not None and len(users) > (home in users) else None

    def _touched(self, value: str) -> frozenset[int]:
        return self.grouping.touched[self.maker[value].node.name]


def choose_stored(wiring: Wiring, grouping: Grouping) -> tuple[Layer, ...]:
    """Choose the values that are stored, and finish the layers."""
    search = _Search(wiring, grouping)
    search.begin()
    cheap = [value for value in search.cheap if value not in wiring.wide]
    for _ in range(SWEEPS):
        if not sum([search.improve(value) for value in cheap]):
            break
    return _named_apart(_finish(search, group) for group in grouping.groups)


def _named_apart(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers with no name twice: tasks go by it, and a node may be called as the update of a value is."""
    named: dict[str, Layer] = {}
    for layer in layers:
        name = layer.name
        while name in named:
            name += "'"
        named[name] = layer if name == layer.name else replace(layer, name=name)
    return tuple(named.values())


def _finish(search: _Search, group: Group) -> Layer:
    index = group.index
    anchors = {cell.node.name for cell in group.anchors}
    partial, reads, inside = search.grouping.partial, [], {cell.node.name: cell for cell in group.anchors}
    for value in search.counts[index]:
        if index in search.readers.get(value, ()):
            reads.append(value)
        if index in search.users.get(value, ()):
            cell = search.maker[value]
            inside[cell.node.name] = cell
    cells = tuple(sorted(inside.values(), key=lambda cell: search.wiring.place[cell.node.name]))
    # A cell with several results makes all of them again, also one that is stored.
    computed_values = {view.value for cell in cells for view in cell.outputs}
    stores: list[str] = []
    partials: list[str] = []
    for cell in cells:
        sums = [view.value for view in cell.outputs if view.value in partial]
        if any(search.is_written(value) for value in sums):
            # Results of one node are combined with each other, also one that nothing reads.
            partials += sums
        for view in cell.outputs:
            if view.value in partial or not search.is_written(view.value):
                continue
            if (
                cell.node.name in anchors
                or search.home.get(view.value) == index
                or search.grouping.layer_of.get(view.value) == index
            ):
                stores.append(view.value)
    title = next((c.node.name for c in group.anchors if c.node.name in search.wiring.heavy), None)
    title = title or (group.anchors[0].node.name if group.anchors else f"update/{group.finals[0]}")
    return Layer(
        name=title,
        index=index,
        cells=cells,
        reads=tuple(sorted(set(reads) - computed_values)),
        stores=tuple(stores),
        partials=tuple(partials),
        touched=group.touched,
    )
