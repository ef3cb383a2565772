"""What can be wrong with a model, a dataset, an option or a budget: one line that says it, and what to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import oocdl
from oocdl.cli import app
from oocdl.config import make_settings, parse_bytes
from oocdl.engines.engine import get_engine
from oocdl.errors import (
    BudgetError,
    DatasetError,
    IndexRangeError,
    InputError,
    ModelError,
    ModelWarning,
    OocdlError,
    ResourceError,
    StoreError,
    UnsupportedError,
)
from oocdl.events import Event, StepDone
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.losses import CrossEntropy, Dice, DiceCE
from oocdl.planning.binding import bind
from oocdl.presets.unets import write_unet3d
from oocdl.storage.dataset.dataset import open_dataset
from tests.kit import machine, nets, programs, settings
from tests.kit.machine import Small
from tests.kit.runs import refused

QUICK = {**settings.QUICK, "steps": 1}
Arrays = dict[str, np.ndarray]


def refused_at_sample_7(
    folder: Path, kind: type[OocdlError], said: str, model: Path, arrays: Arrays, **options: Any
) -> tuple[oocdl.Run, Path]:
    """It is refused where batches of two come to sample 7; returns the run as it is then, and the data."""
    data = nets.write_data(folder / "data.zarr", arrays)
    how = {**QUICK, "shuffle": False, "batch_size": 2, "steps": 5, "commit_seconds": 0, **options}
    refused(kind, said, lambda: oocdl.fit(model, data, **how))
    run = oocdl.open(model.with_suffix(".run"))
    assert run.steps == 3
    return run, data


def refused_as_a_command(model: Path, data: Path, loss: str) -> None:
    words = ["fit", str(model), str(data), "--loss", loss, "--engine", "onnxruntime", "--no-progress"]
    code = app.run_command([*words, "--workdir", str(data.with_name("cli.run"))], debug=False)
    assert code == DatasetError.exit_code == 2


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., oocdl.Run]:
    """``fit`` of a small network on given arrays; nothing may be left of what is refused."""
    model = nets.write_mlp(tmp_path / "mlp.onnx")

    def call(arrays: Arrays | None = None, **options: Any) -> oocdl.Run:
        data = nets.write_data(tmp_path / "data.zarr", nets.vectors() if arrays is None else arrays)
        try:
            return oocdl.fit(model, data, **{**QUICK, **options})
        except InputError:
            assert not model.with_suffix(".run").exists()
            raise

    return call


def test_unsupported_operators_are_listed_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "good"),
        helper.make_node("Multinomial", ["b"], ["c"], "second\nname"),
        helper.make_node("NonZero", ["x"], ["d"], "third"),
        helper.make_node("Add", ["c", "d"], ["y"], "sum"),
    ]
    model = nets.save(tmp_path / "odd.onnx", nodes, {}, ["batch", 6, 6], {"y": ["batch"]})
    data = nets.write_data(tmp_path / "data.zarr", {"x": np.zeros((2, 6, 6), "f4"), "y": np.zeros(2, "f4")})
    text = refused(UnsupportedError, "not supported", lambda: oocdl.fit(model, data, loss="mse", **QUICK))
    for name in ("Det", "Multinomial", "NonZero", "first", "second", "third"):
        assert name in text


@pytest.mark.parametrize("batch", [2, "batch"])
def test_what_only_other_outputs_need_is_not_refused(batch: Any, tmp_path: Path) -> None:
    model = onnx.load(nets.write_two_heads(tmp_path / "two.onnx"))
    model.graph.node.append(helper.make_node("Hardmax", ["kind"], ["label"], "label"))
    model.graph.output.append(helper.make_tensor_value_info("label", onnx.TensorProto.FLOAT, None))
    model.graph.input[0].type.tensor_type.shape.dim[0].CopyFrom(
        helper.make_tensor_value_info("x", 1, [batch]).type.tensor_type.shape.dim[0]
    )
    onnx.save(model, tmp_path / "three.onnx")
    data = nets.write_data(tmp_path / "data.zarr", {"x": X, "kind": Y, "size": X[:, :1]})
    options: dict[str, Any] = {"batch_size": 5, "workdir": tmp_path / "run", **QUICK}
    with pytest.warns(ModelWarning, match="'label' is neither trained nor predicted.*Hardmax"):
        run = oocdl.fit(tmp_path / "three.onnx", data, loss={"kind": ("cross_entropy", 1.0)}, **options)
    assert set(run.predict(data, tmp_path / "out.zarr")) == {"kind"} and run.evaluate(data)["loss"] > 0
    options |= {"loss": {"label": ("mse", 1.0)}, "targets": {"label": "size"}, "resume": "restart"}
    refused(UnsupportedError, "Hardmax", lambda: oocdl.fit(tmp_path / "three.onnx", data, **options))


X, Y = nets.vectors()["x"], nets.vectors()["y"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X[:, :5], "y": Y}, r"5 and 6 \(the file fixes input 'x' to \['batch', 6\], .* given \[1, 5\]"),
        ({"x": X[:, :, None, None], "y": Y}, r"input 'x' has 2 axes \['batch', 6\], array 'x' has 4"),
        ({"x": X, "y": np.stack([Y, Y], 1)}, r"labels 'y' have shape .* but output 'y' has"),
        ({"x": X, "y": np.eye(3, dtype="u1")[Y]}, "the class axis; of one-hot labels, take the argmax"),
        ({"x": X, "y": Y[:9]}, "differ in their number of samples: 'x' has 10, 'y' has 9"),
        ({"x": X[:0], "y": Y[:0]}, "array 'x' of .* has no samples"),
        ({"x": X}, "the dataset has no array left for output 'y' of the model; found: x"),
        ({"a": X, "b": X, "y": Y}, "input 'x' of the model has no array of that name; found: a, b, y; pas"),
        ({"x": X, "y": Y.astype("f4")}, "array 'y' is float32; the loss of 'y' wants whole-number labels"),
        ({"x": X, "y": Y.astype("M8[s]")}, r"found: x \(left out: 'y' has dtype .*; only bool"),
    ],
)
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_datasets(fit: Callable[..., oocdl.Run], arrays: Arrays, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fit(arrays)
    assert "\n" not in str(caught.value)


WEIGHTED = {"loss": CrossEntropy(sample_weights="age")}


@pytest.mark.parametrize(
    ("kinds", "options", "found"),
    [
        ({"image": "u1", "mask": "f4"}, {"loss": "mse"}, "image -> mask"),
        ({"image": "i2", "label": "f4"}, {"loss": "mse"}, "image -> label"),
        ({"image": "i2", "label": "u1"}, {}, "image -> label"),
        ({"scan": "f4", "seg": "u1"}, {}, "scan -> seg"),
        ({"noise": "f4", "y": "f4"}, {"loss": "mse"}, "noise -> y"),
        ({"scan": "f4", "age": "f4", "seg": "u1"}, WEIGHTED, "scan -> seg"),
        ({"scan": "i2", "age": "f4", "seg": "u1"}, WEIGHTED, "inputs="),
        ({"scan": "i2", "age": "f4", "seg": "u1"}, {"targets": {"y": "seg"}}, "inputs="),
        ({"scan": "f4", "seg": "u1"}, {"loss": "bce"}, "inputs="),
        ({"a": "u1", "b": "f4"}, {"loss": "mse"}, "inputs="),
        ({"a": "f4", "label": "f4"}, {"loss": "mse"}, "inputs="),
        ({"noise": "f4", "image": "f4"}, {"loss": "mse", "targets": {"y": "image"}}, "inputs="),
        ({"image": "f4", "mask": "f4", "id": "i8"}, {"loss": "mse"}, "targets="),
    ],
)
def test_no_array_is_taken_for_what_another_may_be(
    tmp_path: Path, kinds: dict[str, str], options: dict[str, Any], found: str
) -> None:
    model = inspect_onnx(nets.write_mlp(tmp_path / "net.onnx"))
    data = open_dataset({name: np.zeros((4, 6), kind) for name, kind in kinds.items()})
    if "=" in found:
        refused(DatasetError, f"pass {found}", lambda: bind(model, data, make_settings(**options)))
    else:
        binding = bind(model, data, make_settings(**options))
        assert f"{binding.inputs['x']} -> {binding.targets[0].array}" == found


def test_sizes() -> None:
    wanted: dict[Any, int] = {"2GiB": 2 << 30, "1.5 MB": 1500000, "3k": 3000, "7": 7, ".5Ki": 512}
    for text, size in {**wanted, 2.5e3: 2500, np.int64(9): 9}.items():
        assert parse_bytes(text) == size
    for text in ("", "i", "G", "1.2.3", ".", "1 GiBs", "-1", "0", 0, float("nan"), True, None, "1e3", "1\n2"):
        refused(InputError, "size", lambda text=text: parse_bytes(text))


def test_several_outputs_need_a_mapping(tmp_path: Path) -> None:
    model = nets.write_two_heads(tmp_path / "two.onnx")
    data = nets.write_data(tmp_path / "data.zarr", {"x": X, "kind": Y, "size": X[:, :1]})
    message = r"the model has outputs kind, size; pass loss=\{'kind': \('cross_entropy', 1.0\), ...\}"
    refused(InputError, message, lambda: oocdl.fit(model, data, **QUICK))


@pytest.mark.parametrize(("label", "loss"), [(3, "cross_entropy"), (-1, "dice"), (3, "dice_ce")])
def test_a_label_out_of_range(tmp_path: Path, label: int, loss: str) -> None:
    labels = Y.copy()
    labels[7] = label
    model = nets.write_mlp(tmp_path / "mlp.onnx")
    said = rf"array 'y' of .*data\.zarr has label {label} in sample 7; classes are 0 to 2.* ignore"
    arrays = {"x": X, "y": labels}
    _, data = refused_at_sample_7(tmp_path, DatasetError, said, model, arrays, loss=loss)
    refused_as_a_command(model, data, loss)


@pytest.mark.parametrize("id", [5, -6])
def test_an_id_outside_its_table(tmp_path: Path, id: int) -> None:
    ids = np.arange(12 * 4).reshape(12, 4) % 5
    ids[3, 0] = -5  # counts from the end, as ONNX says
    ids[7, 2] = id
    model = nets.write_lookup(tmp_path / "m.onnx")
    message = rf"array 'x' of .* has id {id} in sample 7 at \[2\]; table 'w5' has rows 0 to 4, or -5 to -1"
    arrays = {"x": ids, "y": np.zeros((12, 4, 3), "f4")}
    run, data = refused_at_sample_7(tmp_path, DatasetError, message, model, arrays, loss="mse")
    refused(DatasetError, message, lambda: run.predict(data, tmp_path / "out.zarr", memory="2GiB"))
    refused_as_a_command(model, data, "mse")


LOOKUPS = {
    "embedding": ("Gather", ["w", "i"], {}),
    "elements": ("GatherElements", ["w", "i"], {"axis": 0}),
    "nd": ("GatherND", ["w", "pairs"], {}),
    "scatter": ("ScatterND", ["w", "wide", "x"], {}),
    "scatter elements": ("ScatterElements", ["w", "i", "x"], {}),
    "largest": ("ScatterND", ["w", "wide", "x"], {"reduction": "max"}),
}
"""What -> operator, operands, attributes; ``w`` has five rows."""


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
@pytest.mark.parametrize("kind", LOOKUPS)
def test_an_index_that_is_computed_outside_of_its_table(tmp_path: Path, kind: str, engine: str) -> None:
    op, operands, attrs = LOOKUPS[kind]
    nodes = [
        helper.make_node("Cast", ["x"], ["i"], "to_ids", to=7),
        helper.make_node("Unsqueeze", ["i", "last"], ["column"], "column"),
        helper.make_node("Sub", ["column", "column"], ["zeros"], "zeros"),
        helper.make_node("Concat", ["column", "zeros"], ["pairs"], "pairs", axis=2),
        helper.make_node("Slice", ["i", "at0", "at1", "axis1"], ["wide"], "first"),
        helper.make_node(op, operands, ["found"], "odd", **attrs),
        helper.make_node("ReduceSum", ["found"], ["sum"], "total", keepdims=0),
        helper.make_node("Add", ["x", "sum"], ["y"], "end"),
    ]
    weights = {"w": np.ones((5, 4))}
    model = nets.save(tmp_path / "m.onnx", nodes, weights, ["b", 4], {"y": ["b", 4]})
    constants = {"last": [2], "at0": [0], "at1": [1], "axis1": [1]}
    nets.add_constants(model, {name: np.array(value) for name, value in constants.items()})
    x = np.arange(12 * 4).reshape(12, 4) % 4 + 0.5
    x[3, 0] = -5.5  # counts from the end, as ONNX says
    x[7, 0] = 7.5
    message = (
        r"node 'odd.*' is given index 7 for an axis of 5 \(dataset rows \[(6, )?7\]\); indices that a "
        "network computes have to be -5 to 4: clip them"
    )
    given = tmp_path, IndexRangeError, message, model, {"x": x.astype("f4"), "y": np.zeros((12, 4), "f4")}
    run, data = refused_at_sample_7(*given, loss="mse", engine=engine, lr=0.0)
    refused(IndexRangeError, message, lambda: run.predict(data, tmp_path / "out.zarr", memory="2GiB"))


@pytest.mark.parametrize(
    ("value", "name", "row", "at"), [(np.nan, "x", 7, 2), (-np.inf, "y", 8, 0), (1e300, "x", 7, 2)]
)
def test_numbers_that_are_not_finite(tmp_path: Path, value: float, name: str, row: int, at: int) -> None:
    arrays = {"x": X.astype("f8"), "y": X[:, :3].astype("f8")}
    arrays[name][row, at] = value
    seen = "inf" if value == 1e300 else value
    said = rf"array '{name}' of .* has the number {seen} in sample {row} at \[{at}\]; .* finite in float32"
    job = nets.write_mlp(tmp_path / "mlp.onnx"), nets.write_data(tmp_path / "data.zarr", arrays)
    refused(DatasetError, said, lambda: oocdl.fit(*job, **{**QUICK, "steps": None}, loss="mse"))


def test_an_impossible_budget_names_the_one_that_would_do(tmp_path: Path) -> None:
    # What the process itself takes varies by more than this network's smallest budget.
    options = {**QUICK, "machine": Small(process_bytes=300 << 20)}
    model = write_unet3d(tmp_path / "unet.onnx", base=2, depth=1, classes=2)
    random = np.random.default_rng(0)
    image = random.normal(size=(1, 1, 16, 16, 16)).astype("f4")
    data = nets.write_data(tmp_path / "data.zarr", {"image": image, "logits": (image[:, 0] > 0).astype("u1")})
    plan = machine.plan(model, data, **options)
    options["memory"] = plan.machine.base_bytes + (1 << 14)
    text = refused(BudgetError, "layer|memory", lambda: machine.fit(model, data, **options))
    layer = re.search(r"layer '([^']+)'", text)
    assert layer and re.match(r"(grad/)?(down1|bottom|up1|head)", layer[1])
    smallest = re.search(r"memory='(\d+MiB)'", text)
    assert smallest and not (tmp_path / "unet.run").exists()
    run = machine.fit(model, data, **{**options, "memory": smallest[1]})
    assert run.steps == 1 and run.history[0]["peak_bytes"] <= parse_bytes(smallest[1])


def test_a_process_that_alone_is_too_large_ends_the_run_by_name(tmp_path: Path) -> None:
    """Its growth is noticed before a unit starts; it is neither waited for nor trimmed for ever."""
    model, data = nets.write_mlp(tmp_path / "mlp.onnx"), nets.write_data(tmp_path / "d.zarr", nets.vectors())
    small = Small(capacity_bytes=64 << 20, process_bytes=300 << 20, over_bytes=100 << 20)
    budget = small.job(model, data, **QUICK).machine.guard().most_bytes + (36 << 20)
    text = refused(ResourceError, "process has", lambda: machine.fit(model, data, machine=small, **QUICK))
    assert f"has {(budget >> 20) + 64} MiB" in text and f"the budget is {budget >> 20} MiB" in text
    enough = re.search(r"memory='(\d+)MiB'", text)
    assert enough and int(enough[1]) >= (budget >> 20) + 100


def test_a_place_that_cannot_be_written(fit: Callable[..., oocdl.Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(StoreError, "file", lambda: fit(workdir=tmp_path / "file"))
    refused(StoreError, "file", lambda: fit(workdir=tmp_path / "file" / "run"))
    refused(StoreError, "file", lambda: fit(workdir=tmp_path / "run", spill=tmp_path / "file"))


def test_a_run_that_cannot_begin_leaves_no_spill_behind(
    fit: Callable[..., oocdl.Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if "MainHeapThreads" in repr(thread._target):  # type: ignore[attr-defined]
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            fit(spill=tmp_path / "spill")
    assert not [path for path in (tmp_path / "spill").iterdir() if path.is_dir()]
    assert fit(spill=tmp_path / "spill").finished


def test_what_is_compiled_goes_with_the_last_run_of_its_engine(tmp_path: Path) -> None:
    job, engine, found = nets.write_job(tmp_path), get_engine("numpy"), list[Any]()
    program = programs.single("Relu", [np.ones((2, 3), np.float32)], [((2, 3), "float32")])

    def within(event: Event) -> None:
        if isinstance(event, StepDone):
            inner = {**QUICK, "engine": "numpy", "workdir": tmp_path / "inner"}
            oocdl.fit(*job, **inner, callbacks=[lambda event: found.append(engine.compile(program))])
            found.append(engine.compile(program))

    oocdl.fit(*job, **QUICK | {"engine": "onnxruntime"}, callbacks=[within])
    assert found[0] is found[1] is not found[-1]


@pytest.mark.parametrize("loss", [Dice(ignore_index=9), DiceCE(cross_entropy=CrossEntropy(ignore_index=9))])
def test_a_label_that_is_ignored_is_no_error(fit: Callable[..., oocdl.Run], loss: Dice | DiceCE) -> None:
    labels = Y.copy()
    labels[[2, 7]] = 9
    assert fit({"x": X, "y": labels}, loss=loss, **{"steps": None}).finished


def test_arrays_in_memory_are_not_pasted(tmp_path: Path) -> None:
    model = nets.write_mlp(tmp_path / "mlp.onnx")
    names = "give arrays names"
    for given, cure in ((X, names), ([X, Y], names), ({"x": [X]}, "numpy.asarray")):
        text = refused(DatasetError, cure, partial(oocdl.fit, model, given, **QUICK))
        assert len(text) < 300 and "[[" not in text


def test_sizes_that_do_not_divide_have_a_cure(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], pads=[0, 0, 0, 0]),
        helper.make_node("Resize", ["a", "", "scales"], ["y"], mode="nearest"),
    ]
    weights = {"w": np.ones((3, 1, 2, 2), "f4"), "scales": np.array([1, 1, 2, 2], "f4")}
    shape = ["batch", 1, "height", "width"]
    model = nets.save(tmp_path / "net.onnx", nodes, weights, shape, {"y": ["batch", 3, "h", "w"]})
    arrays = {"x": np.zeros((2, 1, 33, 32), "f4"), "y": np.zeros((2, 33, 32), "u1")}
    data = nets.write_data(tmp_path / "data.zarr", arrays)
    refused(InputError, "makes 32 of 33: crop or pad", lambda: oocdl.fit(model, data, **QUICK))


def test_a_file_of_pytorch_names_the_way(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"PK\x03\x04 and so on")
    refused(ModelError, "oocdl.from_torch", lambda: oocdl.fit(tmp_path / "net.pt", "data.zarr", **QUICK))
