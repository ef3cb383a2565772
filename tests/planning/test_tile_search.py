"""The tile search, directly: units fit, are as few as can be, and keep what was asked for."""

from __future__ import annotations

import pytest

from oocdl.errors import BudgetError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.planning.pass_plan import PassPlan, estimate_pass, plan_pass
from oocdl.planning.tile_search import MIN_SLAB_POSITIONS, Layering, Limits, TileSearch, unit_buffer_bytes

CONV = {"strides": (1, 1, 1), "pads": (1,) * 6, "dilations": (1, 1, 1)}


def volumes() -> Layering:
    """Two convolutions of two volumes, the second after a norm over all positions."""
    build = Builder(RULES)
    x = build.value("x", (2, 4, 22, 20, 16), "float32", Role.INPUT)
    for number in range(2):
        weight = build.value(f"w{number}", (4, 4, 3, 3, 3), "float32", Role.WEIGHT)
        x = build("Conv", x, weight, **CONV)
        total = build("ReduceSum", x, axes=(2, 3, 4), keepdims=1)
        x = build("Relu", build("Sub", x, total))
    build.outputs = [x]
    return Layering(factorize(build.graph(), RULES), RULES)


def product(rows: int, inner: int, columns: int) -> Layering:
    """One product of a batch and a matrix."""
    build = Builder(RULES)
    x = build.value("x", (rows, inner), "float32", Role.INPUT)
    weight = build.value("w", (inner, columns), "float32", Role.WEIGHT)
    build.outputs = [build("Einsum", x, weight, equation="na,ab->nb")]
    return Layering(factorize(build.graph(), RULES), RULES)


def pieces(plan: PassPlan, kind: str) -> list[int]:
    """Into how many pieces each layer is cut along the classes of a name, where it can be."""
    named = [cut for cut, name in plan.classes.names.items() if name.startswith(kind)]
    return [planned.grid[cut] for planned in plan.layers for cut in named if cut in planned.grid]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kib", [2048, 500, 150])
def test_every_unit_fits(kib: int, threads: int) -> None:
    layering = volumes()
    plan = plan_pass(layering, Limits(kib << 10, threads))
    for planned in plan.layers:
        for unit in planned.units:
            arrays = unit_buffer_bytes(unit, planned.layer, layering.factored)
            assert arrays + layering.scratch(unit.program).scratch_bytes <= planned.peak_bytes <= kib << 10


@pytest.mark.parametrize("kib", [1500, 700, 300, 150])
def test_units_are_the_fewest_and_largest_that_fit(kib: int) -> None:
    """Each number of pieces up to that of the plan is tried: all have larger units than may be."""
    layering = product(1021, 64, 96)
    rows = layering.classes.of_axes["x"][0]
    [layer] = layering.layers([rows])
    search = TileSearch(layering, Limits(kib << 10), {})
    cutter, peak = search.fit_every_unit(search.fit_samples(layer)[0])
    for count in range(1, cutter.count):
        assert sum(layering.largest_unit(layering.cutter(layer, {rows: count}))) > kib << 10, count
    assert peak == sum(layering.largest_unit(cutter)) <= kib << 10


def test_requested_cuts_are_kept() -> None:
    """They are minima: all layers that have the axis are cut so, and finer where that does not fit."""
    for kib in (1 << 20, 150):
        plan = plan_pass(volumes(), Limits(kib << 10, 2, {"batch": 2, "space": (3, 2), "channels": 2}))
        for kind, least in {"batch": 2, "space0": 3, "space1": 2, "channels": 2}.items():
            found = pieces(plan, kind)
            assert found and min(found) >= least, kind
        if kib == 1 << 20:
            assert max(pieces(plan, "space0")) == 3


def test_heavy_layers_have_a_unit_for_each_thread() -> None:
    for threads in (1, 2, 5):
        plan = plan_pass(product(2048, 2048, 1024), Limits(1 << 40, threads))
        assert [len(planned.units) for planned in plan.layers] == [threads]
    light = plan_pass(product(16, 16, 16), Limits(1 << 40, 5))
    assert light.tasks == 1


def test_slabs_are_not_thin_while_another_axis_is_whole() -> None:
    layering = volumes()
    _, _, depth, height, *_ = layering.classes.of_axes["x"]
    layer = next(one for one in layering.layers([depth, height]) if {depth, height} <= one.touched)
    search = TileSearch(layering, Limits(1), {})
    order = [depth, height]
    cutter = layering.cutter(layer, dict.fromkeys(layer.touched, 1))
    thick = 22 // MIN_SLAB_POSITIONS
    grids = []
    while (finer := search.finer(cutter, 1.5, order)) is not None:
        cutter = finer
        grids.append((cutter.grid[depth], cutter.grid[height]))
    assert grids[-1] == (22, 20)
    assert all(
        height_pieces >= 20 // MIN_SLAB_POSITIONS
        for depth_pieces, height_pieces in grids
        if depth_pieces > thick
    )


def test_a_layer_of_weights_is_not_cut_along_its_batch() -> None:
    """Each piece of the batch would read all of the weights again."""
    for rows, inner, columns, batch_first in ((4096, 64, 64, True), (8, 2048, 2048, False)):
        layering = product(rows, inner, columns)
        [cut] = layering.best_cut(2)
        assert (cut == layering.classes.of_axes["x"][0]) == batch_first


def test_an_estimate_is_that_of_the_plan() -> None:
    layering, limits = volumes(), Limits(500 << 10, 2)
    plan, size = plan_pass(layering, limits), estimate_pass(layering, limits)
    assert size.counts == plan.counts and sum(size.counts) == plan.tasks
    assert size.peak_unit_bytes <= plan.peak_unit_bytes <= limits.unit_bytes


def test_refusals_name_the_layer() -> None:
    layering = volumes()
    names = {layer.name for layer in layering.layers([])}
    for plan in (plan_pass, estimate_pass):
        with pytest.raises(BudgetError, match=r"no cut of layer '(.*)' fits: one unit needs .* KiB") as error:
            plan(layering, Limits(1000))
        assert any(f"'{name}'" in str(error.value) for name in names)
    with pytest.raises(BudgetError, match="cut into more than 3 units"):
        plan_pass(layering, Limits(150 << 10, most_units=3))
