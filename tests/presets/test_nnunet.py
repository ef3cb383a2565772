"""nnU-Net's way in one word: its plans, its folds, and what it leaves behind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import onnx
import pytest

import oocdl
from oocdl.errors import InputError
from oocdl.presets import nnunet
from oocdl.presets.fingerprint import target_spacing, topology_of
from oocdl.presets.unets import write_nnunet
from tests.kit import nifti
from tests.kit.commands import run

SHAPES: dict[str, tuple[int, int, int]] = {f"case_{row}": (66 + row % 2, 9, 10) for row in range(5)}
QUICK = ("--memory", "2GiB", "--threads", 1, "--engine", "onnxruntime", "--steps", 2, "--no-progress")


ONE, FLAT, ALL = (1, 3, 3), (1, 2, 2), (2, 2, 2)


@pytest.mark.parametrize(
    ("spacing", "shape", "strides", "flat_kernels"),
    [
        ((1.0, 1.0, 1.0), (180, 210, 160), [ALL] * 5, 0),
        ((10.0, 1.5, 1.5), (10, 256, 216), [FLAT, FLAT, ALL, FLAT, FLAT], 2),
        ((3.0, 0.8, 0.8), (20, 320, 256), [FLAT, ALL, ALL, FLAT, FLAT, FLAT], 1),
    ],
)
def test_levels_are_those_of_nnunet(spacing: Any, shape: Any, strides: Any, flat_kernels: int) -> None:
    """Compared with ``get_pool_and_conv_props`` of nnunetv2 2.8.1; 20,000 random ones were equal, once."""
    topology = topology_of(spacing, shape, 32)
    assert topology.strides == ((1, 1, 1), *strides)
    assert topology.kernels == (*[ONE] * flat_kernels, *[(3, 3, 3)] * (len(strides) + 1 - flat_kernels))
    assert topology.widths == (32, 64, 128, 256, 320, 320, 320)[: len(strides) + 1]


def test_the_spacing_is_that_of_nnunet() -> None:
    thick = [(step, 1.0, 1.2) for step in (4.0, 5.0, 8.0, 9.0, 10.0)]
    assert target_spacing(thick, [(30, 200, 200)] * 5) == pytest.approx((4.4, 1.0, 1.2))
    assert target_spacing(thick, [(80, 200, 200)] * 5) == (8.0, 1.0, 1.2)
    thin = [(1.0, 1.1, 1.1), *thick]
    assert target_spacing(thin, [(30, 200, 200)] * 6)[0] == pytest.approx(2.5)


def test_a_folder_becomes_labels_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = nifti.nnunet(tmp_path / "Dataset001 Heart", SHAPES)
    words = ("fit", "--preset", "nnunet", folder, "--folds", 2, *QUICK, "--hours", "1e-6")
    with pytest.warns(UserWarning, match="of width 4, is predicted to take .* hours, more than hours=1e-06"):
        code, out, err = run(capsys, *words)
    assert code == 0, err
    root = tmp_path / "Dataset001 Heart.nnunet"
    splits = json.loads((root / "splits_final.json").read_text())
    assert [split["val"] for split in splits] == [[f"case_{row}"] for row in (0, 4, 3, 1, 2)]
    fold, trained = root / "fold_2", oocdl.open(root / "fold_2")
    assert (fold / "progress.png").stat().st_size > 1000 and trained.steps == 2
    labels: Any = nib.load(fold / "validation/case_3.nii.gz")
    truth: Any = nib.load(folder / "labelsTr/case_3.nii.gz")
    assert labels.shape == truth.shape and np.allclose(labels.affine, truth.affine, atol=1e-4)
    a, b = np.asarray(truth.dataobj), np.asarray(labels.dataobj)
    told = json.loads((fold / "summary.json").read_text())
    for number in (1, 2):
        found = told["metric_per_case"][0]["metrics"][str(number)]
        both, either = ((a == number) & (b == number)).sum(), (a == number).sum() + (b == number).sum()
        assert found["Dice"] == pytest.approx(2 * both / either) and found["TP"] == both
        assert found["TP"] + found["FP"] + found["FN"] + found["TN"] == a.size
    assert f"{told['mean']['1']['Dice']:.4f}" in out and "core" in out
    converting, command = (shlex.split(line) for line in out.split("  oocdl ")[1:])
    assert converting[:3] == ["convert", str(folder), "test.zarr"]
    command[command.index("test.zarr")] = str(root / "data.zarr")
    code, _, err = run(capsys, *command[:-1], tmp_path / "mirrored")
    assert code == 0 and "--mirror" in command, err
    assert len(list((tmp_path / "mirrored").glob("*.nii.gz"))) == 5
    before = {path: path.stat().st_mtime_ns for path in (fold / "validation").rglob("*")}
    assert run(capsys, *words)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in (fold / "validation").rglob("*")}
    last = trained.history[-1]
    assert last["val_dice/1"] == pytest.approx(told["mean"]["1"]["Dice"], abs=1e-6)
    nifti.save(folder / "labelsTr/case_0.nii.gz", np.zeros((66, 9, 10), "uint8"))
    for other in (folder, nifti.nnunet(tmp_path / "other", SHAPES)):
        with pytest.raises(InputError, match="of other files, or of these before they changed"):
            nnunet(other, workdir=root, folds=[2])


def test_the_network_is_nnunets(tmp_path: Path) -> None:
    """As many parameters as nnU-Net's ``PlainConvUNet`` less a head; outputs were equal, once."""
    topology = topology_of((3.0, 0.8, 0.8), (20, 320, 256), 8)
    outputs = write_nnunet(tmp_path / "net.onnx", topology, in_channels=2, classes=3)
    model = onnx.load(tmp_path / "net.onnx")
    assert outputs == ("logits", *(f"logits_{level}" for level in range(1, 5)))
    assert sum(np.prod(weight.dims) for weight in model.graph.initializer) == 16_107_295
    with pytest.raises(InputError, match="too small"):
        write_nnunet(tmp_path / "x", topology_of((1.0,) * 3, (7, 7, 7), 8), in_channels=1, classes=2)


