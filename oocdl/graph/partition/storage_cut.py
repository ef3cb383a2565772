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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oocdl.graph.partition.cut_classes import Classes
from oocdl.graph.partition.layers import Group, Grouping, final_values
from oocdl.graph.transforms.factorize import Cell, Factored

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


class _Search:
    """The current choice of stored values, with what each layer then reads and computes."""

    def __init__(self, factored: Factored, grouping: Grouping, classes: Classes, cuts: Sequence[int]) -> None:
        self.factored, self.grouping = factored, grouping
        self.classes, self.cuts = classes, cuts
        self.nbytes = {name: value.nbytes for name, value in factored.graph.values.items()}
        self.maker = {view.value: cell for cell in factored.cells for view in cell.outputs}
        self.anchored = {name for name, cell in self.maker.items() if self.is_anchor(cell)}
        self.cheap = {
            name: tuple(dict.fromkeys(view.value for view in cell.inputs))
            for name, cell in self.maker.items()
            if name not in self.anchored
        }
        """Value that is not an anchor's -> what it is computed from."""
        self.home: dict[str, int] = {}
        """Stored cheap value -> the layer that stores it."""
        self.finals = set(final_values(factored))
        self.side: dict[int, set[str]] = {g.index: set() for g in grouping.groups}
        self.reads: dict[int, set[str]] = {}
        self.computes: dict[int, set[str]] = {}
        self.users: dict[str, set[int]] = {}
        """Cheap value -> layers that compute it."""
        self.readers: dict[str, set[int]] = {}
        for found in grouping.groups:
            self._set(found.index, *self.traverse(found))

    def is_anchor(self, cell: Cell) -> bool:
        partial = self.grouping.partial
        return cell.node.name in self.grouping.heavy or any(view.value in partial for view in cell.outputs)

    def traverse(self, group: Group) -> tuple[set[str], set[str]]:
        """Return the values that a layer reads, and the cheap values that it computes."""
        reads: set[str] = set()
        computed: set[str] = set()
        pending = [view.value for anchor in group.anchors for view in anchor.inputs]
        pending += [*group.finals, *self.side[group.index]]
        cheap, home, index = self.cheap, self.home, group.index
        layer_of, partial = self.grouping.layer_of, self.grouping.partial
        while (
            pending
        ):  # most of what planning a deep network takes: thousands of times, over hundreds of values
            value = pending.pop()
            if value in computed or value in reads:
                continue
            sources = cheap.get(value)
            if sources is None:
                inside = value in self.anchored and layer_of[value] == index
                if not inside or value in partial:
                    reads.add(value)
            elif value in home and home[value] < index:
                reads.add(value)
            else:
                computed.add(value)
                pending += sources
        return reads, computed

    def _set(self, index: int, reads: set[str], computed: set[str]) -> None:
        for table, before, after in (
            (self.readers, self.reads.get(index, set()), reads),
            (self.users, self.computes.get(index, set()), computed),
        ):
            for value in before - after:
                table[value].discard(index)
            for value in after - before:
                table.setdefault(value, set()).add(index)
        self.reads[index], self.computes[index] = reads, computed

    def cost(self, layers: Iterable[int], extra: Iterable[str]) -> int:
        """Return the bytes that ``layers`` read, plus those written for what they read and for ``extra``."""
        layers = list(layers)
        read = sum(self.nbytes[value] for index in layers for value in self.reads[index])
        touched = {value for index in layers for value in self.reads[index]} | set(extra)
        return read + sum(self.nbytes[value] for value in touched if self.is_written(value))

    def is_written(self, value: str) -> bool:
        """Whether some layer has to write the value."""
        return value in self.maker and (value in self.finals or bool(self.readers.get(value)))

    def try_change(self, value: str, home: int | None) -> bool:
        """Store ``value`` in layer ``home`` (None: nowhere) if that lowers the traffic."""
        old = self.home.get(value)
        affected = set(self.users.get(value, ())) | set(self.readers.get(value, ()))
        affected |= {index for index in (old, home) if index is not None}
        before_state = {index: (self.reads[index], self.computes[index]) for index in affected}
        watch = {v for index in affected for v in self.reads[index]} | {value}
        before = self.cost(affected, watch)
        self._move(value, old, home)
        for index in affected:
            self._set(index, *self.traverse(self.grouping.groups[index]))
        watch_after = watch | {v for index in affected for v in self.reads[index]}
        gained = before - self.cost(affected, watch_after)
        new = watch_after - watch
        gained += 0 if not new else self._written_before(new, before_state)
        if gained > 0:
            return True
        self._move(value, home, old)
        for index, (reads, computed) in before_state.items():
            self._set(index, reads, computed)
        return False

    def _written_before(self, values: set[str], state: Mapping[int, tuple[set[str], set[str]]]) -> int:
        """Return the bytes of those ``values`` that were written anyway, for readers outside the change."""
        total = 0
        for value in values:
            others = self.readers.get(value, set()) - set(state)
            if value in self.maker and (value in self.finals or others):
                total += self.nbytes[value]
        return total

    def _move(self, value: str, old: int | None, new: int | None) -> None:
        if old is not None:
            self.side[old].discard(value)
            del self.home[value]
        if new is not None:
            self.side[new].add(value)
            self.home[value] = new

    def best_home(self, value: str) -> int | None:
        """Return the first layer that can store the value: the one that makes it, else its first user."""
        made, inside = self.grouping.ready.get(value, (-1, False))
        touched = self.classes.touched(self.maker[value], self.cuts)
        groups = self.grouping.groups
        if inside and groups[made].touched == touched:
            return made
        users = (index for index in self.users.get(value, ()) if index > made)
        return min((index for index in users if groups[index].touched == touched), default=None)


