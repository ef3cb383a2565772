"""The benches and the examples run, at toy size."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import oocdl
from oocdl.engines.engine import get_engine
from oocdl.errors import ResourceError
from oocdl.presets.unets import write_unet3d
from tests.kit import nets
from tests.kit.code import ROOT
from tests.kit.commands import python, script

CHROMIUM = pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")


WITHOUT_FILES = ("traffic", "planning", "placing", "slots", "grouped", "attention")
"""Benches that write nothing but their rows."""


def example(folder: Path, name: str, words: str = "") -> str:
    """What an example prints."""
    return script(ROOT / f"examples/{name}.py", folder, *words.split())


def bench(folder: Path, name: str, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """What a bench prints at toy size, and the rows that it writes."""
    place = [] if name in WITHOUT_FILES else ["--workdir", "."]
    words = ("--toy", "--json", "rows.json", *place, *words)
    done = python(ROOT / f"perf/{name}.py", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "rows.json").read_text())["rows"]


def test_traffic_prints_a_row_for_each_model(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "traffic")
    assert [row["model"] for row in rows] == ["GPT-1", "GPT-2", "ResNet-8", "ResNet-14", "U-Net 4 at 16"]
    assert all(row["read_bytes"] > row["forward_bytes"] > 0 for row in rows)
    assert all(0 < row["weight_traffic_bytes"] < row["read_bytes"] + row["written_bytes"] for row in rows)


def test_a_gpu_is_compared_with_pytorch_on_the_same(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "gpu", "--steps", "2")
    assert [row["name"] for row in rows] == ["PyTorch, as it comes", "PyTorch, exact float32", "oocdl 1 of 1"]
    np.testing.assert_allclose(rows[2]["losses"], rows[1]["losses"], rtol=1e-4)


@pytest.mark.slow
def test_planning_prints_a_row_for_each_grid(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "planning", "--grids", "2x2x2,8x1x1")
    assert [row["grid"] for row in rows] == ["2x2x2", "8x1x1"]
    assert all(row["units"] > row["layers"] > 0 and row["cpu_seconds"] > 0 for row in rows)


@pytest.mark.slow
def test_placing_prints_a_row_for_each_network(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "placing")
    assert [row["network"] for row in rows] == ["unet8", "gpt"]
    for row in rows:
        assert row["calls"] > row["units"] > 0 and all(seconds > 0 for seconds in row["seconds"].values())
        assert row["all_bytes"] > row["share_bytes"] > 0


@pytest.mark.slow
def test_slots_prints_a_row_for_each_number(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "slots", "--slots", "1,2,32")
    cases = [(network, slots) for network in ("unet8", "gpt") for slots in (1, 2, 32)]
    assert [(row["network"], row["slots"]) for row in rows] == cases
    assert all(row["ideal_seconds"] > 0 and row["speedup"] > 0 and row["units"] > 0 for row in rows)


@pytest.mark.slow
def test_grouped_and_attention_print_a_row_for_each_case(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "grouped")
    assert len(rows) == 21 and all(row["oocdl"] > 0 and row["planes"] > 0 for row in rows)
    _, rows = bench(tmp_path, "attention")
    assert len(rows) == 6
    for row in rows:
        assert set(row["seconds"]) == {"PyTorch", "torch", "onnxruntime"}
        assert all(error < 1e-5 for error in row["errors"].values()), row


def rounds(folder: Path, name: str, only: str, *words: str) -> dict[str, dict[str, Any]]:
    """Rows of a bench of variants, by their names; all that are not refused have PyTorch's losses."""
    printed, rows = bench(folder, name, "--only", only, *words)
    found = {row["variant"]["name"]: row for row in rows}
    assert all(f"| {name} " in printed for name in found)
    for row in found.values():
        if not row["why"]:
            assert row["seconds"] > 0 and row["practicality"] > 0 and row["flop_seconds"] > 0
            assert row["loss_off"] < (1e-4 if row["variant"]["precision"] == "float32" else 0.1)
    return found


@pytest.mark.slow
def test_unet_sets_all_ways_beside_each_other(tmp_path: Path) -> None:
    # The ways that no other bench here takes.
    only = "PyTorch + disk hooks,oocdl 1/4 (*,oocdl bf16 1/4"
    rows = rounds(tmp_path, "networks", only, "--networks", "unet")
    told = rows.pop("oocdl bf16 1/4")["why"]
    assert told == "" or told.startswith("refused: precision")
    assert list(rows) == ["PyTorch", "PyTorch + disk hooks", "oocdl 1/4 (ONNX Runtime)", "PyTorch bf16"]
    assert all(row["why"] == "" for row in rows.values())
    assert rows["PyTorch + disk hooks"]["read_bytes"] > rows["PyTorch"]["read_bytes"] == 0


