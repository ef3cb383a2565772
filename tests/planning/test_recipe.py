"""Which transforms make which pass, and a file whose batch is fixed, with another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import oocdl
from oocdl.config import make_settings
from oocdl.errors import GraphError, ModelWarning, UnsupportedError
from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.optimizers import SGD
from oocdl.planning.binding import bind
from oocdl.planning.compiler import draft_pass
from oocdl.planning.recipe import (
    FACTOR_TRANSFORMS,
    GRAPH_TRANSFORMS,
    Network,
    PassKind,
    Request,
    Transform,
    apply,
    import_model,
)
from oocdl.planning.tile_search import Limits
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import nets
from tests.kit.runs import losses_of
from tests.kit.settings import EXACT


@pytest.fixture
def whole(tmp_path: Path) -> Request:
    model = inspect_onnx(nets.write_mlp(tmp_path / "net.onnx"))
    data = open_dataset(nets.write_data(tmp_path / "data.zarr", nets.vectors()))
    options = {"batch_size": 2, "engine": "torch", "threads": 1, "keep": ["h", "grad/w1"]}
    settings = make_settings(**options, optimizer=SGD(0.1))
    return Request(
        model=model, binding=bind(model, data, settings), settings=settings, batch=2, kind=PassKind.WHOLE
    )


def made(request: Request) -> Network:
    return apply(GRAPH_TRANSFORMS, import_model(request), request)


def test_a_whole_step_updates_weights_and_keeps_its_own_gradient(whole: Request) -> None:
    network = made(whole)
    assert set(network.graph.updates) == {"w1", "b1", "w2", "b2"}
    assert network.graph.outputs == network.results
    assert network.kept_values["grad/w1"] in network.graph.values
    assert not network.outputs and not network.graph.of_role(Role.SUM)
    assert network.feeds == {"x": "x", "target/y": "y"}


def test_passes_of_a_step_share_all_but_the_update(whole: Request) -> None:
    earlier, last = (made(replace(whole, kind=part)) for part in (PassKind.EARLIER, PassKind.LAST))
    sums = {f"{name}/accumulated" for name in ("w1", "b1", "w2", "b2")}
    assert set(earlier.graph.updates) == sums and not earlier.kept_values
    assert set(last.graph.updates) == {"w1", "b1", "w2", "b2"}
    assert {value.name for value in last.graph.of_role(Role.SUM)} == sums
    assert last.kept_values["grad/w1"] == "w1/accumulated/next"


def test_inference_takes_the_same_recipe_without_training(whole: Request) -> None:
    forward = replace(whole, kind=PassKind.FORWARD)
    assert made(forward).loss is not None and not made(forward).graph.updates
    network = made(replace(forward, binding=replace(whole.binding, targets=())))
    assert network.loss is None and not network.kept_values
    assert network.graph.outputs == tuple(network.outputs.values()) and list(network.outputs) == ["y"]
    compiled = draft_pass(forward).cut(Limits(1 << 30))
    assert compiled.loss == made(forward).loss and not compiled.sums


def test_a_transform_that_breaks_the_graph_is_named(whole: Request) -> None:
    def careless(network: Network, request: Request) -> Network:
        values = {name: value for name, value in network.graph.values.items() if name != network.loss}
        return replace(network, graph=replace(network.graph, values=values))

    network = made(whole)
    with pytest.raises(GraphError, match=r"after 'careless': node 'div' \(Div\) makes 'div', which"):
        apply((Transform("careless", careless),), network, whole)
    others = frozenset({PassKind.FORWARD})
    assert apply((Transform("careless", careless, others),), network, whole) is network


def test_a_transform_that_breaks_the_factors_is_named(whole: Request) -> None:
    def careless(network: Network, request: Request) -> Network:
        assert network.factored is not None
        return replace(network, factored=replace(network.factored, orders={"x": (0, 0)}))

    with pytest.raises(GraphError, match=r"after 'careless': 'x' has order \[0, 0\]"):
        apply((*FACTOR_TRANSFORMS, Transform("careless", careless)), made(whole), whole)


def test_a_name_that_a_transform_has_lost_is_named(whole: Request) -> None:
    def forgetful(network: Network, request: Request) -> Network:
        return replace(network, loss="gone")

    with pytest.raises(GraphError, match="after 'forgetful': name 'gone' is no value"):
        apply((Transform("forgetful", forgetful),), made(whole), whole)


def write(path: Path, batch: int, samples: str | int, mean: bool = False) -> Path:
    """Six numbers as three pairs, whose larger ones a matrix makes four classes of; the batch is in a shape.

    ``mean``: less the mean of the batch.
    """
    w = np.random.default_rng(0).normal(size=(3, 4))
    nodes = [
        helper.make_node("Constant", [], ["pairs"], "pairs", value_ints=[batch, 3, 2]),
        helper.make_node("Reshape", ["x", "pairs"], ["p"], "pair"),
        helper.make_node("ReduceMax", ["p"], ["m"], "larger", axes=[2], keepdims=0),
    ]
    if mean:
        nodes += [
            helper.make_node("ReduceMean", ["m"], ["mean"], "mean", axes=[0]),
            helper.make_node("Sub", ["m", "mean"], ["less"], "less"),
        ]
    nodes.append(helper.make_node("MatMul", ["less" if mean else "m", "w"], ["y"], "dense"))
    return nets.save(path, nodes, {"w": w}, [samples, 6], {"y": [samples, 4]})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    x = random.normal(size=(6, 6)).astype("f4")
    return nets.write_data(tmp_path / "data.zarr", {"x": x, "y": random.normal(size=(6, 4)).astype("f4")})


def losses(model: Path, data: Path, **options: Any) -> list[float]:
    options = {**EXACT, "loss": "mse", "steps": 3, "batch_size": 3, **options}
    return losses_of(oocdl.fit(model, data, workdir=model.with_suffix(".run"), **options))


def test_what_a_file_does_with_each_sample_it_does_with_more(tmp_path: Path, data: Path) -> None:
    fixed, free = write(tmp_path / "fixed.onnx", 2, 2), write(tmp_path / "free.onnx", -1, "n")
    assert losses(fixed, data) == losses(free, data)


def test_what_a_file_does_with_its_batch_is_refused(tmp_path: Path, data: Path) -> None:
    model = write(tmp_path / "fixed.onnx", 2, 2, mean=True)
    with pytest.raises(UnsupportedError, match="was exported for a batch of 2, and does something else"):
        losses(model, data)
    assert len(losses(model, data, batch_size=2)) == 3


def pooled(path: Path, batch: int, dims: list[str | int]) -> Path:
    """Four classes of the mean of each of two channels over space, by shapes that hold the batch."""
    nodes = [
        helper.make_node("Constant", [], ["row"], "row", value_ints=[batch, 2, -1]),
        helper.make_node("Reshape", ["x", "row"], ["r"], "rows"),
        helper.make_node("ReduceMean", ["r"], ["m"], "mean", axes=[2]),
        helper.make_node("Constant", [], ["flat"], "flat", value_ints=[batch, 2]),
        helper.make_node("Reshape", ["m", "flat"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "w"], ["y"], "dense"),
    ]
    w = np.random.default_rng(0).normal(size=(2, 4))
    return nets.save(path, nodes, {"w": w}, dims, {"y": [dims[0], 4]})


def test_batch_and_sizes_may_be_others_at_once(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(6, 2, 5, 4)).astype("f4"), random.normal(size=(6, 4)).astype("f4")
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": y})
    fixed = pooled(tmp_path / "fixed.onnx", 1, [1, 2, 3, 2])
    free = pooled(tmp_path / "free.onnx", 0, ["n", 2, "h", "w"])
    with pytest.warns(ModelWarning, match=r"fixes input 'x' to \[1, 2, 3, 2\]"):
        found = losses(fixed, data)
    assert found == losses(free, data)
