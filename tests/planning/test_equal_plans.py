"""What makes planning quick makes no other plan: neither the cache, nor that equal layers are cut once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from oocdl.graph.partition.layer_kinds import LayerKind, LayerKinds
from oocdl.graph.partition.storage_cut import Layer
from oocdl.graph.partition.tiling import LayerCutter
from oocdl.graph.partition.unit import Shard, Unit
from oocdl.planning import tile_search
from oocdl.planning.choice import budget
from oocdl.planning.compiler import Draft
from oocdl.planning.machine import Machine
from oocdl.training import plan_cache
from tests.kit import nets
from tests.kit.machine import Small
from tests.kit.placed import plan_digest
from tests.kit.settings import QUICK

CONV = {"loss": "cross_entropy", "optimizer": "adam"}
MLP = {"loss": "cross_entropy", "accumulate": 2}


def _conv(place: Path) -> tuple[Path, Path]:
    model = nets.write_conv(place / "net.onnx", channels=4, layers=4)
    return model, nets.write_data(place / "data.zarr", nets.volumes(samples=5, extent=24))


def _mlp(place: Path) -> tuple[Path, Path]:
    model = nets.write_mlp(place / "net.onnx", sizes=(6, 6, 6))
    return model, nets.write_data(place / "data.zarr", nets.vectors(samples=5))


CASES = {
    "convolutions with room": (_conv, CONV, 1 << 30),
    "convolutions that are cut": (_conv, CONV, 6 << 20),
    "products": (_mlp, MLP, 1 << 30),
}


@pytest.fixture(params=CASES)
def planned(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], dict[str, str]]:
    """Plans a network, and returns the digest of the plan."""
    make, options, capacity_bytes = CASES[request.param]
    files = make(tmp_path)
    return lambda: plan_digest(
        Small(capacity_bytes, 300 << 20).job(*files, **QUICK, batch_size=2, steps=3, **options).plan()
    )


def test_the_plan_of_the_cache_is_the_one_that_was_found(
    planned: Callable[[], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(plan_cache.VARIABLE)
    assert planned() == found
    monkeypatch.setattr(budget, "_fastest", lambda *given: pytest.fail("it is not from the cache"))
    assert planned() == found


@pytest.mark.parametrize("planned", [name for name in CASES if name != "products"], indirect=True)
def test_layers_that_are_equal_but_for_names_are_cut_as_each_would_be(
    planned: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    derived: list[Shard] = []
    derive = LayerCutter._unit

    def noted(cutter: LayerCutter, shard: Shard) -> Unit:
        derived.append(shard)
        return derive(cutter, shard)

    monkeypatch.setattr(LayerCutter, "_unit", noted)
    found, shared = planned(), len(derived)
    numbers, find = count(), LayerKinds._find

    def unlike(kinds: LayerKinds, layer: Layer) -> LayerKind:
        return replace(find(kinds, layer), number=next(numbers))

    monkeypatch.setattr(LayerKinds, "_find", unlike)
    monkeypatch.setattr(tile_search, "renamed", lambda *given: pytest.fail("no two layers are equal"))
    assert planned() == found
    assert len(derived) - shared > shared


Tried = list[tuple[int, int | None]]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], tuple[int, Tried]]:
    """Tasks of a plan in so many bytes that takes other units up to a ratio of seconds, and what it tried."""
    files = _conv(tmp_path)
    tried: Tried = []
    cut = budget.cut

    def noted(draft: Draft, machine: Machine, unit_bytes: int, *how: Any) -> Any:
        tried.append((unit_bytes, how[0] if how else None))
        return cut(draft, machine, unit_bytes, *how)

    def planned(capacity_bytes: int, ratio: float) -> tuple[int, Tried]:
        monkeypatch.setattr(budget, "OTHER_UNITS_TIME_RATIO", ratio)
        tried.clear()
        job = Small(capacity_bytes, 300 << 20).job(*files, **QUICK, batch_size=2, steps=3, **CONV)
        return job.plan().tasks, list(tried)

    monkeypatch.setattr(budget, "cut", noted)
    monkeypatch.setattr(budget, "TRIAL_TASK_BYTES", 0)
    return planned


def test_of_units_of_two_sizes_the_faster_are_taken(
    tasks: Callable[[int, float], tuple[int, Tried]], monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = (tasks(7 << 19, ratio)[0] for ratio in (0.0, 9.0))
    most = 2 * large + budget.FEW_MORE_UNITS
    _, ((whole, _), half, *_) = tasks(7 << 19, 9.0)
    assert half == (whole // 2, most) and large < small <= most
    monkeypatch.setattr(budget, "FEW_MORE_UNITS", small - 2 * large - 1)
    assert tasks(7 << 19, 9.0)[0] == large, "of more units none is tried"


def test_where_smaller_units_do_not_fit_larger_ones_are_tried(
    tasks: Callable[[int, float], tuple[int, Tried]],
) -> None:
    room = 700 << 10
    usual, large = tasks(room, 0.0), tasks(room, 9.0)
    sizes = [unit_bytes for unit_bytes, _ in large[1]][:3]
    assert sizes == [room // 2, room // 4, room], "one thread: one unit at a time, and none is read ahead"
    assert large[0] < usual[0]