@CHROMIUM
@pytest.mark.slow
def test_dashboard_tells_what_a_page_costs_the_run_and_the_browser(tmp_path: Path) -> None:
    _, (found,) = bench(tmp_path, "dashboard", "--only", "cost")
    assert set(found["drawn elsewhere"]["seconds"]) == {"alone", "written", "shown"}
    assert all(seconds > 0 for seconds in found["drawn elsewhere"]["seconds"].values())
    printed, (found,) = bench(tmp_path, "dashboard", "--only", "large")
    assert found["large"]["tabs"]["Overview"]["updates"] > 0
    assert found["large"]["tabs"]["Learning"]["process"] > 0 and "| Overview " in printed


@pytest.mark.slow
def test_networks_of_many_families_have_the_losses_of_pytorch(tmp_path: Path) -> None:
    only = "oocdl 1/4,PyTorch + checkpoints"
    printed, rows = bench(tmp_path, "networks", "--only", only, "--networks", "resnet50,gpt,lstm,mlp")
    ways = ["PyTorch", "PyTorch + checkpoints", "oocdl 1/4"]
    names = ("ResNet-8", "GPT-1", "LSTM 2x16", "MLP 2x64")
    assert [row["variant"]["name"] for row in rows] == 4 * ways
    assert [row["network"] for row in rows] == [n for n in names for _ in ways]
    assert all(row["why"] == "" and row["loss_off"] < 1e-4 for row in rows)
    assert printed.count("| LSTM 2x16 ") == 2, "one table of all, without PyTorch in memory"


@pytest.mark.slow
def test_overhead_tells_where_time_goes(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "overhead")
    assert [row["way"] for row in rows] == ["serial", "own", "dask"]
    assert all(row["seconds"] > 0 and row["tasks"] == rows[0]["tasks"] for row in rows)
    assert all(seconds > 0 for seconds in rows[0]["parts"].values())


@pytest.mark.slow
def test_cluster_steps_look_at_all_processes(tmp_path: Path) -> None:
    printed, rows = bench(tmp_path, "cluster_steps", "--processes", "2")
    assert [row["processes"] for row in rows] == [2] and "ms/task above" in printed
    for row in rows:
        taken = (row["own_seconds"], row["seconds"], *row["window_seconds"])
        assert all(0 < seconds < 60 for seconds in taken)
        assert [len(sizes) for sizes in row["sizes"]] == [1 + row["processes"]] * 3
        assert all(size > 50 << 20 for sizes in row["sizes"] for size in sizes)


@pytest.mark.slow
def test_simulated_steps_stand_beside_measured_ones(tmp_path: Path) -> None:
    printed, rows = bench(tmp_path, "simulate", "--cases", "space")
    assert [(row["case"], row["workers"]) for row in rows] == [("space", 1), ("space", 2)]
    for row in rows:
        assert 0 < row["simulated"] < 60 and 0 < row["measured"] < 60 and len(row["seconds"]) == 2
    assert "off %" in printed


