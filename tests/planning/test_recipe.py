"""The recipe: which transforms make which pass, names that follow their values, and who is blamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oocdl.config import make_settings
from oocdl.errors import GraphError
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
