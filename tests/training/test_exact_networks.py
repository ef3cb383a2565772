"""Whole networks, three steps of training through ``fit``, against PyTorch in float64 on the same batches.

Every network is trained uncut and cut in batch, space and channels. The second batch is ragged, the third is
whole again: three samples in batches of two. What units move is what the plan says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import oocdl
from oocdl.engines.engine_registry import ENGINES
from oocdl.graph.transforms import channels_last
from tests.kit import jobs as kit
from tests.kit.jobs import EVEN, NETS, OPTIMIZERS, SAMPLES, Job, Net, Unet, prepare, train, unet
from tests.kit.models import GPT, MLP, Grouped, UNet3d
from tests.kit.runs import losses_of


def _slowly(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


CUTS: dict[str, dict[str, Any]] = {
    "whole": {"threads": 1},
    "batch": {"parallel": {"batch": 2}},
    "slabs": {"parallel": {"space": (3,)}},
    "bricks": {"parallel": {"space": (2, 2, 1)}},
    "channels": {"parallel": {"channels": 2}},
    "mixed": {"parallel": {"batch": 2, "space": (2, 1, 2), "channels": 2}},
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Job]:
    """Networks on disk, each exported once."""
    made: dict[Any, Job] = {}

    def job(name: Any) -> Job:
        if name not in made:
            net = NETS[name] if isinstance(name, str) else unet(*name)
            made[name] = prepare(net, tmp_path_factory.mktemp("net"))
        return made[name]

    return job


def check_traffic(run: oocdl.Run) -> None:
    """Units moved the bytes that the plan says; what is counted never exceeded the tier."""
    plan, ragged = run.plan, run.plan.kinds.get("ragged")
    assert ragged is not None
    for row, planned in zip(run.history, (plan, ragged.plan, plan), strict=True):
        assert row["unit_read_bytes"] == planned.read_bytes
        assert row["unit_written_bytes"] == planned.written_bytes
        assert row["peak_bytes"] <= plan.peak_bytes
        assert row["read_bytes"] == row["written_bytes"] == 0  # all of it fits


def exact(job: Job, optimizer: str, cut: str, workdir: Path, engine: str = "torch") -> oocdl.Run:
    """Train with PyTorch and with oocdl, and compare."""
    if (job.net, optimizer) not in TRUTH:
        TRUTH[job.net, optimizer] = train(job, optimizer)
    run = job.fit(workdir, optimizer=OPTIMIZERS[optimizer][0], engine=engine, **CUTS[cut])
    kit.check(run, *TRUTH[job.net, optimizer], kit.TOLERANCE[optimizer])
    check_traffic(run)
    return run


TRUTH: dict[Any, tuple[list[float], dict[str, np.ndarray]]] = {}
ODD: tuple[Unet, ...] = (
    ("instance", "stride", "transpose", (9, 5, 7), 1, True),
    ("group", "maxpool", "trilinear", (5, 7, 9), 1, True),
    ("instance", "maxpool", "nearest", (17, 10, 7), 2, True),
    ("group", "stride", "trilinear", (11, 7, 9), 1, True),
)
PRODUCT: tuple[Unet, ...] = tuple(
    (norm, down, up, shape, 2, True)
    for norm in ("instance", "batch", "group")
    for down in ("maxpool", "stride")
    for up in ("transpose", "trilinear", "nearest")
    for shape in ((17, 19, 21), (18, 20, 22))
)
_CUT_NAMES = tuple(CUTS)
_SOME = [
    # Each U-Net with one of the cuts, in turn: all of the product are slow.
    (net, ("sgd", "adam")[number % 2], _CUT_NAMES[number % 6])
    for number, net in enumerate((*EVEN, *ODD))
]


def _id(value: Any) -> str:
    return "-".join("x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value if v is not True)


@pytest.mark.parametrize(
    ("net", "optimizer", "cut"), [pytest.param(*c, id=f"{_id(c[0])}-{c[1]}-{c[2]}") for c in _SOME]
)
def test_unet_is_exact(net: Unet, optimizer: str, cut: str, jobs: Any, tmp_path: Path) -> None:
    exact(jobs(net), optimizer, cut, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("net", [pytest.param(net, id=_id(net)) for net in PRODUCT])
def test_every_unet_is_exact(net: Unet, cut: str, jobs: Any, tmp_path: Path) -> None:
    exact(jobs(net), ("sgd", "adam")[PRODUCT.index(net) % 2], cut, tmp_path / "run")


QUICK = (
    *(("resnet", "sgd", cut) for cut in ("whole", "slabs", "bricks", "channels", "mixed")),
    *(("gpt", "sgd", cut) for cut in ("whole", "slabs", "channels", "mixed")),
    *(("mlp", "sgd", cut) for cut in ("whole", "channels")),
    *(("two-heads", "sgd", cut) for cut in ("slabs", "bricks", "mixed")),
    *((name, "adam", "batch") for name in ("resnet", "gpt", "mlp", "two-heads")),
)
"""Each network with each cut, but for those that cut nothing of it, or what another cut of it cuts, too."""


@pytest.mark.parametrize(
    ("name", "optimizer", "cut"),
    [*QUICK, *_slowly(*(case for case in product(NETS, OPTIMIZERS, CUTS) if case not in QUICK))],
)
def test_network_is_exact(name: str, optimizer: str, cut: str, jobs: Any, tmp_path: Path) -> None:
    exact(jobs(name), optimizer, cut, tmp_path / "run")


@pytest.mark.parametrize("net", [EVEN[2], "gpt"], ids=["unet", "gpt"])
def test_the_numpy_engine_is_exact(net: Unet | str, jobs: Any, tmp_path: Path) -> None:
    exact(jobs(net), "sgd", "batch", tmp_path / "run", engine="numpy")


@pytest.fixture
def _last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels last in float64, too, and however few they are."""
    entry = replace(ENGINES["torch"], channels_last={"float64": (4, 5)})
    monkeypatch.setitem(ENGINES, "torch", entry)  # type: ignore[arg-type]
    monkeypatch.setattr(channels_last, "LEAST_CHANNELS", 1)
    monkeypatch.setattr(channels_last, "CHANNELS_MULTIPLE", 1)


