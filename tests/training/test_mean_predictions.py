"""``predict`` with probabilities, of several runs and of mirrored samples, against PyTorch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

import oocdl
from oocdl.errors import DatasetError, InputError
from oocdl.planning.machine import Machine
from oocdl.presets.fingerprint import Topology
from oocdl.presets.unets import write_nnunet
from oocdl.runtime.session import Session
from tests.kit import nets
from tests.kit.commands import run as call
from tests.kit.models import UNet3d
from tests.kit.runs import Killed, passes_of
from tests.kit.settings import EXACT, QUICK

pytestmark = pytest.mark.usefixtures("planned_once", "exported_once")
UNIT_BYTES = 600_000
"""Units of these networks are cut to this size: no stored volume is whole in one."""
ODD = [(9, 8, 10), (16, 12, 8)]
Network = tuple[oocdl.Run, nn.Module, Callable[[Tensor], Tensor]]
"""A run, its module with the trained weights, and what is done to its samples first."""


def volumes(seed: int, shift: float) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(shift, 1 + shift, (2, 1, 12, 8, 16)).astype("f4")
    return {"x": x, "y": (x[:, 0] > shift).astype("u1") + (random.uniform(size=x[:, 0].shape) > 0.8)}


def ct(data: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """nnU-Net's normalisation of CT, by the labelled voxels of the data that a run has."""
    marked = data["x"][:, 0][data["y"] > 0].astype(np.float64)
    low, high = np.percentile(marked, (0.5, 99.5))
    return lambda x: (x.clip(low, high) - marked.mean()) / marked.std()


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> list[Network]:
    """A run that normalises as CT by numbers of its own, and one that does not."""
    folder, found = tmp_path_factory.mktemp("runs"), []
    torch.manual_seed(0)
    modules = [UNet3d(base=2, depth=1).double().train() for _ in range(2)]
    model = oocdl.from_torch(modules[0], torch.zeros(1, 1, 8, 8, 8).double(), folder / "net.onnx")
    for seed, (module, method) in enumerate(zip(modules, ("ct", None), strict=True)):
        data = volumes(seed, seed + 1.0)
        how = {**EXACT, "steps": 1 + seed, "lr": 0.05, "loss": "dice_ce", "normalize": method}
        run = oocdl.fit(model, data, workdir=folder / f"run{seed}", **how)
        run.load_into(module)
        found.append((run, module.eval(), ct(data) if method else lambda x: x))
    return found


def read(group: zarr.Group) -> np.ndarray:
    ((_, array),) = group.arrays()
    return np.asarray(array)


