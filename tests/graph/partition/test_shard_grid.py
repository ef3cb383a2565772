"""Units that are put together from a few are those that are derived one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.partition import shard_grid
from oocdl.graph.transforms.factorize import factorize
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
