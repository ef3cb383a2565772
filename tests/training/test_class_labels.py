"""``predict(argmax=True, nifti=...)``: classes of voxels as logits are computed, and volumes of them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import h5py
import nibabel as nib
import numpy as np
import onnx
import pytest
import torch
import zarr

import oocdl
from oocdl.data.label_volumes import sample_facts, write_labels
from oocdl.errors import DatasetError, InputError, InUseError, StoreError
from oocdl.graph.ir.index import as_slices
from oocdl.presets.unets import write_unet3d
from oocdl.storage.dataset.dataset import open_dataset
from oocdl.storage.run.lock import RunLock
from oocdl.training.prediction.outputs import ClassLabels, labels_of
from oocdl.training.prediction.predictions import Output
from tests.kit import nets
from tests.kit.commands import run as call
from tests.kit.nifti import AFFINE
from tests.kit.settings import QUICK

SHAPE = (2, 1, 12, 8, 16)


@pytest.mark.parametrize("order", range(4))
def test_pieces_of_classes_come_in_any_order(tmp_path: Path, order: int) -> None:
    """Also where many logits are equal, or all are infinite, and over what a killed call has left."""
    random = np.random.default_rng(order)
    logits = random.integers(-1, 2, (3, 5, 4, 6)).astype("f4")
    logits[0, :, 0] = -np.inf
    logits[1, :3, 1] = -np.inf
    labels = random.integers(0, 5, (3, 4, 6)).astype("u1")
    taker = ClassLabels(5, tmp_path)
    for rows in ((0, 1), (2,)):
        cuts = [((0, len(rows)),), ((0, 2), (2, 3), (3, 5)), ((0, 3), (3, 4)), ((0, 6),)]
        regions = list(itertools.product(*cuts))
        for at in random.permutation(len(regions)):
            part = logits[list(rows)][as_slices(regions[at])]
            place, given = taker.of(regions[at], part, rows, (len(rows), *labels.shape[1:]))
            labels[rows[0] : rows[-1] + 1][as_slices(place)] = given
    assert (labels == logits.argmax(1)).all() and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> oocdl.Run:
    """A run beside its data, whose samples have names and places."""
    folder = tmp_path_factory.mktemp("labels")
    random = np.random.default_rng(0)
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("image", data=random.normal(size=SHAPE).astype("f4"), chunks=(1, *SHAPE[1:]))
    group.create_array("logits", data=random.integers(0, 3, (2, *SHAPE[2:])), chunks=(1, *SHAPE[2:]))
    turned = AFFINE @ np.diag([1, -1, 1, 1])
    group.attrs.update({"samples": ["one", "two"], "affine": [AFFINE.tolist(), turned.tolist()]})
    model = write_unet3d(folder / "unet.onnx", classes=3, base=2, depth=1)
    return oocdl.fit(model, group, workdir=folder / "run", **{**QUICK, "steps": 1})


def test_labels_and_volumes_are_the_argmax_of_logits(
    run: oocdl.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.path.parent / "data.zarr"
    wanted = run.predict(data, tmp_path / "logits.zarr")["logits"][...].argmax(1)  # type: ignore[index, union-attr]
    code, said, _ = call(capsys, "predict", run.path, data, "--argmax", "--nifti", tmp_path / "n")
    assert code == 0 and "n/labels.zarr/logits: 2 × 12 × 8 × 16 uint8" in said
    assert (zarr.open_group(tmp_path / "n/labels.zarr")["logits"][...] == wanted).all()  # type: ignore[index]
    made = sorted(path.name for path in (tmp_path / "n").iterdir())
    assert made == ["labels.zarr", "one.nii.gz", "two.nii.gz"]
    for row, name in enumerate(("one", "two")):
        image: Any = nib.load(tmp_path / f"n/{name}.nii.gz")
        assert (np.asarray(image.dataobj) == wanted[row].T).all() and image.get_data_dtype() == np.uint8
        assert np.allclose(image.affine, AFFINE @ np.diag([1, 1 - 2 * row, 1, 1]), 0, 1e-6)


def test_a_folder_for_volumes_that_cannot_be_made_is_named_before_the_run(
    run: oocdl.Run, tmp_path: Path
) -> None:
    (tmp_path / "n").touch()
    with pytest.raises(StoreError, match=r"^cannot write \S*/n: File exists; check the disk$"):
        run.predict(run.path.parent / "data.zarr", tmp_path / "out.zarr", argmax=True, nifti=tmp_path / "n")
    assert not (tmp_path / "out.zarr").exists()


def test_a_dataset_that_says_no_names_is_numbered(run: oocdl.Run, tmp_path: Path) -> None:
    images = np.zeros((11, *SHAPE[1:]), "f4")
    run.predict({"image": images}, tmp_path / "out.zarr", argmax=True, nifti=tmp_path)
    names = [f"sample_{n:02d}.nii.gz" for n in range(11)]
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == names
    assert (nib.load(tmp_path / "sample_00.nii.gz").affine == np.eye(4)).all()  # type: ignore[attr-defined]


def test_labels_go_back_to_the_grid_before_resampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oocdl.data.label_volumes.PIECE_BYTES", 3 * 4 * 5)
    labels = np.random.default_rng(0).integers(0, 9, (7, 4, 5)).astype("u1")
    before = {"shape": [5, 9, 11], "affine": AFFINE.tolist()}
    told = {"affine": np.eye(4).tolist(), "codes": [1, 4], "original": before}
    seen: list[tuple[int, int]] = []

    def planes(start: int, stop: int) -> Any:
        seen.append((start, stop))
        return labels[start:stop]

    path = write_labels(tmp_path, "case", told, labels.shape, labels.dtype, planes)
    index = [((np.arange(m) + 0.5) * n / m).astype(int) for n, m in ((7, 5), (4, 9), (5, 11))]
    image: Any = nib.load(path)
    assert np.array_equal(labels[np.ix_(*index)].T, image.dataobj) and seen == [(0, 3), (3, 6), (6, 7)]
    assert np.allclose(image.affine, AFFINE, 0, 1e-6) and image.header["sform_code"] == 4
    assert image.header.get_xyzt_units()[0] == "mm" and list(tmp_path.iterdir()) == [path]
    again = write_labels(tmp_path, "again", told, labels.shape, labels.dtype, planes)
    assert again.read_bytes() == path.read_bytes()


def test_a_volume_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    def planes(start: int, stop: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_labels(tmp_path, "a", {}, (3, 4, 5), np.dtype("u1"), planes)
    with pytest.raises(DatasetError, match="sample 'a' say no place in space"):
        write_labels(tmp_path, "a", {"affine": [1, 2]}, (3, 4, 5), np.dtype("u1"), planes)
    assert not list(tmp_path.iterdir())


def test_what_has_no_classes_is_refused_before_anything_is_written(run: oocdl.Run, tmp_path: Path) -> None:
    data = run.path.parent / "data.zarr"
    for options in ({}, {"nifti": tmp_path / "n"}, {"out": tmp_path / "o", "nifti": tmp_path / "n"}):
        with pytest.raises(InputError, match=r"takes out, a Zarr group to write, or argmax and nifti"):
            run.predict(data, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"output 'y' has the shape \[2, 1, 4\]; .*threshold"):
        labels_of(Output("y", (2, 1, 4), "float32", (1, 1, 4)))
    assert labels_of(Output("y", (2, 300, 4), "float32", (1, 300, 4))) == Output(
        "y", (2, 4), "uint16", (1, 4)
    )
    twin = onnx.load(run.path.parent / "unet.onnx")
    twin.graph.node.append(onnx.helper.make_node("Identity", ["logits"], ["twin"]))
    twin.graph.output.append(twin.graph.output[0])
    twin.graph.output[1].name = "twin"
    onnx.save(twin, tmp_path / "twin.onnx")
    heads = {"targets": {"logits": "logits", "twin": "logits"}, "loss": {"logits": "dice_ce", "twin": "dice"}}
    both = oocdl.fit(tmp_path / "twin.onnx", data, workdir=tmp_path / "both", steps=1, **QUICK, **heads)
    with pytest.raises(InputError, match=r"nifti= takes one output .* 'logits' .*'twin'"):
        both.predict(data, argmax=True, nifti=tmp_path / "n")
    deep = {"targets": {"logits": "logits"}, "loss": "deep_supervision"}  # the last output has the weight 0
    run = oocdl.fit(tmp_path / "twin.onnx", data, workdir=tmp_path / "deep", steps=1, **QUICK, **deep)
    assert [*run.predict(data, argmax=True, nifti=tmp_path / "deep.nii").array_keys()] == ["logits"]
    flat = oocdl.fit(*nets.write_job(tmp_path), workdir=tmp_path / "run", steps=1, **QUICK)
    with pytest.raises(InputError, match=r"nifti= takes one output of three spatial axes; .* 'y' \[10\]"):
        flat.predict(nets.vectors(), argmax=True, nifti=tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_odd_attributes_are_refused_before_anything_is_written(run: oocdl.Run, tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "d.zarr", mode="w", attributes={"samples": ["a", "a"]})
    group.create_array("image", data=np.zeros(SHAPE, "f4"))
    with pytest.raises(DatasetError, match="d.zarr: its attribute 'samples' is to have"):
        run.predict(group, argmax=True, nifti=tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_one_process_writes_a_place(run: oocdl.Run, tmp_path: Path) -> None:
    lock = RunLock(tmp_path / ".out.zarr.lock")  # of a process that lives
    with pytest.raises(InUseError, match="in use"):
        run.predict(run.path.parent / "data.zarr", tmp_path / "out.zarr")
    lock.release()
    run.predict(run.path.parent / "data.zarr", tmp_path / "out.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["out.zarr"]


def test_labels_of_another_grid_are_no_volume_of_the_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    half = oocdl.from_torch(
        torch.nn.Conv3d(1, 2, 2, stride=2), torch.zeros(1, 1, 8, 8, 8), tmp_path / "h.onnx"
    )
    data = {"input": np.zeros((1, 1, 8, 8, 8), "f4"), "y": np.zeros((1, 4, 4, 4), "u1")}
    made = oocdl.fit(half, data, workdir=tmp_path / "run", **{**QUICK, "steps": 1})
    group = zarr.open_group(nets.write_samples(tmp_path / "s.zarr", [(8, 8, 8), (8, 8, 6)]), mode="r+")
    group["case_000"].attrs.update({"affine": AFFINE.tolist(), "spacing": [2.5, 1.1, 0.9]})
    with pytest.raises(InputError, match=r"of \[8, 8, 8\] voxels are \[4, 4, 4\]"):
        made.predict(group, argmax=True, nifti=tmp_path / "n", inputs={"input": "x"})
    found = made.predict(group, tmp_path / "out.zarr", inputs={"input": "x"})
    assert not dict(found["case_000"].attrs)


def test_volumes_of_earlier_calls_are_told_of(run: oocdl.Run, tmp_path: Path) -> None:
    (tmp_path / "old.nii.gz").touch()
    with pytest.warns(UserWarning, match="labels of other samples, too: old.nii.gz"):
        run.predict(run.path.parent / "data.zarr", argmax=True, nifti=tmp_path)


def test_nan_is_the_largest_however_classes_are_cut(tmp_path: Path) -> None:
    logits = np.array([[1.0, np.nan, 5.0, 2.0]], "f4").reshape(1, 4, 1)
    for cuts in ([(0, 4)], [(0, 2), (2, 4)], [(2, 4), (0, 2)]):
        taker = ClassLabels(4, tmp_path)
        for cut in cuts:
            _, labels = taker.of(((0, 1), cut, (0, 1)), logits[:, slice(*cut)], (0,), (1, 1))
        assert labels[0, 0] == 1


def test_a_file_of_hdf5_says_names_and_places_too(run: oocdl.Run, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["image"] = np.zeros((1, *SHAPE[1:]), "f4")
        file.attrs["samples"], file.attrs["affine"] = ["mine"], AFFINE
    run.predict(tmp_path / "d.h5", argmax=True, nifti=tmp_path / "n")
    image: Any = nib.load(tmp_path / "n/mine.nii.gz")
    assert np.allclose(image.affine, AFFINE)
    told = oocdl.data.convert(tmp_path / "d.h5", tmp_path / "d.zarr").attrs
    assert told["samples"] == ["mine"] and np.allclose(told["affine"], AFFINE)  # type: ignore[arg-type]


def test_a_library_that_is_missing_is_told_before_the_network_runs(
    run: oocdl.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(InputError, match=r"writing NIfTI needs nibabel.*'oocdl\[mri\]'"):
        run.predict({"image": np.zeros(SHAPE, "f4")}, argmax=True, nifti=tmp_path / "n")
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("name", ["/outside", "a/b", "../b", ".hidden"])
def test_a_sample_is_a_group_right_below(run: oocdl.Run, tmp_path: Path, name: str) -> None:
    zarr.open_group(tmp_path / "d.zarr", mode="w", attributes={"oocdl": {"samples": [name]}})
    with pytest.raises(DatasetError, match="a sample is a group right below it"):
        run.predict(tmp_path / "d.zarr", tmp_path / "out.zarr")


EYE = np.eye(4).tolist()


def facts_of(folder: Path, attributes: dict[str, Any]) -> Any:
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("image", data=np.zeros((3, 1, 4, 4, 4), "f4"))
    group.attrs.update(attributes)
    return sample_facts(open_dataset(folder / "data.zarr"), 3)


def test_attributes_name_and_place_samples(tmp_path: Path) -> None:
    numbered = [(f"sample_{row}", {"affine": EYE}) for row in range(3)]
    assert facts_of(tmp_path, {}) == numbered
    assert facts_of(tmp_path, {"samples": 3}) == numbered  # somebody's count
    affines = [np.diag([row, 1, 1, 1.0]).tolist() for row in range(1, 4)]
    found = facts_of(tmp_path, {"samples": ["a", "b", "c"], "affine": affines, "spacing": [3, 2, 1]})
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert [one["affine"] for _, one in found] == affines
    assert [one["spacing"] for _, one in found] == [[3.0, 2.0, 1.0]] * 3
    spacings = [[row, 1.0, 1.0] for row in range(1, 4)]
    assert [one["spacing"] for _, one in facts_of(tmp_path, {"spacing": spacings})] == spacings


@pytest.mark.parametrize(
    "attributes",
    [
        {"samples": ["a", "b"]},
        {"samples": ["a", "b", "b"]},
        {"samples": ["a", "b", "../c"]},
        {"samples": ["a", "b", ["c"]]},
        {"affine": "none"},
        {"affine": [1.0, 2.0, 3.0]},
        {"affine": [EYE] * 2},
        {"spacing": 1.0},
        {"spacing": None},
        {"spacing": "1 mm"},
        {"spacing": {"z": 1}},
        {"spacing": [[1, 1, 1]] * 2},
        {"spacing": [[1, 1, 1], [1, 1], [1, 1, 1]]},
    ],
    ids=str,
)
def test_an_attribute_that_says_something_else_is_named(tmp_path: Path, attributes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=f"its attribute '{next(iter(attributes))}' .*delete it"):
        facts_of(tmp_path, attributes)
