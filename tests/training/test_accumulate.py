"""Gradients accumulated over several passes, and clipped, against PyTorch's own loop in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import oocdl
from oocdl.errors import InputError
from oocdl.optim import SGD, Adam
from oocdl.planning.passes import FIRST, MAIN, NEXT, RAGGED, SINGLE_PASS
from oocdl.planning.task_key import TaskKind
from oocdl.runtime import scheduler
from tests.kit import nets, settings
from tests.kit.machine import Small, fit
from tests.kit.models import export
from tests.kit.runs import in_torch, losses_of, same

EXACT = {**settings.EXACT, "loss": "cross_entropy"}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (
        functools.partial(SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "adam": (functools.partial(Adam, lr=0.01), functools.partial(torch.optim.Adam, lr=0.01)),
}


class Net(nn.Module):
    """Convolutions, a batch norm between; no bias before it, whose true gradient would be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(4)
        self.head = nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.norm(self.first(x))))
        return found


class TwoLayers(nn.Module):
    """``nets.write_mlp``."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        for name, array in weights.items():
            self.register_parameter(name, nn.Parameter(torch.as_tensor(array).double()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ self.w1.T + self.b1)
        found: Tensor = hidden @ self.w2.T + self.b2
        return found


def loop(
    module: nn.Module, x: Tensor, y: Tensor, batch: int, k: int, optimizer: str, clip: float | None
) -> tuple[list[float], dict[str, Any]]:
    """Two epochs as PyTorch's users write them, ``(loss / k).backward()``; losses and state dict."""
    optim = OPTIMIZERS[optimizer][1](module.parameters())
    if clip is not None:
        optim.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(module.parameters(), clip) and None)

    def loss(rows: slice) -> Tensor:
        return nn.functional.cross_entropy(module(x[rows]), y[rows])

    passes = [functools.partial(loss, slice(at, at + batch)) for at in range(0, len(x), batch)]
    losses = in_torch(optim, 2 * [passes[at : at + k] for at in range(0, len(passes), k)])
    return losses, {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


@dataclass(frozen=True)
class Bench:
    """The network on disk, and as PyTorch has it."""

    folder: Path
    module: nn.Module

    def fit(self, workdir: Path, samples: int, **options: Any) -> oocdl.Run:
        data = self.folder / f"data{samples}.zarr"
        if not data.exists():
            nets.write_data(data, nets.volumes(samples, 6))
        return oocdl.fit(self.folder / "net.onnx", data, workdir=workdir, **{**EXACT, **options})

    def torch(
        self, samples: int, batch: int, k: int, optimizer: str, clip: float | None
    ) -> tuple[list[float], dict[str, Any]]:
        arrays = nets.volumes(samples, 6)
        x, y = torch.as_tensor(arrays["x"]).double()[:, None], torch.as_tensor(arrays["y"]).long()
        return loop(copy.deepcopy(self.module), x, y, batch, k, optimizer, clip)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    module = Net()
    path = export(module, (torch.zeros(1, 1, 6, 6, 6),), folder / "net.onnx", dynamic=(0, 2, 3, 4))
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    state = module.state_dict()  # the export may have moved the running statistics
    module.load_state_dict({n: torch.as_tensor(stored[n].copy()) if n in stored else state[n] for n in state})
    return Bench(folder, module.double().train())


def check(run: oocdl.Run, losses: list[float], state: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Losses, weights and running statistics; PyTorch's own count of batches is not in the file."""
    np.testing.assert_allclose(losses_of(run), losses, rtol=1e-10)
    for name, array in state.items():
        if not name.endswith("num_batches_tracked"):
            assert np.abs(run.weights[name][...] - array).max() <= tolerance * np.abs(array).max(), name


COURSES: dict[tuple[int, int], set[str]] = {
    (5, 1): {MAIN, RAGGED},  # clipping alone
    (8, 2): {MAIN, FIRST},
    (9, 3): {MAIN, RAGGED, FIRST, NEXT},  # 3 passes, then a full and a ragged one
    (7, 3): {MAIN, RAGGED, FIRST, NEXT, SINGLE_PASS},  # 3 passes, then a ragged one alone
    (5, 9): {MAIN, RAGGED, FIRST, NEXT},  # an epoch is one step
}
"""Samples and passes a step, in batches of two -> kinds of passes."""
WHOLE = ("adam", 0.05, "auto")
CUT = ("sgd", None, {"batch": 2, "space": (2, 2), "channels": 2})
ALL_KINDS = (7, 3)


@pytest.mark.parametrize(
    ("samples", "k", "optimizer", "clip", "cuts"),
    [*((*course, *WHOLE) for course in COURSES), (*ALL_KINDS, *CUT)],
)
def test_steps_are_those_of_pytorchs_loop(
    samples: int, k: int, optimizer: str, clip: float | None, cuts: Any, bench: Bench, tmp_path: Path
) -> None:
    ours = OPTIMIZERS[optimizer][0](clip_norm=clip)
    run = bench.fit(
        tmp_path / "run", samples, batch_size=2, accumulate=k, epochs=2, optimizer=ours, parallel=cuts
    )
    assert set(run.plan.kinds) == COURSES[samples, k]
    check(run, *bench.torch(samples, 2, k, optimizer, clip))


@pytest.mark.parametrize(("k", "clip"), [(2, None), (3, 0.5)])
def test_out_of_core(k: int, clip: float | None, tmp_path: Path) -> None:
    """Weights in a dozen pieces and a tier of two units: sums and full gradients go through the disk.

    The ragged batch of one sample is cut otherwise than the full one, so its updates are cut anew.
    """
    sizes = (64, 96, 32)
    x = np.random.default_rng(0).normal(0, 0.1, (33, 64)).astype("f4")  # no class is ever quite certain
    y = np.argmax(x[:, :32], axis=1)
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": y})
    model = nets.write_mlp(tmp_path / "mlp.onnx", sizes)
    ours = OPTIMIZERS["adam"][0](clip_norm=clip)
    options = {**EXACT, "threads": 1, "batch_size": 16, "optimizer": ours, "epochs": 2}
    run = fit(model, data, machine=Small(120_000, 300 << 20), accumulate=k, **options)
    calls = run.plan.kinds[RAGGED].graph.calls
    assert any(call.key.kind is TaskKind.RECUT for call in calls)
    assert len(run.plan.compiled.pieces["w1"]) > 10
    for row in run.history:
        assert row["written_bytes"] > 0, "nothing was spilled"
        assert row["peak_bytes"] <= run.plan.machine.base_bytes + 120_000
    module = TwoLayers(nets.mlp_weights(sizes))
    check(run, *loop(module, torch.as_tensor(x).double(), torch.as_tensor(y), 16, k, "adam", clip))


def test_passes_of_a_batch_are_a_batch_of_all(tmp_path: Path) -> None:
    mlp = nets.write_job(tmp_path, 12)
    options = {**EXACT, "shuffle": True, "epochs": 3, "optimizer": SGD(lr=0.5), "keep": ["grad/w1"]}
    one = oocdl.fit(*mlp, workdir=tmp_path / "one", batch_size=6, **options)
    three = oocdl.fit(*mlp, workdir=tmp_path / "three", batch_size=2, accumulate=3, **options)
    rows = [(row["step"], row["epoch"]) for row in three.history]
    assert rows == [(row["step"], row["epoch"]) for row in one.history] == [(n + 1, n // 2) for n in range(6)]
    np.testing.assert_allclose(losses_of(three), losses_of(one), rtol=1e-10)
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(three.weights[name][...], one.weights[name][...], rtol=1e-10, atol=1e-12)
    # The gradient that is kept is the step's, not the last pass's.
    np.testing.assert_allclose(three.kept["grad/w1"][...], one.kept["grad/w1"][...], rtol=1e-9, atol=1e-13)
    assert {t.spec.name for t in three._store.current().tensors.values()} == {"w1", "b1", "w2", "b2"}


def test_each_pass_draws_its_own_numbers(tmp_path: Path) -> None:
    """A step's loss is the mean over passes whose dropout differs, although their samples are the same."""
    model = export(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 3)),
        (torch.ones(1, 32),),
        tmp_path / "net.onnx",
        dynamic=(0,),
    )
    data = nets.write_data(tmp_path / "data.zarr", {"x": np.ones((4, 32), "f4"), "y": np.zeros(4, np.int64)})
    options = {**EXACT, "optimizer": SGD(lr=0.0), "epochs": 2}
    single = oocdl.fit(model, data, workdir=tmp_path / "single", **options)
    double = oocdl.fit(model, data, workdir=tmp_path / "double", accumulate=2, **options)
    losses = losses_of(single)
    assert len(set(losses)) == 8
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    np.testing.assert_allclose(losses_of(double), means, rtol=1e-12)


class Groups(nn.Module):
    """Groups of channels, whose two letters only the update carries to each weight, and a layer of time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 6, 3, stride=2, groups=2)
        self.time = nn.GRU(6, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.time(self.up(x).flatten(2).transpose(1, 2))[0]).transpose(1, 2)
        return found


@pytest.mark.parametrize("cuts", ["auto", {"channels": 2}])
def test_weights_are_split_alike_in_all_passes_of_a_step(cuts: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Groups()
    model = export(module, (torch.zeros(1, 2, 2, 2),), tmp_path / "net.onnx", dynamic=(0,))
    random = np.random.default_rng(0)
    x, y = random.normal(size=(5, 2, 2, 2)).astype("f4"), random.integers(0, 2, (5, 25))
    data = nets.write_data(tmp_path / "data.zarr", {"x": x, "y": y})
    options = {**EXACT, "optimizer": OPTIMIZERS["adam"][0](), "parallel": cuts}
    run = oocdl.fit(model, data, workdir=tmp_path / "run", batch_size=2, accumulate=2, epochs=2, **options)
    check(run, *loop(module.double(), torch.as_tensor(x).double(), torch.as_tensor(y), 2, 2, "adam", None))


class Interrupting:
    """Our own ``get``, with Ctrl-C pressed in one pass."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, graph: Any, keys: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return scheduler.get(graph, keys, **options)


def test_a_step_that_is_stopped_half_way_leaves_no_trace(bench: Bench, tmp_path: Path) -> None:
    """Running statistics move with every pass; a commit has those of whole steps only."""
    options: dict[str, Any] = {"batch_size": 1, "accumulate": 3, "steps": 4, "optimizer": Adam(lr=0.01)}
    whole = bench.fit(tmp_path / "whole", 7, **options)
    for at in (4, 5, 6):  # the first pass of the second step, the middle one, the last
        with pytest.raises(KeyboardInterrupt):
            bench.fit(tmp_path / f"run{at}", 7, scheduler=Interrupting(at), **options)
        assert oocdl.open(tmp_path / f"run{at}").steps == 1
        same(bench.fit(tmp_path / f"run{at}", 7, **options), whole)


def test_a_run_goes_on_to_the_same_bits_or_refuses(bench: Bench, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 2, "accumulate": 2, "shuffle": True, "seed": 3}
    whole = bench.fit(tmp_path / "whole", 7, steps=5, **options)
    for steps in (1, 3, 5):  # in the middle of an epoch, and of the next
        run = bench.fit(tmp_path / "run", 7, steps=steps, **options)
    assert nets.files_of(run) == nets.files_of(whole)
    with pytest.raises(InputError, match="accumulate was 2, is 1"):
        bench.fit(tmp_path / "run", 7, steps=6, **{**options, "accumulate": 1})
    with pytest.raises(InputError, match="accumulate must be at least 1"):
        bench.fit(tmp_path / "run", 7, **{**options, "accumulate": 0})


def test_the_plan_counts_all_passes_and_a_delayed_takes_them(bench: Bench, tmp_path: Path) -> None:
    run = bench.fit(tmp_path / "run", 8, batch_size=2, accumulate=4, parallel={"space": (2,)})
    plan = run.plan
    first, main = plan.kinds[FIRST].plan, plan.kinds[MAIN].plan
    assert plan.read_bytes == 3 * first.read_bytes + main.read_bytes
    assert plan.tasks == 3 * first.tasks + main.tasks
    (row,) = run.history
    assert row["unit_read_bytes"] == plan.read_bytes and row["unit_written_bytes"] == plan.written_bytes
    assert row["peak_bytes"] <= plan.peak_bytes
    assert "batch 2 x 4 passes" in str(plan)
    assert plan.delayed(0).compute(scheduler="threads") == pytest.approx(row["loss"], rel=1e-12)