@pytest.mark.usefixtures("_last")
@pytest.mark.parametrize(
    ("cut", "net"),
    [("batch", EVEN[1]), ("slabs", ODD[3]), ("mixed", EVEN[2]), *_slowly(("channels", EVEN[0]))],
    ids=lambda given: given if isinstance(given, str) else _id(given),
)
def test_unet_is_exact_with_its_channels_last(net: Unet, cut: str, jobs: Any, tmp_path: Path) -> None:
    run = exact(jobs(net), "sgd", cut, tmp_path / "run")
    programs = [unit.program for layer in run.plan.layers for unit in layer.units]
    with_orders = [program for program in programs if program.orders]
    assert len(with_orders) > len(programs) / 3
    assert any(order for program in with_orders for order in program.output_orders)


def _grouped(rank: int, folder: Path) -> Job:
    """Groups of channels of lines, images or volumes."""

    def arrays(random: np.random.Generator) -> dict[str, np.ndarray]:
        x = random.normal(size=(SAMPLES, 3, *((17,) if rank == 1 else (6, 9, 7)))).astype("float32")
        return {"x": x, "y": random.integers(10, size=SAMPLES)}

    net = NETS["grouped"] if rank == 2 else replace(NETS["grouped"], arrays=arrays)
    return prepare(replace(net, make=lambda: Grouped(rank)), folder)


@pytest.mark.parametrize(
    ("rank", "cut"), [(1, "slabs"), *_slowly((3, "slabs"), *((rank, "mixed") for rank in (1, 3)))]
)
def test_groups_of_lines_and_volumes_are_exact(rank: int, cut: str, tmp_path: Path) -> None:
    exact(_grouped(rank, tmp_path / "net"), "sgd", cut, tmp_path / "run")


@pytest.mark.usefixtures("_last")
@pytest.mark.parametrize(
    ("rank", "cut"),
    [(2, "whole"), (3, "batch"), *_slowly((3, "whole"), *product((2, 3), ("channels", "mixed")))],
)
def test_groups_are_exact_with_their_channels_last(rank: int, cut: str, tmp_path: Path) -> None:
    run = exact(_grouped(rank, tmp_path / "net"), "sgd", cut, tmp_path / "run")
    programs = [unit.program for layer in run.plan.layers for unit in layer.units]
    grouped = [p for p in programs if any(item.attrs.get("grouped") for item in p.instructions)]
    assert grouped and all(program.orders for program in grouped)


@pytest.mark.parametrize(
    ("name", "engine", "cut"),
    [
        *(("resnet", "torch", "mixed"), ("resnet", "onnxruntime", "whole")),
        *_slowly(("resnet", "torch", "whole"), ("resnet", "onnxruntime", "mixed")),
        *_slowly(*product(["unet"], ["torch", "onnxruntime"], ["whole", "mixed"])),
    ],
)
def test_float32_is_as_good_as_pytorchs(name: str, engine: str, cut: str, jobs: Any, tmp_path: Path) -> None:
    """At most three times PyTorch's own error of float32 against float64 (with a floor of 1e-5)."""
    job = jobs(EVEN[0] if name == "unet" else name)
    losses, weights = train(job, "sgd")
    own = kit.errors_of(train(job, "sgd", torch.float32)[1], weights)
    how = {"optimizer": OPTIMIZERS["sgd"][0], "engine": engine, "precision": "float32", **CUTS[cut]}
    run = job.fit(tmp_path / "run", **how)
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-4)
    found = kit.errors_of(dict(run.weights), weights)
    worst = max(found, key=lambda name: found[name] / max(own[name], 1e-5 / 3))
    assert found[worst] <= max(3 * own[worst], 1e-5), (worst, found[worst], own[worst])
    check_traffic(run)


@pytest.mark.parametrize("name", ["mlp", *_slowly(("gpt",), ("unet",))])
def test_dropout_does_not_depend_on_cuts(name: str, jobs: Any, tmp_path: Path) -> None:
    makes: dict[str, tuple[Net, Callable[[], nn.Module]]] = {
        "mlp": (NETS["mlp"], lambda: MLP((7, 11, 3), dropout=0.3)),
        "gpt": (NETS["gpt"], lambda: GPT(vocabulary=37, context=12, width=8, heads=2, layers=1, dropout=0.3)),
        "unet": (unet(*EVEN[2]), lambda: UNet3d(base=2, depth=1, norm="group", up="nearest", dropout=0.3)),
    }
    net, make = makes[name]
    job = prepare(replace(net, make=make), tmp_path / "net")
    whole = losses_of(job.fit(tmp_path / "whole", threads=1))
    for cut in ("batch", "slabs", "channels", "mixed"):
        np.testing.assert_allclose(losses_of(job.fit(tmp_path / cut, **CUTS[cut])), whole, rtol=1e-11)
    assert losses_of(job.fit(tmp_path / "seed", threads=1, seed=1)) != whole
    silent = copy.deepcopy(job.module)
    for part in silent.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    without = train(replace(job, module=silent), "adam")[0]
    assert abs(without[0] - whole[0]) > 1e-6, "nothing was dropped"
