"""The benches and the examples run, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository in ``folder``."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip


def test_traffic_prints_a_row_for_each_model(tmp_path: Path) -> None:
    done = run(str(ROOT / "perf/traffic.py"), "--toy", "--json", "rows.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["GPT-1", "GPT-2", "ResNet-8", "ResNet-14", "U-Net 4 at 16"]
    assert all(row["read_bytes"] > row["forward_bytes"] > 0 for row in rows)
    assert all(0 < row["weight_traffic_bytes"] < row["read_bytes"] + row["written_bytes"] for row in rows)


def test_unet_measures_both_sides_and_they_agree(tmp_path: Path) -> None:
    script = str(ROOT / "perf/unet3d.py")
    done = run(script, "--toy", "--workdir", ".", "--json", "runs.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert list(runs) == ["oocdl, torch", "oocdl, onnxruntime", "PyTorch"]
    results = {name: outcomes[0]["result"] for name, outcomes in runs.items()}
    assert all(results.values()), done.stderr
    for name in list(results)[:2]:
        found = results[name]
        np.testing.assert_allclose(found["losses"], results["PyTorch"]["losses"], rtol=1e-4)
        assert set(found["unit_read"]) == {found["planned"]["unit_read"]}
        assert set(found["unit_written"]) == {found["planned"]["unit_written"]}


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A made-up head in the files that mricron-data has."""
    nib = pytest.importorskip("nibabel")
    axis = np.linspace(-1, 1, 64)
    radius = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + (axis * 1.2) ** 2)
    atlas = np.select([radius < 0.2, radius < 0.3], [77, 71], 0)
    volumes = {"ch2": 200 * (1 - radius / 2), "ch2bet": radius < 0.8, "aal": atlas}
    folder = tmp_path / "templates"
    folder.mkdir()
    for name, volume in volumes.items():
        nib.save(nib.Nifti1Image(volume.astype(np.uint8), np.eye(4)), folder / f"{name}.nii.gz")
    (folder / "aal.nii.txt").write_text("71 Caudate_L 7001\n77 Thalamus_L 7101\n")
    return folder


def test_brain_mri_trains_and_draws(tmp_path: Path, templates: Path) -> None:
    script = str(ROOT / "examples/brain_mri.py")
    words = [
        "--size",
        "small",
        "--steps",
        "4",
        "--data",
        str(templates),
        "--memory",
        "2GiB",
        "--workdir",
        "out",
    ]
    done = run(script, *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Dice  background" in done.stdout
    losses = [float(word) for word in done.stdout.split("loss  ")[1].splitlines()[0].split()[1::2]]
    assert losses[-1] < losses[0]
    assert (tmp_path / "out/brain.png").stat().st_size > 0
    assert (tmp_path / "out/prediction.nii.gz").stat().st_size > 0


def test_brain_mri_without_data_says_how_to_get_it(tmp_path: Path) -> None:
    pytest.importorskip("nibabel")
    done = run(str(ROOT / "examples/brain_mri.py"), "--data", str(tmp_path), folder=tmp_path)
    assert done.returncode != 0
    assert "apt-get install mricron-data" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
