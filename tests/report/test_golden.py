"""Printed plans: texts of three networks that only a change of plans may change."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from oocdl.config import make_settings
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.planning import partial_sums
from oocdl.planning.binding import bind
from oocdl.planning.choice.pass_kinds import compile_passes
from oocdl.planning.machine import Machine
from oocdl.planning.passes import Course
from oocdl.planning.task_key import TaskKey, TaskKind
from oocdl.presets.unets import write_unet3d
from oocdl.report.plan_view import Plan
from oocdl.report.printer.notation import key_text, name_text
from oocdl.report.printer.show import What, pass_text
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit.nets import Array, write_data

GOLDEN = Path(__file__).parents[1] / "golden"
UPDATE = "pytest tests/report/test_golden.py --update-golden"
WHATS = get_args(What)
MACHINE = Machine(engine="torch", threads=2, base_bytes=256 << 20, capacity_bytes=1 << 30)
"""No machine at all: the same plan everywhere."""


@dataclass(frozen=True)
class Network:
    """What is planned, and the layers whose programs and tasks are written down (all would be long)."""

    arrays: Mapping[str, Array]
    options: Mapping[str, Any]
    program: tuple[str, ...]
    tasks: tuple[str, ...]


NETWORKS = {
    "unet": Network(
        {"image": np.zeros((2, 8, 8, 8), "float32"), "labels": np.zeros((2, 8, 8, 8), "uint8")},
        {"loss": "dice", "optimizer": "sgd", "batch_size": 2, "parallel": {"batch": 2, "space": (2,)}},
        ("down1.conv1", "bottom.conv1", "grad/down1.pool"),
        ("down1.conv2", "grad/down1.conv1.weight"),
    ),
    "resnet": Network(
        {"x": np.zeros((8, 3, 16, 16), "float32"), "y": np.zeros((8,), "int64")},
        {"optimizer": "adam", "batch_size": 4, "accumulate": 2, "parallel": {"batch": 2}},
        ("bn1/moments", "reducesum.1", "grad/convtranspose.1"),
        ("bn1/moments", "conv1", "grad/stem_weight", "update/div"),
    ),
    "gpt": Network(
        {"ids": np.zeros((2, 8), "int64"), "logits": np.zeros((2, 8), "int64")},
        {"optimizer": "sgd", "batch_size": 2, "parallel": {"channels": 2}},
        ("values/attend", "logsumexp", "grad/attendgrad", "update/wte/next"),
        ("qkv/einsum", "grad/attendgrad", "logsumexp", "update/wte/next"),
    ),
}


def write_network(name: str, folder: Path) -> Path:
    """The ONNX file of a network. What its text declares after the outputs are weights."""
    path = folder / f"{name}.onnx"
    if name == "unet":
        return write_unet3d(path, classes=2, base=8, depth=1)
    model = parser.parse_model((GOLDEN / f"{name}.onnxtxt").read_text())
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, "float32"), value.name))
    model.producer_name = "pytorch"
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return path


def make_plan(name: str, folder: Path) -> Plan:
    """The plan of a network, as ``oocdl.plan`` makes it, on ``MACHINE``."""
    network = NETWORKS[name]
    data = write_data(folder / f"{name}.zarr", network.arrays)
    settings = make_settings(engine="torch", threads=MACHINE.threads, memory="2GiB", **network.options)
    model = inspect_onnx(write_network(name, folder))
    dataset = open_dataset(str(data))
    binding = bind(model, dataset, settings)
    course = Course(binding.samples, settings)
    kinds = compile_passes(model, {"": binding}, settings, MACHINE, course, {}, {})
    return Plan(kinds, settings, MACHINE, model.path.name, dataset, course)


@pytest.fixture(scope="module", autouse=True)
def one_processor() -> Iterator[None]:
    """Kernels of other processors take other scratch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
        yield


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plan]:
    """All networks' plans; at most two partial sums of a value are kept, so that units share them."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_sums, "PARTIAL_SUM_BYTES", 0)
        return {name: make_plan(name, folder) for name in NETWORKS}


def text_of(name: str, plan: Plan, what: What) -> str:
    """What a golden file holds: all of a graph and its layers, programs and tasks of some layers."""
    network, main = NETWORKS[name], plan.compiled
    layers = {"program": network.program, "tasks": network.tasks}.get(what, (None,))
    return "\n\n".join(pass_text(main.plan, main.graph, what, layer) for layer in layers) + "\n"


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_golden(name: str, what: What, plans: Mapping[str, Plan], request: pytest.FixtureRequest) -> None:
    text, path = text_of(name, plans[name], what), GOLDEN / f"{name}.{what}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    wanted = path.read_text()
    if text != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), text.splitlines(), path.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"if this is meant: {UPDATE}"]), pytrace=False)


def test_every_golden_text_is_compared() -> None:
    names = {f"{name}.{what}.txt" for name in NETWORKS for what in WHATS}
    assert {path.name for path in GOLDEN.glob("*.txt")} == names
    assert UPDATE in (GOLDEN / "README.md").read_text()


def test_all_of_a_pass_is_its_layers_one_after_the_other(plans: Mapping[str, Plan]) -> None:
    plan = plans["unet"]
    for what in ("layers", "program"):
        blocks = [plan.show(what, layer.layer.index) for layer in plan.layers]
        assert plan.show(what) == "\n\n".join(blocks)
    tasks = plan.show("tasks")
    assert all(plan.show("tasks", layer.layer.name) in tasks for layer in plan.layers)
    ends = (*plan.compiled.graph.inputs, *plan.compiled.graph.outputs)
    assert all(f"\n    {key_text(key)}" in tasks for key in ends)


def test_a_layer_is_found_by_its_name_and_its_index(plans: Mapping[str, Plan]) -> None:
    plan = plans["unet"]
    assert plan.show("graph", "down1.conv2") == plan.show("graph", 1) == plan.show("graph", "001")
    with pytest.raises(InputError, match=r"no layer 'down1.conv3'.*mean 'down1.conv2', 'down1.conv1'"):
        plan.show("layers", "down1.conv3")
    for unknown in (len(plan.layers), -1, "?", "\u00b2"):
        with pytest.raises(InputError, match="--show layers lists them"):
            plan.show("layers", unknown)
    with pytest.raises(InputError, match="graph, layers, program, tasks; got 'lyaers'"):
        plan.show("lyaers")  # type: ignore[arg-type]


def test_one_kind_of_pass_is_shown_and_the_others_are_named(plans: Mapping[str, Plan]) -> None:
    plan = plans["resnet"]
    head, _, text = plan.show("tasks").partition("\n\n")
    assert head == "pass of kind 'main'; other kinds: first"
    assert text == pass_text(plan.compiled.plan, plan.compiled.graph, "tasks")
    assert plan.show("tasks", kind="first").startswith("pass of kind 'first'; other kinds: main\n\n")
    with pytest.raises(InputError, match="'last', only main, first"):
        plan.show("tasks", kind="last")


def test_names_of_others_stay_on_their_line() -> None:
    assert name_text("grad/conv1.weight:0") == "grad/conv1.weight:0"
    for hostile in ("", "a = b > c", "a\nb", "x\x1b[31m", "a\u2028b", 'say "no"', "%3"):
        shown = name_text(hostile)
        assert shown.startswith('"') and shown.isprintable() and len(shown.splitlines()) == 1
    assert key_text(TaskKey(TaskKind.UNIT, "a\nb", "", 1)) == '"a\\nb" #1'
