"""The MultiCut of `examples/multicut.py` by brute force; `examples/instance_cut.py` without training."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kit.code import ROOT


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module("instance_cut")


@pytest.fixture(scope="module")
def solver(example: ModuleType) -> ModuleType:
    return importlib.import_module("multicut")


Array = npt.NDArray[np.float64]
Edges = list[tuple[int, int]]


def partitions(nodes: int) -> Iterator[list[int]]:
    """All partitions of some nodes: parts are numbered in the order of their first nodes."""
    if not nodes:
        yield []
        return
    for parts in partitions(nodes - 1):
        for part in range(max(parts, default=-1) + 2):
            yield [*parts, part]


def drawn(seed: int, most: int) -> tuple[int, Edges, list[float]]:
    """A random graph of up to ``most`` nodes, and costs of its edges."""
    chance = random.Random(seed)
    nodes = chance.randint(1, most)
    edges = [(a, b) for a in range(nodes) for b in range(a) if chance.random() < 0.6]
    return nodes, edges, [chance.gauss(0.1, 1) for _ in edges]


def graph_of(nodes: int, costs: Iterable[tuple[tuple[int, int], float]]) -> list[dict[int, float]]:
    """The cost of each edge, by both of its nodes."""
    graph: list[dict[int, float]] = [{} for _ in range(nodes)]
    for (a, b), cost in costs:
        graph[a][b] = graph[b][a] = cost
    return graph


def test_small_graphs_are_cut_as_by_brute_force(solver: ModuleType) -> None:
    """A local search may miss the optimum. It does so rarely, never passes it, and mends greedy joins."""
    missed = greedy = 0
    for seed in range(200):
        nodes, edges, costs = drawn(seed, 7)
        least = min(solver.cut_cost(edges, costs, parts) for parts in partitions(nodes))
        graph = graph_of(nodes, zip(edges, costs, strict=True))
        first = solver.cut_cost(edges, costs, solver.greedy_joins(graph))
        found = solver.cut_cost(edges, costs, solver.multicut(nodes, edges, costs))
        assert least - 1e-9 <= found <= first + 1e-9
        missed += found > least + 1e-9
        greedy += first > least + 1e-9
    assert missed <= 3 < greedy


def test_no_join_and_no_move_of_one_node_is_better(solver: ModuleType) -> None:
    for seed in range(20):
        nodes, edges, costs = drawn(seed, 24)
        parts = solver.multicut(nodes, edges, costs)
        cost = solver.cut_cost(edges, costs, parts)
        others = range(max(parts) + 2)  # the last one is empty
        moved = [[*parts[:node], part, *parts[node + 1 :]] for node in range(nodes) for part in others]
        joined = [[one if part == other else part for part in parts] for one in others for other in others]
        assert all(solver.cut_cost(edges, costs, other) >= cost - 1e-6 for other in (*moved, *joined))


def test_parts_are_connected_and_numbered_in_order(solver: ModuleType) -> None:
    assert solver.multicut(5, [(0, 1), (3, 4)], [1.0, 1.0]) == [0, 0, 1, 2, 2]
    for seed in range(20):
        nodes, edges, costs = drawn(seed, 24)
        parts = solver.multicut(nodes, edges, costs)
        assert list(dict.fromkeys(parts)) == [*range(max(parts) + 1)]
        # Of a tree of ones within parts, greedy joins make just these parts: each is connected.
        graph = graph_of(nodes, (((a, b), 1.0) for a, b in edges if parts[a] == parts[b]))
        assert solver.greedy_joins(graph) == parts


def test_a_way_through_a_loss_is_found(solver: ModuleType) -> None:
    """Greedy joins put 1 and 2 to 0. They belong to 3 and 4, but each alone would lose by going there."""
    costs = {(1, 2): 4.0, (0, 1): 1.6, (0, 2): 1.6, (3, 4): 3.1, (0, 3): -5.0, (0, 4): -5.0}
    costs |= {(one, other): 1.0 for one in (1, 2) for other in (3, 4)}
    assert solver.greedy_joins(graph_of(5, costs.items())) == [0, 0, 0, 1, 1]
    assert solver.multicut(5, [*costs], [*costs.values()]) == [0, 1, 1, 1, 1]


def test_costs_of_an_edge_add_up_and_loops_are_refused(solver: ModuleType) -> None:
    assert solver.multicut(2, [(0, 1), (1, 0)], [2.0, -3.0]) == [0, 1]
    assert solver.multicut(2, [(0, 1), (1, 0)], [3.0, -2.0]) == [0, 0]
    assert solver.multicut(0, [], []) == []
    with pytest.raises(ValueError, match="node 1 to itself"):
        solver.multicut(2, [(1, 1)], [1.0])


def heads(example: ModuleType, classes: Array, instances: Array, random: np.random.Generator) -> Any:
    """What heads would make that are right, with noise on the edges."""
    logits = np.stack([np.where(classes == kind, 3.0, 0.0) for kind in range(len(example.CLASSES))])
    return logits, np.where(example.edges_of(instances), 3.0, -3.0) + random.normal(
        0, 0.5, (2, *classes.shape)
    )


def test_heads_that_are_right_give_the_true_instances(example: ModuleType) -> None:
    random = np.random.default_rng(0)
    found, truth = [], []
    for number in range(4):
        _, classes, instances = example.scene(random, 48, 5)
        found += example.instances_of(number, *heads(example, classes, instances, random))
        truth += [
            example.Instance(number, one.kind, one.score, one.mask)
            for one in example.true_instances(classes[None], instances[None])
        ]
    assert example.average_precision(found, truth, 0.5) >= 0.9


def test_either_head_parts_what_touches(example: ModuleType) -> None:
    random = np.random.default_rng(0)
    halves = np.zeros((16, 24))
    halves[4:12, 4:12], halves[4:12, 12:20] = 1, 2

    def kinds_of(classes: Array, instances: Array) -> list[int]:
        found = example.instances_of(0, *heads(example, classes, instances, random))
        return sorted(one.kind for one in found)

    assert kinds_of(halves.clip(max=1), halves) == [1, 1]  # by the edge between them
    assert kinds_of(halves, halves.clip(max=1)) == [1, 2]  # by their classes
    assert kinds_of(halves.clip(max=1), halves.clip(max=1)) == [1]


def test_average_precision_of_known_instances(example: ModuleType) -> None:
    """Of two true ones, found by the surest guess and by the third: precision 1, then 2 of 3."""
    masks = np.eye(4, dtype=bool).reshape(4, 2, 2)
    truth = [example.Instance(0, 1, 1.0, masks[0]), example.Instance(0, 1, 1.0, masks[1])]
    guesses = [(0.9, 0), (0.8, 2), (0.7, 1)]
    found = [example.Instance(0, 1, score, masks[place]) for score, place in guesses]
    assert example.average_precision(found, truth, 0.5) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    # Another class, another scene and the same one again are no hits; a class of which nothing is found is 0.
    wrong = [example.Instance(0, 2, 1.0, masks[0]), example.Instance(1, 1, 1.0, masks[0])]
    again = [example.Instance(0, 1, 0.95, masks[0])]
    assert example.average_precision(wrong, truth, 0.5) == 0
    assert example.average_precision(found + again, truth, 0.5) == pytest.approx(0.5 * 1 + 0.5 * 2 / 4)
    more = [*truth, example.Instance(0, 2, 1.0, masks[3])]
    assert example.average_precision(found, more, 0.5) == pytest.approx((0.5 + 1 / 3) / 2)
