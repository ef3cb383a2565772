"""Random small graphs, randomly cut: equal to the whole, and gradients equal to PyTorch's autograd.

``OOCDL_SEEDS=1000:2000`` tries those seeds, each of them a graph, instead of the first few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from oocdl.graph.partition.cut_classes import find_classes
from oocdl.graph.transforms import channels_last
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.testing import run_graph
from tests.kit.interpret import evaluate
from tests.kit.op_cases import AS_CONVOLUTIONS
from tests.kit.random_graphs import Maker, text
from tests.kit.random_layers import LAYERS
from tests.kit.random_steps import STEPS

FIRST, LAST = map(int, os.environ.get("OOCDL_SEEDS", "0:100").split(":"))
VOCABULARY = (*STEPS, *LAYERS)
LACKING: dict[str, str] = {}
"""Operators that no random graph has, and why."""


@contextmanager
def all_channels_last() -> Iterator[None]:
    """``channels_last`` takes whatever has axes of space, however few channels it has."""
    before = channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE
    channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE = 1, 1
    try:
        yield
    finally:
        channels_last.LEAST_CHANNELS, channels_last.CHANNELS_MULTIPLE = before


def grown(seed: int) -> Maker:
    """A maker with a graph of some steps."""
    maker = Maker(np.random.default_rng(seed))
    maker.leaf()
    for _ in range(maker.integer(1, 6)):
        maker.step(VOCABULARY)
    if not maker.weights:
        maker.pool.append(maker.build("Mul", maker.pool[-1], maker.thin(maker.pool[-1])))
    return maker


def truth_of(maker: Maker, forward: object) -> list[torch.Tensor]:
    """Outputs, and the negative gradients of the last of them, by PyTorch."""
    tensors = {name: torch.as_tensor(array) for name, array in maker.arrays.items()}
    for name in maker.weights:
        tensors[name].requires_grad_()
    found = evaluate(forward, tensors)
    truth = [found[name] for name in forward.outputs]
    leaves, grads = [tensors[name] for name in maker.weights], [None] * len(maker.weights)
    if truth[-1].requires_grad:
        grads = torch.autograd.grad(truth[-1], leaves, allow_unused=True)
    truth += [-torch.zeros_like(x) if g is None else -g for x, g in zip(leaves, grads, strict=True)]
    return truth


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_graph_cut_is_whole_and_its_gradients_are_autograds(seed: int) -> None:
    maker = grown(seed)
    forward, graph = maker.finish()
    small = canonicalize(graph, RULES)
    classes = find_classes(factorize(small, RULES))
    counts = {number: maker.one(1, 2, 2, 3, 4) for number, extent in classes.extents.items() if extent > 1}
    cuts = {number: count for number, count in counts.items() if count > 1}
    last = maker.flip()
    whole = run_graph(graph, RULES, maker.arrays).outputs
    with all_channels_last():
        cut = run_graph(graph, AS_CONVOLUTIONS, maker.arrays, cuts=cuts, channels_last=last).outputs
    truth = truth_of(maker, forward)
    largest = max(float(t.detach().abs().max()) for t in truth)
    for title, expected in zip(small.outputs, truth, strict=True):  # equal values have one name there
        wanted = expected.detach().numpy()
        size = max(float(np.abs(wanted).max()), 1e-3 * max(largest, 1.0))  # what goes in is of size one
        for kind, result in (("whole", whole[title]), ("cut", cut[title])):
            error = float(np.abs(result - wanted).max()) / size
            assert error <= 1e-10, f"{kind} '{title}' is off by {error:.1e}; cuts={cuts}\n{text(graph)}"


def test_random_graphs_have_all_operators() -> None:
    """Each step, tried on some values, and gradients."""
    seen: set[str] = set()
    for seed in range(100):
        for step in VOCABULARY:
            maker = Maker(np.random.default_rng(seed))
            maker.leaf()
            maker.step([step])
            seen.update(node.op for node in maker.finish()[1].nodes)
    assert set(RULES) - seen == set(LACKING), "tests/kit/random_steps.py, random_layers.py: add a step of it"
