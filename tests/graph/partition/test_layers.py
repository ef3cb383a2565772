"""Layers and what they store: each test says the wish and draws the graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.partition.cut_classes import find_classes
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.planning.pass_plan import PassPlan, plan_pass
from oocdl.planning.tile_search import MIN_PARALLEL_SECONDS, Layering, Limits, TileSearch
from oocdl.presets.unets import write_unet3d
from tests.kit import models
from tests.kit.graphs import training

CONV = {"strides": (1, 1, 1), "pads": (1,) * 6, "dilations": (1, 1, 1)}


def planned(graph: Graph, unit_bytes: int, threads: int = 2) -> PassPlan:
    return plan_pass(Layering(factorize(graph, RULES), RULES), Limits(unit_bytes, threads))


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Layering:
    """The base-16 U-Net at 128 cubed."""
    path = tmp_path_factory.mktemp("unet") / "unet.onnx"
    write_unet3d(path, classes=4, base=16, depth=4)
    graph = training(path, {"image": (1, 1, 128, 128, 128)}, (1, 128, 128, 128))
    return Layering(factorize(graph, RULES), RULES)


@pytest.fixture(scope="module")
def plan(unet: Layering) -> PassPlan:
    """Its plan in units of 100 MB."""
    return plan_pass(unet, Limits(100_000_000, 2))


def test_unet_moves_six_gigabytes(unet: Layering) -> None:
    """4.9 V read and 2.0 V written, V = 0.9 GB: 6.3 GB, worked out by hand in the design."""
    plan = plan_pass(unet, Limits(140_000_000, 2))
    total = plan.read_bytes + plan.written_bytes
    assert abs(total / 6.3e9 - 1) < 0.10


def test_a_block_stores_its_convolution_only(plan: PassPlan) -> None:
    """conv -> norm -> relu -> conv: the norm's and relu's results are recomputed, not stored."""
    forward = next(p for p in plan.layers if p.layer.name == "down1.conv2")
    operators = [cell.node.op for cell in forward.layer.cells]
    assert forward.layer.stores == ("down1.conv2/add",)
    assert "Normalize" in operators and "Conv" in operators
    assert len(forward.layer.partials) == 2  # mean and variance


def test_both_gradients_of_a_convolution_share_a_layer(plan: PassPlan) -> None:
    for planned_layer in plan.layers:
        operators = [cell.node.op for cell in planned_layer.layer.cells]
        if "ConvWeightGrad" in operators and planned_layer.layer.name != "grad/down1.conv1.weight":
            assert "ConvTranspose" in operators or "Conv" in operators


def evened(layering: Layering, name: str, pieces: int, threads: int) -> int:
    """Into how many units a layer is cut that would fit in so many."""
    depth = next(cut for cut, kind in layering.classes.names.items() if kind == "space0")
    layer = next(layer for layer in layering.layers([depth]) if layer.name == name)
    search = TileSearch(layering, Limits(1 << 30, threads), {})
    cutter, peak = search.fit_every_unit(layering.cutter(layer, {depth: pieces}))
    assert peak == sum(layering.largest_unit(cutter)) <= 1 << 30
    return cutter.count


def test_a_large_layer_has_as_many_units_as_threads_end_with(unet: Layering) -> None:
    """Three units take two threads as long as four: a fourth is made, so that all are smaller."""
    for pieces, threads, units in ((3, 2, 4), (5, 3, 6), (3, 1, 3), (4, 2, 4), (9, 2, 9)):
        assert evened(unet, "down1.conv2", pieces, threads) == units, (pieces, threads)


def test_a_small_layer_is_not_cut_for_threads(unet: Layering) -> None:
    depth = next(cut for cut, kind in unet.classes.names.items() if kind == "space0")
    small = next(
        layer for layer in unet.layers([depth])
        if depth in layer.touched
        and 3 * unet.middle_unit(unet.cutter(layer, {depth: 3}))[0] < MIN_PARALLEL_SECONDS
    )  # fmt: skip
    assert evened(unet, small.name, 3, 2) == 3


def trained(folder: Path, model: torch.nn.Module, x: torch.Tensor, *labels: int) -> Graph:
    """The graph of a step of a module of PyTorch, for such an input and labels of a shape."""
    path = models.export(model, (x,), folder / "model.onnx", dynamic=(0,))
    return training(path, {"x": tuple(x.shape)}, labels)


def gpt(folder: Path, layers: int) -> Graph:
    model = models.GPT(100, 64, 256, 4, layers)
    return trained(folder, model, torch.zeros(8, 64, dtype=torch.long), 8, 64)


def test_traffic_a_layer_does_not_grow_with_depth(tmp_path: Path) -> None:
    """A residual stream is stored as x + f(x); else layer 24 would read 24 blocks."""
    per_block = []
    for blocks in (3, 12):
        plan = planned(gpt(tmp_path, blocks), 1 << 30)
        per_block.append((plan.read_bytes + plan.written_bytes) / blocks)
    assert max(per_block) / min(per_block) < 1.10


@pytest.mark.slow
def test_resnet_traffic_does_not_grow_with_depth(tmp_path: Path) -> None:
    moved = []
    for make in (models.resnet50, models.resnet152):
        plan = planned(trained(tmp_path, make(10), torch.zeros(4, 3, 64, 64), 4), 1 << 30)
        moved.append((plan.read_bytes + plan.written_bytes) / len(plan.layers))
    assert moved[1] < moved[0] * 1.05


def test_logits_under_cross_entropy_are_not_stored(tmp_path: Path) -> None:
    """head product -> log-softmax -> its gradient -> both products of the gradient: one layer."""
    plan = planned(gpt(tmp_path, 1), 1 << 30)
    values = plan.factored.graph.values
    stored = {name for p in plan.layers for name in p.layer.stores}
    assert not [name for name in stored if values[name].shape == (8, 64, 100)]


def test_group_norm_written_as_reshape_is_cut_in_space(tmp_path: Path) -> None:
    """Reshape to groups and back only renames factors, so depth stays an axis of its own."""
    model = models.UNet3d(1, 2, 4, norm="group")
    factored = factorize(trained(tmp_path, model, torch.zeros(1, 1, 16, 16, 16), 1, 16, 16, 16), RULES)
    assert not [cell for cell in factored.cells if cell.node.op == "Reshape"]
    assert "space0" in find_classes(factored).names.values()


def test_a_reshape_across_a_window_stays() -> None:
    """Depth of a convolution cannot be split into patches: the Reshape stays a node."""
    build = Builder(RULES)
    x = build.value("x", (1, 2, 8, 4, 4), "float32", Role.INPUT)
    w = build.value("w", (2, 2, 3, 3, 3), "float32", Role.WEIGHT)
    y = build("Conv", x, w, **CONV)
    build.outputs = [build("Reshape", y, shape=(1, 2, 4, 2, 16))]
    cells = factorize(build.graph(), RULES).cells
    assert [cell.node.op for cell in cells] == ["Conv", "Reshape"]


def test_a_product_of_few_rows_is_a_layer_of_its_own(tmp_path: Path) -> None:
    """Its FLOPs are few, but recomputed it would read its weights again, and all of them in one unit."""
    model = models.MLP((2048, 2048, 2048, 2048))
    plan = planned(trained(tmp_path, model, torch.zeros(4, 2048), 4), 24 << 20)
    weights = 3 * 2048 * 2048 * 4
    assert plan.peak_unit_bytes <= 24 << 20 < weights
    assert plan.read_bytes < 3.2 * weights  # forward, backward, update


def test_convolutions_of_groups_run_once() -> None:
    """Each has few operations for a byte, but slow ones: a chain of them is not recomputed to read less."""
    build = Builder(RULES)
    x = build.value("x", (2, 8, 1, 32, 32), "float32", Role.INPUT)
    attrs = {"strides": (1, 1), "dilations": (1, 1), "pads": (1,) * 4, "grouped": True}
    for number in range(3):
        w = build.value(f"w{number}", (8, 1, 1, 3, 3), "float32", Role.WEIGHT)
        x = build("Relu", build("Conv", x, w, **attrs))
    total = build("ReduceSum", build("Mul", x, x), axes=(0, 1, 2, 3, 4))
    loss = build("Reshape", total, shape=())
    build.outputs = [loss, *differentiate(build, loss, ["w0", "w1", "w2"]).values()]
    plan = planned(build.graph(), 1 << 20)
    runs = Counter(cell.node.name for found in plan.layers for cell in found.layer.cells)
    made = {cell.node.name for cell in plan.factored.cells if cell.node.op in ("Conv", "ConvTranspose")}
    assert max(runs[name] for name in made) == 1