@pytest.mark.slow
def test_promise_measures_from_the_smallest_budget_to_in_core(tmp_path: Path) -> None:
    done = python(ROOT / "perf/promise.py", "--toy", "--json", "rows.json", folder=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert done.stdout.count("| unet96 ") == len(rows) == 2, done.stdout + done.stderr
    assert done.returncode == int("BROKEN: " in done.stdout), done.stdout + done.stderr
    assert rows[0]["budget_bytes"] < rows[1]["budget_bytes"]
    for row in rows:
        measured = row["outcome"]["anonymous_bytes"]
        assert 0 < measured <= row["planned"]["peak"] <= row["budget_bytes"]
        assert len(row["outcome"]["result"]["step_seconds"]) == 2
        assert row["broken"] == []


@pytest.mark.slow
def test_promise_shows_what_is_refused(tmp_path: Path) -> None:
    script = str(ROOT / "perf/promise.py")
    done = python(script, "--toy", "--budgets", "1MiB", "--workdir", ".", folder=tmp_path)
    assert done.returncode == 1
    assert "BROKEN: refused: " in done.stdout and "beside the process itself" in done.stdout


@pytest.mark.slow
def test_larger_tells_plan_and_run(tmp_path: Path) -> None:
    printed, rows = bench(tmp_path, "larger", "stream")
    assert printed.index("| plan ") < printed.index("| run ")
    assert [row["name"] for row in rows] == ["stream"]
    assert len(rows[0]["outcome"]["result"]["anonymous"]) == 3


@pytest.mark.slow
def test_growth_has_a_row_for_each_volume_and_draws(tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "growth", "--plot", "growth.png")
    assert [row["size"] for row in rows] == [8, 16]
    assert all(0 < row["seconds"] < 600 for row in rows)
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_read_without_a_browser(tmp_path: Path) -> None:
    model = write_unet3d(tmp_path / "unet.onnx", base=2, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(1, 16))
    options: dict[str, Any] = {"memory": "4GiB", "engine": "onnxruntime", "threads": 2, "progress": False}
    made = oocdl.fit(model, data, steps=1, trace=tmp_path / "step.json", **options)
    done = python(ROOT / "perf/read_trace.py", "step.json", "--plot", "step.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    threads, layers = (table.splitlines()[2:] for table in done.stdout.split("\n\n"))
    assert {row.split()[1] for row in threads} <= {"oocdl_0", "oocdl_1", "oocdl_2"} and threads
    busy = 0.0
    for row in threads:  # what a thread did, and what it did not, is the step
        *phases, spill, idle = map(float, row.split("|")[2:-1])
        assert spill == 0 and sum(phases) + idle < made.history[0]["seconds"] + 0.1
        busy += sum(phases)
    assert busy > 0  # of one thread it may be less than a millisecond, which prints as none
    named = {*made.plan.layer_names.values()}
    assert len(layers) == min(10, len(named)) and all(row.split("|")[1].strip() in named for row in layers)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    named = {*re.findall(r'example\(tmp_path, "(\w+)"', text), *re.findall(r"examples/(\w+)\.py", text)}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} <= {*named, *LEARN}
    assert "examples/notebook.ipynb" in (ROOT / "tests/report/test_notebook.py").read_text()


TRAINS = " --memory 3GiB --workdir out"


def test_first_steps(tmp_path: Path) -> None:
    words = "--size 16 --epochs 6" + TRAINS
    done = python("-W", "ignore", ROOT / "examples/first_steps.py", *words.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = example(tmp_path, "first_steps", words)  # finds the run finished
    assert told.split("loss ")[-1] == done.stdout.split("loss ")[-1]
    assert losses_fall(told) == {"loss"}
    assert float(told.split("not seen: ")[1].split()[0]) > 0.5
    onnx.checker.check_model(tmp_path / "out/trained.onnx", full_check=True)


def losses_fall(told: str, share: float = 1.0) -> set[str]:
    """Names of the losses of which an example tells, each of which ends below this share of its beginning."""
    found = re.findall(r"^(loss\S*) (\S+) -> (\S+)", told, re.MULTILINE)
    assert all(float(after) < share * float(before) for _, before, after in found), found
    return {name for name, _, _ in found}


SOUND = "espeak" if shutil.which("espeak-ng") else "tones"
TASK = "sounds" if SOUND == "espeak" and Path("/usr/share/dict/words").exists() else "reverse"
LEARN = {
    "own_loss": (1.0, "", ""),
    "own_optimizer": (0.1, "", ""),
    "own_operator": (0.1, "", "farthest from PyTorch's: "),
    "deep_speech": (
        1.0,
        f"--sound {SOUND} --sentences 2 --channels 4 --hidden 8 --layers 1 --epochs 3",
        "of 2 sentences heard right",
    ),
    "pronounce": (
        1.0,
        f"--task {TASK} --words 64 --unseen 4 --width 16 --layers 1 --batch 32 --epochs 4",
        "of 4 words never seen",
    ),
    "instance_cut": (1.0, "--scenes 16 --unseen 2 --size 32 --base 4 --steps 12", "average precision "),
}
"""Example -> below what share of its beginning its loss ends, its words, what it prints besides.

Words are spoken if there is a synthesizer. The last one uses examples/multicut.py, which
`tests/test_instance_cut.py` looks at closer.
"""
SLOW = ("pronounce", "instance_cut")


@pytest.mark.usefixtures("own_operators")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in LEARN])
def test_an_example_learns(tmp_path: Path, name: str) -> None:
    share, words, said = LEARN[name]
    told = example(tmp_path, name, words and words + TRAINS)
    parts = {"loss/classes", "loss/edges"} if name == "instance_cut" else set()
    assert losses_fall(told, share) == {"loss", *parts} and said in told
    if name == "own_operator":
        assert float(told.split(said)[1]) < 1e-5
    if name == "instance_cut":
        assert (tmp_path / "out/instance_cut.png").read_bytes().startswith(b"\x89PNG")