def _seed(search: _Search, users: Mapping[str, int]) -> None:
    """Store values of several readers where they are made, to start: else every cone reaches the inputs."""
    for cell in search.factored.cells:
        if search.is_anchor(cell):
            continue
        for view in cell.outputs:
            made, inside = search.grouping.ready[view.value]
            if inside and users.get(view.value, 0) > 1 and search.best_home(view.value) == made:
                search._move(view.value, search.home.get(view.value), made)
    for found in search.grouping.groups:
        search._set(found.index, *search.traverse(found))


def choose_stored(
    factored: Factored, grouping: Grouping, classes: Classes, cuts: Sequence[int]
) -> tuple[Layer, ...]:
    """Choose the values that are stored, and finish the layers."""
    search = _Search(factored, grouping, classes, cuts)
    uses: dict[str, int] = {}
    for cell in factored.cells:
        for view in cell.inputs:
            uses[view.value] = uses.get(view.value, 0) + 1
    wide = _widened(factored)
    for value, narrow in wide.items():
        uses[narrow] += uses.pop(value, 0)
    _seed(search, uses)
    cheap = [v.value for c in factored.cells if not search.is_anchor(c) for v in c.outputs]
    cheap = [value for value in cheap if value not in wide]
    for _ in range(SWEEPS):
        changed = False
        for value in cheap:
            if value in search.home:
                changed |= search.try_change(value, None)
            else:
                home = search.best_home(value)
                if home is not None and value not in search.finals and _may_pay(search, value, home):
                    changed |= search.try_change(value, home)
        if not changed:
            break
    return _named_apart(_finish(search, found) for found in grouping.groups)


def _named_apart(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers with no name twice: tasks go by it, and a node may be called as the update of a value is."""
    found: dict[str, Layer] = {}
    for layer in layers:
        name = layer.name
        while name in found:
            name += "'"
        found[name] = replace(layer, name=name)
    return tuple(found.values())


def _widened(factored: Factored) -> dict[str, str]:
    """Return value -> the narrower value that it is a Cast of, which always costs less to read."""
    values, found = factored.graph.values, {}
    for cell in factored.cells:
        if cell.node.op == "Cast":
            source, made = cell.inputs[0].value, cell.outputs[0].value
            if values[source].nbytes < values[made].nbytes:
                found[made] = source
    return found


def _may_pay(search: _Search, value: str, home: int) -> bool:
    """Whether another layer would read the value if it were stored; else storing it never pays."""
    return bool(search.users.get(value, set()) - {home})


def _finish(search: _Search, group: Group) -> Layer:
    reads, computed = search.reads[group.index], search.computes[group.index]
    anchors = {cell.node.name for cell in group.anchors}
    partial = search.grouping.partial
    cells = tuple(
        cell
        for cell in search.factored.cells
        if cell.node.name in anchors
        or (not search.is_anchor(cell) and any(view.value in computed for view in cell.outputs))
    )
    # A cell with several results makes all of them again, also one that is stored.
    made = {view.value for cell in cells for view in cell.outputs}
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
                or search.home.get(view.value) == group.index
                or search.grouping.layer_of.get(view.value) == group.index
            ):
                stores.append(view.value)
    title = next((c.node.name for c in group.anchors if c.node.name in search.grouping.heavy), None)
    title = title or (group.anchors[0].node.name if group.anchors else f"update/{group.finals[0]}")
    return Layer(
        name=title,
        index=group.index,
        cells=cells,
        reads=tuple(sorted(reads - made)),
        stores=tuple(stores),
        partials=tuple(partials),
        touched=group.touched,
    )