def mean_of(networks: Sequence[Network], x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """What PyTorch predicts: softmax, mirrored back, the mean of all."""
    parts = []
    with torch.no_grad():
        for _, module, normalized in networks:
            for count in range(len(axes) + 1):
                for flip in itertools.combinations([axis + 2 for axis in axes], count):
                    image = normalized(torch.from_numpy(x).double()).flip(flip)
                    parts.append(module(image).softmax(1).flip(flip))
    return torch.stack(parts).mean(0).numpy()


@pytest.mark.parametrize(("mirror", "cut"), [(True, False), ((0,), True)])
def test_means_are_pytorchs(
    networks: list[Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: Any, cut: bool
) -> None:
    real, run_pass, largest = Machine.limits, Session.run_pass, []
    if cut:
        monkeypatch.setattr(Machine, "limits", lambda self, settings, _: real(self, settings, UNIT_BYTES))

    def watched(self: Session, plan_id: str, info: Any) -> Any:
        largest.append(self.compiled[plan_id].plan.peak_unit_bytes)
        return run_pass(self, plan_id, info)

    monkeypatch.setattr(Session, "run_pass", watched)
    data, out = {"x": volumes(7, 1.5)["x"]}, tmp_path / "out.zarr"
    networks = networks[::-1] if cut else networks
    runs = [run for run, _, _ in networks]
    found = oocdl.predict(runs, data, out, probabilities=True, mirror=mirror, batch_size=1 + (not cut))
    wanted = mean_of(networks, data["x"], (0, 1, 2) if mirror is True else mirror)
    np.testing.assert_allclose(read(found), wanted, rtol=0, atol=1e-12)
    classes = oocdl.predict([run.path for run in runs], data, out, argmax=True, mirror=mirror)
    assert np.array_equal(read(classes), wanted.argmax(1))
    assert (max(largest) <= UNIT_BYTES) == cut


def padded(do: Callable[[Tensor], Tensor], sides: list[int]) -> Callable[[Tensor], Tensor]:
    return lambda image: nn.functional.pad(do(image), sides)


def test_samples_of_own_sizes_and_volumes_from_the_command_line(
    networks: list[Network], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = zarr.open_group(nets.write_samples(tmp_path / "odd.zarr", ODD), mode="r")
    first, second = (run.path for run, _, _ in networks)
    words = ("--with", second, "--mirror", "--argmax", "--nifti", tmp_path / "n")
    said = call(capsys, "predict", first, tmp_path / "odd.zarr", *words)
    assert said[0] == 0, said
    for row, shape in enumerate(ODD):
        pads = [(-extent % 2 // 2, -extent % 2 - -extent % 2 // 2) for extent in shape]
        x = np.asarray(group[f"case_{row:03}/x"])
        inner = tuple(slice(low, low + extent) for (low, _), extent in zip(pads, shape, strict=True))
        sides = [side for pair in pads[::-1] for side in pair]
        twins = [(run, net, padded(do, sides)) for run, net, do in networks]
        wanted = mean_of(twins, x[None], (0, 1, 2)).argmax(1)[0][inner]
        image: Any = nib.load(tmp_path / f"n/case_{row:03}.nii.gz")
        assert np.array_equal(np.asarray(image.dataobj).T, wanted)


def test_of_deep_supervision_the_first_output_is_predicted(tmp_path: Path) -> None:
    strides = ((1, 1, 1), (2, 2, 2), (2, 2, 2), (2, 2, 2))
    topology = Topology((2, 2, 2, 2), ((1, 3, 3),) * 4, strides)
    write_nnunet(tmp_path / "deep.onnx", topology, in_channels=1, classes=3)
    data = {"image": np.zeros((1, 1, 16, 16, 16), "f4"), "label": np.zeros((1, 16, 16, 16), "u1")}
    loss = oocdl.losses.DeepSupervision(weights=(0.7, 0.3))
    run = oocdl.fit(tmp_path / "deep.onnx", data, workdir=tmp_path / "run", loss=loss, steps=1, **QUICK)
    for how, names in (({}, ["logits", "logits_1"]), ({"mirror": (1,)}, ["logits"])):
        found = run.predict({"image": data["image"]}, tmp_path / "out.zarr", **how)
        assert sorted(found.array_keys()) == names


def test_a_killed_mean_goes_on_with_the_same_question_alone(
    networks: list[Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, first = tmp_path / "out.zarr", networks[0][0].path
    paths, data = [run.path for run, _, _ in networks], {"x": volumes(7, 1.5)["x"]}
    others: list[tuple[Any, Any]] = [([first, first], (0,)), (paths, (1,))]
    for runs, mirror in [(paths, (0,)), *others]:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            passes_of(patch, 1)
            oocdl.predict(paths, data, out, mirror=(0,))
        with monkeypatch.context() as patch:
            seen = passes_of(patch)
            oocdl.predict(runs, data, out, mirror=mirror)
        assert seen == ([(1,)] if (runs, mirror) == (paths, (0,)) else [(0,), (1,)])


def flat_run(folder: Path, name: str, final: str = "", classes: int = 3, **how: Any) -> oocdl.Run:
    """A run of a perceptron; of numbers where the loss takes such."""
    data = nets.vectors()
    if how.get("loss") in ("mse", "bce"):
        data["y"] = np.eye(classes)[data["y"]]
    model = nets.write_mlp(folder / f"{name}.onnx", (6, 8, classes), final)
    how = {**EXACT, "steps": 2, "batch_size": 5, "lr": 0.1, **how}
    return oocdl.fit(model, data, workdir=folder / f"{name}.run", **how)


def test_probabilities_are_what_the_loss_takes_them_for(tmp_path: Path) -> None:
    data = {"x": nets.vectors()["x"]}

    def predicted(runs: Any, **how: Any) -> np.ndarray:
        return read(oocdl.predict(runs, data, tmp_path / "out.zarr", **how))

    plain, bce = flat_run(tmp_path, "plain"), flat_run(tmp_path, "bce", loss="bce")
    ended = flat_run(tmp_path, "ended", "Softmax", logits="auto", targets={"y": "y"}, ema=0.5)
    numbers = [flat_run(tmp_path, f"mse{seed}", loss="mse", steps=1 + seed) for seed in range(2)]
    raw = torch.from_numpy(predicted(plain))
    assert np.allclose(predicted(plain, probabilities=True), raw.softmax(1), 0, 1e-14)
    ones = torch.from_numpy(predicted(bce)).sigmoid()
    assert np.allclose(predicted(bce, probabilities=True), ones, 0, 1e-14)
    versions = [predicted(ended, which=which) for which in ("last", "ema")]
    assert np.allclose(predicted(ended, probabilities=True), versions[0], 0, 1e-14), "no softmax of a softmax"
    both = predicted([ended, ended, plain], which=["last", "ema", None])
    assert np.allclose(both, (sum(versions) + raw.softmax(1).numpy()) / 3, 0, 1e-14)
    assert np.allclose(predicted(numbers), sum(map(predicted, numbers)) / 2, 0, 1e-14)
    wider = flat_run(tmp_path, "wider", classes=4)
    other = flat_run(tmp_path, "other", precision="float32")
    for runs, how, said in (
        (numbers, {"probabilities": True}, "output 'y' has the loss MSE, which knows no probabilities"),
        (plain, {"probabilities": True, "argmax": True}, "argmax writes classes"),
        (plain, {"mirror": True}, "some of the 0 spatial axes"),
        *((plain, {"mirror": mirror}, "mirror takes True, or some") for mirror in ((), 0, None, "0")),
        ([plain, wider], {}, r"a mean is of equal outputs: run 1 has .*\(1, 3\).*run 2 .*\(1, 4\)"),
        ([plain, bce], {}, "a mean is of equal outputs"),
        ([plain, other], {}, "equal precision, targets and multiples of sizes: .*float64.*float32"),
        ([plain, ended], {"which": ["last"]}, "a version of each run, got 1 of 2"),
        ([], {}, "a version of each run, got 0 of 0"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said) as refused:
            predicted(runs, **how)
        assert "\n" not in str(refused.value)
    data["x"][3, 2] = np.nan
    for runs in (plain, [plain, plain]):
        with pytest.raises(DatasetError, match=r"^array 'x' of .* number nan in sample 3 at \[2\]"):
            predicted(runs)