def test_own_listener(tmp_path: Path) -> None:
    told = example(tmp_path, "own_listener")
    last, committed = told.split("since step ")[1].split(" steps are")[0].split(": ")
    assert int(committed) == int(last) + 5 < 200


@pytest.mark.slow
def test_from_pytorch(tmp_path: Path) -> None:
    told = example(tmp_path, "from_pytorch", "--size 16 --epochs 6" + TRAINS)
    assert float(told.split("not seen: ")[1].split()[0]) > 0.5


@pytest.mark.slow
def test_search(tmp_path: Path) -> None:
    told = example(tmp_path, "search", "--steps 1 --trials 3 --size 8")
    assert told.count("stopped") + told.count("finished") == 3
    assert (tmp_path / "search-example" / "best.onnx").is_file()


def test_deep_speech_names_the_synthesizer_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="apt-get install espeak-ng"):
        example(tmp_path, "deep_speech")


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
    nib = pytest.importorskip("nibabel")
    told = example(tmp_path, "brain_mri", f"--size small --steps 4{TRAINS} --data {templates}")
    assert "Dice  background" in told
    losses = [float(word) for word in told.split("loss  ")[1].splitlines()[0].split()[1::2]]
    assert losses[-1] < losses[0]
    assert (tmp_path / "out/brain.png").read_bytes().startswith(b"\x89PNG")
    assert nib.load(tmp_path / "out/prediction.nii.gz").ndim == 3


def test_a_folder_of_nnunet_becomes_labels(tmp_path: Path, templates: Path) -> None:
    pytest.importorskip("nibabel")
    words = "--step 4 --train 4 --test 1 --epochs 2 --depth 1 --base 4" + TRAINS
    told = example(tmp_path, "nnunet_folder", f"{words} --data {templates}")
    found = re.search(r"volume 0: Dice brain ([0-9.]+), fluid", told)
    assert found is not None and float(found[1]) > 0.5
    assert (tmp_path / "out/history.png").read_bytes().startswith(b"\x89PNG")
    assert "best validation: step " in told and told.count("$ oocdl ") == 4


@pytest.mark.slow
def test_precision_sets_losses_of_16_bits_beside_autocast(tmp_path: Path, templates: Path) -> None:
    if not get_engine("torch").has_bfloat16:
        pytest.skip("no bfloat16 arithmetic on this processor")
    printed, rows = bench(tmp_path, "precision", "--data", str(templates))
    names = [f"{side} {kind}" for kind in ("float32", "bfloat16") for side in ("PyTorch", "oocdl")]
    assert [row["name"] for row in rows] == names
    wide, autocast, low = rows[0]["losses"], rows[2]["losses"], rows[3]["losses"]
    assert low != wide and printed.count("| oocdl bfloat16 ") == 2
    np.testing.assert_allclose(rows[1]["losses"], wide, rtol=1e-4)
    np.testing.assert_allclose(low, autocast, rtol=1e-2)


@pytest.mark.slow
def test_patches_stand_beside_whole_volumes(tmp_path: Path, templates: Path) -> None:
    printed, rows = bench(tmp_path, "patches", "--data", str(templates), "--seeds", "0,1")
    cases = [(way, seed) for seed in (0, 1) for way in ("whole volumes", "patches of 8³")]
    assert [(row["way"], row["seed"]) for row in rows] == cases
    assert all(row["steps"] > 0 and row["seconds"] > 1 and 0 < row["dice"] <= 1 for row in rows)
    assert printed.count("| patches of 8³ ") == 2


def test_slices(tmp_path: Path, templates: Path) -> None:
    pytest.importorskip("torchvision")
    (templates / "ch2.nii.gz").rename(templates / "inia19-t1-brain.nii.gz")
    told = example(tmp_path, "slices", f"--size 32 --epochs 1{TRAINS} --data {templates}")
    assert "% of slices never seen are told apart" in told


def test_brain_mri_without_data_says_how_to_get_it(tmp_path: Path) -> None:
    pytest.importorskip("nibabel")
    with pytest.raises(SystemExit, match=r"^[^\n]*apt-get install mricron-data[^\n]*$"):
        example(tmp_path, "brain_mri", f"--data {tmp_path}")
