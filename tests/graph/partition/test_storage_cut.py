"""The storage cut, on graphs drawn by hand, and units that are put together from a few.

No other choice of stored values would move fewer bytes. Every choice is tried: each cheap value is stored
nowhere, or in any layer that can make it. Units that are put together are those that are derived one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.partition import shard_grid
from oocdl.graph.partition.cut_classes import find_classes
from oocdl.graph.partition.layers import Grouping, group, heavy_nodes
from oocdl.graph.partition.storage_cut import choose_stored
from oocdl.graph.partition.wiring import DATASET_READ_COST, Wiring, final_values
from oocdl.graph.transforms.factorize import Factored, factorize
from oocdl.ops import RULES
from oocdl.planning.tile_search import Layering
from oocdl.presets.unets import write_unet3d
from tests.kit.graphs import training


def unet(folder: Path) -> Graph:
    """Pools, skips that are put beside, transposed convolutions, on extents that cuts do not divide."""
    path = write_unet3d(folder / "unet.onnx", classes=3, base=4, depth=2)
    return training(path, {"image": (2, 1, 44, 20, 12)}, (2, 44, 20, 12))


def chain(folder: Path) -> Graph:
    """Windows of stride 2, dilation and no padding, resampling, a norm over all positions."""
    build = Builder(RULES)
    x = build.value("x", (3, 4, 61, 24, 10), "float32", Role.INPUT)
    wide = build.value("w0", (4, 4, 3, 3, 3), "float32", Role.WEIGHT)
    small = build.value("w1", (4, 4, 2, 1, 1), "float32", Role.WEIGHT)
    x = build("Conv", x, wide, strides=(2, 1, 1), pads=(0, 2, 1, 1, 2, 1), dilations=(1, 2, 1))
    total = build("ReduceSum", x, axes=(2, 3, 4), keepdims=1)
    x = build("Relu", build("Sub", x, total))
    x = build("Conv", x, small, strides=(1, 1, 1), pads=(1, 0, 0, 0, 0, 0), dilations=(1, 1, 1))
    build.outputs = [x]
    return build.graph()


@pytest.mark.parametrize("make", [unet, chain])
@pytest.mark.parametrize("counts", [(1, 22, 1, 1), (2, 9, 5, 1), (1, 7, 4, 3), (2, 1, 2, 12)])
def test_units_are_equal(
    make: object, counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_grid, "MIN_SHARDS", 4)
    layering = Layering(factorize(make(tmp_path), RULES), RULES)  # type: ignore[operator]
    wanted = dict(zip(("batch", "space0", "space1", "space2"), counts, strict=True))
    grid = {cut: wanted.get(name, 1) for cut, name in layering.classes.names.items()}
    put_together = 0
    for layer in layering.layers([cut for cut, count in grid.items() if count > 1]):
        quick, slow = layering.cutter(layer, grid), layering.cutter(layer, grid)
        units = quick.units()
        put_together += len(units) > len(quick.known)
        for unit in units:
            full = slow._unit(unit.shard)
            assert (unit.reads, unit.makes, unit.counts) == (full.reads, full.makes, full.counts)
            assert unit.program.key == full.program.key
        keys = {unit.program.key for unit in units}
        assert {unit.program.key for unit in quick.distinct_units()} >= keys
    assert put_together


SIZE = 256
"""Edge of all matrices: their products are heavy."""


class Drawing:
    """A graph of matrices that is being drawn."""

    def __init__(self) -> None:
        self.build = Builder(RULES)
        self.weights = 0

    def input(self, name: str = "x") -> str:
        return self.build.value(name, (SIZE, SIZE), "float32", Role.INPUT)

    def heavy(self, x: str) -> str:
        """The product of ``x`` and a weight of its own."""
        self.weights += 1
        weight = self.build.value(f"w{self.weights}", (SIZE, SIZE), "float32", Role.WEIGHT)
        return self.build("Einsum", x, weight, equation="na,ab->nb")

    def cheap(self, *values: str) -> str:
        """Something elementwise of one or two values."""
        return self.build("Relu" if len(values) == 1 else "Add", *values)

    def total(self, x: str) -> str:
        """The sums of the rows of ``x``: small, of much that is read."""
        return self.build("ReduceSum", x, axes=(1,), keepdims=1)

    def factored(self, *outputs: str) -> Factored:
        self.build.outputs = list(outputs)
        return factorize(self.build.graph(), RULES)


def forward_and_backward(d: Drawing) -> Factored:
    """Products are stored, and activations recomputed from them on the way back."""
    first = d.heavy(d.input())
    second = d.heavy(d.cheap(first))
    third = d.heavy(d.cheap(second))
    back = d.heavy(d.cheap(d.heavy(third), d.cheap(second)))
    return d.factored(d.heavy(d.cheap(back, d.cheap(first))))


def fan_out(d: Drawing) -> Factored:
    """What two layers read, made of two products, is stored instead of these."""
    shared = d.cheap(d.heavy(d.input("x")), d.heavy(d.input("y")))
    second = d.heavy(d.cheap(shared))
    back = d.heavy(d.cheap(d.heavy(d.heavy(second)), d.cheap(second)))
    return d.factored(d.heavy(d.cheap(back, shared)))


def residual_stream(d: Drawing) -> Factored:
    """``x + f(x)`` is stored: the last block would else read the results of all blocks before."""
    stream = d.heavy(d.input())
    for _ in range(3):
        stream = d.cheap(stream, d.heavy(d.cheap(stream)))
    return d.factored(d.heavy(stream))


def small_of_large(d: Drawing) -> Factored:
    """Sums of rows are stored: whoever needs them would read all of the rows again."""
    first = d.heavy(d.input())
    sums = d.total(first)
    found = d.heavy(d.input("y"))
    for _ in range(2):
        found = d.heavy(d.cheap(found, sums))
    return d.factored(found)


def of_an_input(d: Drawing) -> Factored:
    """What is made of an input that several read is stored: the dataset would be decoded for each."""
    x = d.cheap(d.input())
    return d.factored(d.heavy(x), d.heavy(d.cheap(x)), d.heavy(d.cheap(d.cheap(x))))


def kept_result(d: Drawing) -> Factored:
    """A cheap value that the graph delivers is written in any case: others read it."""
    first = d.cheap(d.heavy(d.input("x")), d.heavy(d.input("y")))
    return d.factored(first, d.heavy(d.cheap(first)))


DRAWINGS: dict[Callable[[Drawing], Factored], bool] = {
    forward_and_backward: False,
    fan_out: True,
    residual_stream: True,
    small_of_large: True,
    of_an_input: True,
    kept_result: False,
}
"""Whether it pays to store more than heavy results, and what has to be."""


def costs(factored: Factored) -> dict[str, int]:
    """Bytes that could move while a value is read."""
    return {
        name: value.nbytes * (DATASET_READ_COST if value.role is Role.INPUT else 1)
        for name, value in factored.graph.values.items()
    }


def traffic(factored: Factored, grouping: Grouping, home: Mapping[str, int]) -> int:
    """The costs of all that layers read and write where the values in ``home`` are stored there."""
    nbytes = costs(factored)
    inputs = {view.value: [v.value for v in cell.inputs] for cell in factored.cells for view in cell.outputs}
    anchors = {
        view.value: found.index
        for found in grouping.groups
        for cell in found.anchors
        for view in cell.outputs
    }
    partial = {v.value for cell in factored.cells if cell.node.name in grouping.partial for v in cell.outputs}
    moved, written = 0, {name for name in final_values(factored) if name in inputs}
    for found in grouping.groups:
        reads: set[str] = set()
        pending = [view.value for cell in found.anchors for view in cell.inputs]
        pending += [*found.finals, *(name for name, layer in home.items() if layer == found.index)]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            elsewhere = name in anchors and (anchors[name] != found.index or name in partial)
            if name not in inputs or elsewhere or home.get(name, found.index) < found.index:
                reads.add(name)
            elif name not in anchors:
                pending.extend(inputs[name])
        moved += sum(nbytes[name] for name in reads)
        written |= reads & inputs.keys()
    return moved + sum(nbytes[name] for name in written)


def choices(factored: Factored, grouping: Grouping) -> Iterator[dict[str, int]]:
    """Every way to store cheap values, each in one of the layers that can make it."""
    heavy = {v.value for found in grouping.groups for cell in found.anchors for v in cell.outputs}
    cheap = [v.value for cell in factored.cells for v in cell.outputs if v.value not in heavy]
    options: list[list[int | None]] = []
    for name in cheap:
        layer, inside = grouping.ready[name]
        options.append([None, *range(max(layer + (not inside), 0), len(grouping.groups))])
    for homes in product(*options):
        yield {name: home for name, home in zip(cheap, homes, strict=True) if home is not None}


@pytest.mark.parametrize("draw", DRAWINGS, ids=lambda draw: draw.__name__)
def test_no_other_choice_moves_fewer_bytes(draw: Callable[[Drawing], Factored]) -> None:
    factored = draw(Drawing())
    classes = find_classes(factored)
    wiring = Wiring(factored, heavy_nodes(factored, RULES))
    grouping = group(wiring, classes, ())
    layers = choose_stored(wiring, grouping)
    nbytes = costs(factored)
    moved = sum(nbytes[name] for layer in layers for name in (*layer.reads, *layer.stores))
    assert moved == min(traffic(factored, grouping, home) for home in choices(factored, grouping))
    assert (moved < traffic(factored, grouping, {})) == DRAWINGS[draw]
