"""Small layers are joined to few units, which fit; what may run beside them stays apart."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from oocdl.graph.ir.graph import Graph, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.partition.joined_layers import JoinSize, choose_joined
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.planning.pass_plan import PassPlan, frozen_cuts, plan_pass, replan_pass
from oocdl.planning.tile_search import Layering, Limits
from oocdl.testing import run_graph

DEPTH = 4
CONV = {"strides": (1, 1), "pads": (1,) * 4, "dilations": (1, 1)}


def towers(channels: int = 32) -> Graph:
    """Two towers of convolutions, the sum of their ends, and an update of a weight of the first.

    Each convolution ends in sums over all positions, which cuts make partial: so it is a layer.
    """
    build = Builder(RULES)

    def layer(x: str, name: str) -> str:
        weight = build.value(name, (channels, channels, 3, 3), "float64", Role.WEIGHT)
        x = build("Conv", x, weight, **CONV)
        return build("Relu", build("Sub", x, build("ReduceSum", x, axes=(0, 2, 3), keepdims=1)))

    stem = layer(build.value("x", (2, channels, 12, 12), "float64", Role.INPUT), "stem")
    ends = []
    for tower in "ab":
        x = stem
        for number in range(DEPTH):
            x = layer(x, f"{tower}{number}")
        ends.append(x)
    build.outputs = [build("Add", *ends)]
    build.updates["a0"] = build("Mul", "a0", "a0")
    return build.graph()


def layering_of(graph: Graph) -> Layering:
    return Layering(factorize(graph, RULES), RULES)


def weights(plan: PassPlan) -> list[list[str]]:
    """The weights of the towers that each layer reads."""
    return [[name for name in planned.layer.reads if name[0] in "ab"] for planned in plan.layers]


def test_a_chain_is_one_layer_and_branches_and_updates_stay_apart() -> None:
    layering = layering_of(towers())
    plan = plan_pass(layering, Limits(1 << 30, threads=2))
    assert len(layering.layers(plan.cuts)) == 2 * DEPTH + 2
    assert weights(plan) == [["a0", "a1", "a2", "a3", "b0"], ["b1", "b2", "b3"], [], ["a0"]]
    again = replan_pass(layering, frozen_cuts(plan))
    assert again.numerics() == plan.numerics() and len(again.layers) == 4


@pytest.mark.parametrize("kib", [1300, 1400])
def test_joined_layers_fit_a_unit(kib: int) -> None:
    layering = layering_of(towers())
    whole, plan = plan_pass(layering, Limits(1 << 30, 2)), plan_pass(layering, Limits(kib << 10, 2))
    assert plan.peak_unit_bytes <= kib << 10 < whole.peak_unit_bytes
    assert len(whole.layers) < len(plan.layers) < len(layering.layers(plan.cuts))


def test_layers_whose_program_takes_more_than_they_were_sized_at_stay_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(JoinSize, "fits", lambda size, unit_bytes: True)
    plan = plan_pass(layering_of(towers()), Limits(1300 << 10, 2))
    assert not plan.joined and plan.peak_unit_bytes <= 1300 << 10


@pytest.mark.parametrize(
    ("graph", "limits"),
    [(towers(), Limits(1 << 30, 4, workers=2)), (towers(256), Limits(1 << 30, 2))],
    ids=["several workers", "large weights"],
)
def test_layers_stay_apart(graph: Graph, limits: Limits) -> None:
    layering = layering_of(graph)
    plan = plan_pass(layering, limits)
    assert not plan.joined and len(plan.layers) == len(layering.layers(plan.cuts)) > DEPTH


@pytest.mark.parametrize("kib", [1300, 1 << 20])
def test_results_are_those_of_pytorch(kib: int) -> None:
    rng, graph = np.random.default_rng(0), towers()
    arrays = {v.name: rng.normal(size=v.shape) for v in graph.of_role(Role.INPUT, Role.WEIGHT)}
    ran = run_graph(graph, RULES, arrays, unit_bytes=kib << 10, threads=2)
    assert ran.plan.joined

    def layer(x: torch.Tensor, name: str) -> torch.Tensor:
        x = torch.conv2d(x, torch.from_numpy(arrays[name]), padding=1)
        return torch.relu(x - x.sum((0, 2, 3), keepdim=True))

    a = b = layer(torch.from_numpy(arrays["x"]), "stem")
    for number in range(DEPTH):
        a, b = layer(a, f"a{number}"), layer(b, f"b{number}")
    np.testing.assert_allclose(ran.outputs[graph.outputs[0]], (a + b).numpy(), rtol=1e-10)
    np.testing.assert_array_equal(ran.outputs[graph.updates["a0"]], arrays["a0"] ** 2)


@pytest.mark.parametrize("seed", range(40))
def test_joined_layers_depend_on_earlier_ones_only(seed: int) -> None:
    draw = random.Random(seed)
    layers = []
    for index in range(30):
        reads = {f"v{draw.randrange(max(0, index - 4), index)}" for _ in range(draw.randint(1, 3)) if index}
        name = f"{'grad/' * (index > 15)}n{index}"
        wires: dict[str, Any] = {"reads": tuple(sorted(reads)), "stores": (f"v{index}",), "partials": ()}
        layers.append(Layer(name=name, index=index, cells=(), touched=frozenset(), **wires))
    sizes = [draw.choice([None, JoinSize(1), JoinSize(1), JoinSize(1)]) for _ in layers]
    joined = choose_joined(layers, sizes, 5)
    assert set(joined) == set(range(max(joined) + 1)) and len(set(joined)) < len(layers)
    for layer, number in zip(layers, joined, strict=True):
        assert all(joined[int(name[1:])] <= number for name in layer.reads)
    for number in set(joined):
        inside = [index for index, one in enumerate(joined) if one == number]
        assert len(inside) == 1 or all(sizes[index] for index in inside)
        assert len(inside) <= 5 and len({index > 15 for index in inside}) == 1