@pytest.mark.parametrize(
    ("told", "options", "message"),
    [
        ({"labels": {"background": 0, "whole": [1, 2], "rim": 2}}, {}, "does not train regions"),
        ({"labels": {"background": 0, "a": 1, "b": 3, "c": 2, "d": 7}}, {}, "numbered from 0"),
        ({"channel_names": {"0": "CT", "1": "T1"}}, {}, "CT beside other channels"),
        (
            {"channel_names": {"0": "T1", "1": "noNorm"}},
            {},
            "channel 'noNorm' asks for another normalization: pass normalize=",
        ),
        ({"channel_names": {"0": "T1", "1": "noNorm"}}, {"normalize": None, "folds": [5]}, "got 5"),
        ({}, {"folds": [5]}, "folds are 0 to 4 or 'all', got 5"),
        ({}, {"epochz": 5}, "nnunet takes no 'epochz' .did you mean 'epochs'"),
        ({}, {"batch_size": 0}, "batch_size"),
    ],
)
def test_what_is_not_trained_is_refused(told: Any, options: Any, message: str, tmp_path: Path) -> None:
    folder = nifti.nnunet(tmp_path / "a", SHAPES, **told)
    with pytest.raises(InputError, match=message):
        nnunet(folder, **options)
    assert not (tmp_path / "a.nnunet/data.zarr").exists()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([{"train": ["case_1", "case_2", "case_3"], "val": ["case_0"]}], "and 'case_4' is not; mend it"),
        ([{"train": [*SHAPES], "val": ["case_0"]}], "and 'case_0' is not"),
        ([{"train": [*SHAPES], "val": ["other"]}], "and 'other' is not"),
        ([{"val": ["case_0"]}], "has no 'train' and 'val' of each fold"),
        ({"train": [*SHAPES]}, "has no 'train'"),
        (None, "has no 'train'"),
    ],
)
def test_splits_of_other_cases_are_refused(told: Any, message: str, tmp_path: Path) -> None:
    folder, root = nifti.nnunet(tmp_path / "a", SHAPES), tmp_path / "a.nnunet"
    root.mkdir()
    (root / "splits_final.json").write_text("{" if told is None else json.dumps(told))
    with pytest.raises(InputError, match=message) as caught:
        nnunet(folder, folds=[0])
    assert "\n" not in str(caught.value) and not (root / "data.zarr").exists()


def test_few_cases_are_trained_on_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = nifti.nnunet(tmp_path / "a", dict(list(SHAPES.items())[:2]))
    code, _, err = run(capsys, "fit", "--preset", "nnunet", folder, *QUICK)
    assert code == 2 and "2 cases are too few for 5 folds" in err
    code, out, err = run(capsys, "fit", "--preset", "nnunet", folder, "--folds", "all", *QUICK)
    assert code == 0 and "trained on all cases" in out, err
    for words, message in (
        (("data.zarr",), "takes one folder"),
        (("--loss", "dice"), "does not take --loss"),
        (("--no-resume",), "does not take --resume"),
        (("--momentum", 0.5), "give --optimizer with it"),
    ):
        code, _, err = run(capsys, "fit", "--preset", "nnunet", folder, *words)
        assert code == 2 and message in err
    code, _, err = run(capsys, "fit", folder)
    assert code == 2 and "fit takes a model and a dataset" in err
