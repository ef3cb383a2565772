"""``fit`` and ``plan`` with a module: its file is in the run, the same module resumes, another is refused."""

from __future__ import annotations

import copy
import os
import re
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

import oocdl
from oocdl.errors import BudgetError, DatasetError, InputError, StoreError
from oocdl.graph.onnx.onnx_file import network_differences
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.pytorch import child, export
from tests.kit.nets import write_data, write_mlp
from tests.kit.settings import QUICK
from tests.kit.torch_modules import SAMPLES, away_from_start, error, frozen, volume

OPTIONS: dict[str, Any] = {**QUICK, "loss": "mse", "steps": 2, "batch_size": 2, "targets": {"output": "y"}}
OPTIONS |= {"inputs": {"x": "x"}}


class Net(nn.Module):
    """A linear layer with a buffer, and a norm."""

    shift: Tensor

    def __init__(self, shift: float = 0.5, width: int = 3) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.register_buffer("shift", torch.full((width,), shift))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.fc(x)) + self.shift
        return result


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``data.zarr`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(4, 6)).astype("f4"), "y": random.normal(size=(4, 3)).astype("f4")}
    return write_data(tmp_path / "data.zarr", arrays)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("module-*"))


@pytest.mark.parametrize("resume", [True, False, "restart"])
def test_a_process_that_is_killed_while_it_exports_is_in_nobodys_way(
    data: Path, monkeypatch: pytest.MonkeyPatch, resume: bool | str
) -> None:
    with monkeypatch.context() as patch:
        real = export.in_child

        def seen(what: str, call: Callable[[], Any], *limit: int) -> Any:
            found = real(what, call, *limit)
            if "exporter" in what:
                shutil.copytree("Net.run", "killed.run")
            return found

        patch.setattr(export, "in_child", seen)
        oocdl.fit(Net(), data, **OPTIONS)
    assert [path.name[:7] for path in Path("killed.run").iterdir()] == [".oocdl-"]
    run = oocdl.fit(Net(), data, **OPTIONS, workdir="killed.run", resume=resume)
    assert run.finished and not list(Path("killed.run").glob(".*")) and oocdl.verify("killed.run").sound


@pytest.mark.parametrize("workdir", ["afile", "afile/below", "denied"])
def test_a_folder_that_cannot_be_written_is_named_in_one_line(
    data: Path, monkeypatch: pytest.MonkeyPatch, workdir: str
) -> None:
    Path("afile").touch()
    Path("denied").mkdir()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, *how: Path(path).name != "denied" and may(path, *how))
    cure = "choose a place that you may write to" if workdir == "denied" else "check the disk"
    with pytest.raises(StoreError, match=rf"^cannot write (to )?\S*/{workdir}: \w[\w ]+; {cure}$"):
        oocdl.fit(Net(), data, **OPTIONS, workdir=workdir)


def test_the_file_is_in_the_run_and_goes_with_it(data: Path, tmp_path: Path) -> None:
    module = Net()
    plan = oocdl.plan(module, data, **OPTIONS)
    assert "Net.onnx" in str(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["data.zarr"]  # a plan leaves nothing
    run = oocdl.fit(module, data, **OPTIONS)
    assert run.path == tmp_path / "Net.run" and len(files(run.path)) == 1
    shutil.move(run.path, tmp_path / "moved")
    moved = oocdl.open(tmp_path / "moved")
    moved.predict(data, tmp_path / "out.zarr", memory="4GiB", inputs={"x": "x"})
    moved.load_into(module)
    assert error(module.fc.weight.detach(), torch.as_tensor(moved.weights["fc.weight"][...])) == 0
    assert inspect_onnx(moved.export(tmp_path / "trained.onnx")).metadata is not None


@pytest.mark.parametrize(
    ("kinds", "loss"),
    [({"image": "u1", "mask": "f4"}, "mse"), ({"image": "i2", "label": "f4"}, "mse"),
     ({"image": "i2", "label": "u1"}, "dice_ce")],
)  # fmt: skip
def test_images_of_whole_numbers_are_the_input(kinds: dict[str, str], loss: str) -> None:
    arrays = {name: np.zeros((4, 1, 8, 8), kind) for name, kind in kinds.items()}
    plan = oocdl.plan(nn.Conv2d(1, 1, 3, padding=1), arrays, **{**QUICK, "loss": loss})
    assert plan.compiled.feeds["input"] == "image"


def test_the_dataset_is_opened_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], zarr.open_group

    def noted(*given: Any, **options: Any) -> Any:
        opened.append(given)
        return real(*given, **options)

    monkeypatch.setattr(zarr, "open_group", noted)
    oocdl.plan(Net(), data, **OPTIONS)
    assert len(opened) == 1
    oocdl.fit(Net(), data, **OPTIONS)
    assert len(opened) == 2


def test_nothing_of_what_the_module_keeps_is_kept(data: Path) -> None:
    """Caches, counts and hooks of the user's: the module is called in copies of this process only."""
    module, seen = Net(), list[int]()
    cached = cache(lambda width: seen.append(width) or torch.ones(width))
    module.norm.register_forward_hook(lambda part, given, made: made * cached(made.shape[1]))
    oocdl.plan(module, data, **OPTIONS)
    assert not seen and not cached.cache_info().currsize


def test_the_same_module_resumes_whatever_its_weights_are(data: Path) -> None:
    torch.manual_seed(0)
    module = Net()
    whole = oocdl.fit(copy.deepcopy(module), data, workdir="whole", **{**OPTIONS, "steps": 4})
    oocdl.fit(module, data, **OPTIONS)
    names = files(Path("Net.run"))
    run = oocdl.fit(Net(), data, **{**OPTIONS, "steps": 4})  # fresh weights: those of the run go on
    assert run.steps == 4 and files(Path("Net.run")) == names
    assert np.array_equal(run.weights["fc.weight"][...], whole.weights["fc.weight"][...])
    run.load_into(module)
    assert int(module.norm.num_batches_tracked) == 4
    assert oocdl.fit(module, data, **{**OPTIONS, "steps": 4}).steps == 4  # with loaded weights, too


CHANGES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another width": (lambda: Net(width=2), "'fc.weight' is [3, 6] of float32, now [2, 6]"),
    "a frozen layer": (
        lambda: frozen(Net(), "fc"), "'fc.weight' is a parameter, now a parameter that is frozen"),
    "a norm in evaluation mode": (
        lambda: Net().eval(), "'norm.running_mean' is a statistic, now a buffer; call its train(), if"),
    "another buffer": (lambda: Net(shift=0.7), "the buffer 'shift' holds other numbers"),
    "another class": (lambda: nn.Sequential(nn.Linear(6, 3)), "it is a Net, now a Sequential"),
}  # fmt: skip


def test_another_module_is_refused_and_restart_takes_it(data: Path) -> None:
    oocdl.fit(Net(), data, workdir="run", **OPTIONS)
    names = files(Path("run"))
    for make, message in CHANGES.values():
        module = make()
        inputs = {"input" if isinstance(module, nn.Sequential) else "x": "x"}
        with pytest.raises(InputError, match=re.escape(message)):
            oocdl.fit(module, data, workdir="run", **{**OPTIONS, "inputs": inputs})
        assert files(Path("run")) == names
    with pytest.raises(StoreError, match="a run is in .*run already"):
        oocdl.fit(Net(), data, workdir="run", resume=False, **OPTIONS)
    with pytest.raises(BudgetError):
        oocdl.fit(Net(shift=0.7), data, workdir="run", resume="restart", **{**OPTIONS, "memory": "1MiB"})
    assert files(Path("run")) == names and oocdl.open("run").steps == 2  # the old run is as it was
    run = oocdl.fit(Net(shift=0.7), data, workdir="run", resume="restart", **OPTIONS)
    assert files(Path("run")) != names and len(files(Path("run"))) == 1 and run.steps == 2


def test_a_run_of_a_file_is_not_one_of_a_module(data: Path, tmp_path: Path) -> None:
    write_mlp(tmp_path / "net.onnx")
    options = {**OPTIONS, "targets": {"y": "y"}}
    oocdl.fit("net.onnx", data, workdir="run", **options)
    with pytest.raises(InputError, match="of a file that no module was written to"):
        oocdl.fit(Net(), data, workdir="run", **OPTIONS)
    with pytest.raises(InputError, match="does not say what its weights are called in PyTorch"):
        oocdl.open("run").load_into(Net())


def test_a_refused_run_leaves_nothing(data: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        oocdl.fit(Net(), data, **{**OPTIONS, "memory": "1MiB"})
    with pytest.raises(
        InputError,
        match="Linear cannot be called with samples of input=.6. of float32: RuntimeError.*from_torch",
    ):
        oocdl.fit(nn.Linear(5, 3), data, **{**OPTIONS, "inputs": {"input": "x"}})
    with pytest.raises(DatasetError, match="pass inputs="):
        oocdl.fit(nn.Linear(6, 3), data, **{**OPTIONS, "inputs": None})
    assert [path.name for path in tmp_path.iterdir()] == ["data.zarr"]


def test_volumes_without_a_channel_axis(tmp_path: Path) -> None:
    """A batch of three volumes is no volume of three channels, although Conv3d would take it for one."""
    arrays = volume(np.random.default_rng(0))
    write_data(tmp_path / "data.zarr", {"x": arrays["x"][:, 0], "y": arrays["target"]})
    options = {**OPTIONS, "loss": "dice_ce", "inputs": {"input": "x"}, "batch_size": SAMPLES}
    for channels in (1, 2, 3):
        net = nn.Sequential(nn.Conv3d(channels, 2, 3, padding=1))
        if channels == 1:
            plan = oocdl.plan(net, tmp_path / "data.zarr", **options)
            assert "layers" in str(plan)
            continue
        with pytest.raises(InputError, match="Sequential cannot be called with samples of input=.8, 8, 8."):
            oocdl.plan(net, tmp_path / "data.zarr", **options)


class Pairs(Net):
    """Divides by what pairs of samples differ in, as discriminators do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y / y.view(2, -1, 3).std(0).repeat(2, 1)


def test_a_batch_may_have_to_be_made_of_groups(data: Path) -> None:
    assert "layers" in str(oocdl.plan(Pairs(), data, **OPTIONS))


def test_a_module_that_does_not_fit_is_left_as_it_is(data: Path) -> None:
    run = oocdl.fit(Net(), data, workdir="run", **OPTIONS)
    wider, other = Net(width=2), nn.Sequential(nn.Linear(6, 3))
    before = copy.deepcopy(wider.state_dict())
    with pytest.raises(InputError, match=r"'fc.weight' is .2, 6., in the run .3, 6.") as caught:
        run.load_into(wider)
    assert "'norm.running_mean'" in str(caught.value) and "and 1 more" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in wider.state_dict().items())
    with pytest.raises(
        InputError, match=r"Sequential is not the Net of this run: it has no 'fc.weight'.*more"
    ):
        run.load_into(other)
    extra = Net()
    extra.head = nn.Linear(2, 2)
    with pytest.raises(InputError, match="the run has no 'head.weight'"):
        run.load_into(extra)
    with pytest.raises(InputError, match="takes a torch.nn.Module, got str"):
        run.load_into("net")
    half = away_from_start(Net())
    run.load_into(half)  # in float64: the module's own dtype stays
    assert half.fc.weight.dtype == torch.float64


class Chosen(Net):
    """The columns that a constant mask chooses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, self.shift > 0]


def test_a_constant_mask_chooses_columns(data: Path, tmp_path: Path) -> None:
    """Tensors without contents cannot say how many."""
    module = Chosen()
    module.shift[0] = -1
    group = zarr.open_group(data)
    group["two"] = np.asarray(group["y"])[:, :2]
    made = oocdl.fit(module, data, **{**OPTIONS, "targets": {"output": "two"}}).predict(
        data, tmp_path / "out.zarr"
    )
    assert np.asarray(made["output"]).shape == (4, 2)


class Passing(Net):
    """Its inputs beside what it computes."""

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return super().forward(x), x, ids


def test_outputs_that_are_inputs_are_predicted(data: Path, tmp_path: Path) -> None:
    zarr.open_group(data)["ids"] = np.arange(8).reshape(4, 2)
    ends = {"loss": {"output_0": "mse"}, "targets": {"output_0": "y"}, "inputs": {"x": "x", "ids": "ids"}}
    run = oocdl.fit(Passing(), data, **{**OPTIONS, **ends})
    made = run.predict(data, tmp_path / "out.zarr")
    for name, wanted in (("output_1", "x"), ("output_2", "ids")):
        assert np.array_equal(np.asarray(made[name]), np.asarray(zarr.open_group(data)[wanted]))


class WithANumber(Net):
    """With a number of the whole batch beside the output of its samples, as regularizers are returned."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return result, result.square().mean()


def test_a_number_beside_the_outputs_has_no_batch(data: Path) -> None:
    """Weights, gradients of which it has as well, are trained by the loss alone."""
    torch.manual_seed(0)
    module, twin = WithANumber(), Net()
    twin.load_state_dict(module.state_dict())
    with_number = oocdl.fit(
        module, data, **{**OPTIONS, "targets": {"output_0": "y"}, "loss": {"output_0": "mse"}}
    )
    alone = oocdl.fit(twin, data, **OPTIONS)
    np.testing.assert_allclose(with_number.weights["fc.weight"][...], alone.weights["fc.weight"][...], 1e-5)


def test_weights_by_every_name(data: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))
            return result

    module = Tied()
    run = oocdl.fit(module, data, **{**OPTIONS, "freeze": ("b.weight",)})  # by either name
    assert "b.weight" not in list(run.weights) and "a.weight" in list(run.weights)
    assert np.array_equal(run.weights["b.weight"][...], module.a.weight.detach().numpy())
    with pytest.raises(KeyError):
        run.weights["c.weight"]
    run.load_into(module)
    assert module.b.weight is module.a.weight


def halved(x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x * 0.5
    return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripts are on their way out of PyTorch
    SCRIPT = torch.jit.script(halved)


class Looped(nn.Module):
    """A script, of which a file keeps the loop."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.fc, self.times = nn.Linear(4, 2), times

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(SCRIPT(x, self.times))


def test_loops_of_equal_modules_are_equal(tmp_path: Path) -> None:
    example = torch.zeros(2, 4)
    first, second, other = (
        inspect_onnx(oocdl.from_torch(Looped(times), example, tmp_path / name).path)
        for name, times in (("a.onnx", 3), ("b.onnx", 3), ("c.onnx", 2))
    )
    assert "Loop" in {node.op for node in first.nodes}
    assert network_differences(first, second) == "" != network_differences(first, other)


class Pair(nn.Module):
    """Two layers that ``__init__`` makes in either order."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def test_the_order_in_which_layers_are_made_is_no_difference(tmp_path: Path) -> None:
    example = torch.zeros(2, 4)
    first, second = (
        inspect_onnx(oocdl.from_torch(Pair(names), example, tmp_path / f"{names[0]}.onnx").path)
        for names in (("a", "b"), ("b", "a"))
    )
    assert network_differences(first, second) == ""


def test_a_copy_that_cannot_go_backward_leaves_the_work_to_its_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, with a build for CUDA: a run, a step of one's own, another run."""
    monkeypatch.setattr(child, "_goes_backward", lambda: False)
    before = os.getpid()
    assert child.in_child("a call", os.getpid) == before
    module = torch.nn.Linear(3, 2)
    made = oocdl.from_torch(module, torch.zeros(1, 3), tmp_path / "net.onnx")
    assert made.path.is_file()
