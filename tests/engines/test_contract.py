"""The contract of engines, the same for all: values, ownership, determinism, refusals."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from oocdl.engines import engine_registry
from oocdl.engines.checked_indices import IndexOutside
from oocdl.engines.engine import Engine, get_engine, resolve
from oocdl.errors import InputError, UnsupportedError
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array
from tests.kit.kernel_cases import Case, noise
from tests.kit.kernels import CASES, block, by_operator, error, told, turned
from tests.kit.programs import program, single, step
from tests.kit.threads import Together

DEVICES = ("torch:cpu", *["torch:cuda"] * torch.cuda.is_available())
ENGINES = (
    *engine_registry.ENGINES, "torch in loops", "torch on three threads", "onnxruntime in loops", *DEVICES
)  # fmt: skip
WIDE = [name for name, entry in engine_registry.ENGINES.items() if "float64" in entry.precisions]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Each engine in turn, also with all in loops as nothing is too small, and those cut for threads."""
    if request.param == "torch on three threads":
        monkeypatch.setattr("oocdl.fusion.loop_nest.SPLIT_ELEMENTS", 2)
        return Together(3)
    if request.param == "torch in loops":
        from oocdl.engines.torch.torch_engine import TorchEngine

        return TorchEngine(small_elements=2)
    if request.param == "onnxruntime in loops":
        from oocdl.engines.ort.ort_engine import OnnxRuntimeEngine

        return OnnxRuntimeEngine(small_elements=2)
    return get_engine(request.param)


def check(engine: Engine, case: Case, dtype: str, tolerance: float) -> None:
    """Run one case and compare."""
    program = case.program(dtype)
    results = engine.compile(program)(case.inputs(dtype))
    expected = case.expected(dtype)
    assert len(results) == len(expected)
    for got, want, kind in zip(results, expected, program.instructions[0].dtypes, strict=True):
        assert got.dtype.name == kind
        assert got.shape == want.shape
        assert got.flags.c_contiguous and got.flags.writeable
        if want.dtype.kind == "f":
            assert error(got, want) <= tolerance, case.name
        else:
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", [*WIDE, *DEVICES])
@by_operator([case for case in CASES if case.attrs.get("to") != "float32"])
def test_float64(cases: list[Case], name: str) -> None:
    for case in cases:
        with told(case):
            check(get_engine(name), case, "float64", 1e-12)


SPACED = [case for case in CASES if turned(case.program("float64")).orders and "to" not in case.attrs]


def check_turned(engine: Engine, case: Case, dtype: str, tolerance: float) -> None:
    """Run one case with its channels last, on arrays that lie so or as planes, and compare."""
    program = turned(case.program(dtype))
    inputs = []
    for array, order in zip(case.inputs(dtype), program.input_orders, strict=True):
        inputs.append(ordered(np.empty, array.shape, array.dtype, order))
        inputs[-1][...] = array
    expected, run = case.expected(dtype), engine.compile(program)
    kinds = zip(expected, program.instructions[0].dtypes, program.output_orders, strict=True)
    outs = [ordered(np.empty, want.shape, kind, order) for want, kind, order in kinds]
    planes = [np.ascontiguousarray(array) for array in inputs]
    for results in (run(inputs), run(inputs, outs), run(planes)):
        for got, want, order in zip(results, expected, program.output_orders, strict=True):
            assert (got.transpose(order) if order else got).flags.c_contiguous
            if want.dtype.kind == "f":
                assert error(got, want) <= tolerance
            else:
                np.testing.assert_array_equal(got, want)


@by_operator(SPACED)
def test_channels_last(engine: Engine, cases: list[Case]) -> None:
    """Values with their channels last go in and out of an engine as they lie."""
    for case in cases:
        with told(case):
            if engine.name.startswith("torch"):
                check_turned(engine, case, "float64", 1e-12)
            else:
                check_turned(engine, case, "float32", case.tolerance)


TABLE, NARROW, WIDE_ROWS = (5, 3), (2, 5), (2, 5, 3)


@pytest.mark.parametrize(
    ("op", "batch", "table", "result"),
    [
        ("Gather", 0, TABLE, (2, 4, 3)), ("Gather", 1, NARROW, (2, 4)), ("Gather", 1, WIDE_ROWS, (2, 4, 3)),
        ("GatherGrad", 0, (2, 4, 3), TABLE), ("GatherGrad", 1, (2, 4), NARROW),
        ("GatherGrad", 1, (2, 4, 3), WIDE_ROWS), ("LastAt", 0, None, (5,)), ("LastAt", 1, None, (2, 5)),
    ],
)  # fmt: skip
def test_an_index_outside_of_its_table_is_told(
    engine: Engine, op: str, batch: int, table: tuple[int, ...] | None, result: tuple[int, ...]
) -> None:
    ids = np.array([[0, 4, -5, 1], [2, 2, 3, -1]])
    arrays: list[Array] = [] if table is None else [noise(*table).astype("f4")]
    arrays.insert(len(arrays) if op == "Gather" else 0, ids)
    kind = "int64" if op == "LastAt" else "float32"
    made = single(op, arrays, [(result, kind)], {"batch": batch, "rows": 5}, key=f"{op} {batch} {table}")
    run = engine.compile(made)
    assert run(arrays)[0].shape == result
    for index in (5, -6, 2**40):
        ids[1, 2] = index
        with pytest.raises(IndexOutside) as caught:
            run(arrays)
        for one in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert (one.slot, one.index, one.rows) == (len(arrays), index, 5)
            assert str(one) == f"there is no row {index} in a table of 5 rows"


def test_an_index_that_the_program_makes_is_told(engine: Engine) -> None:
    ids = np.array([[0, 4], [-5, 1]])
    turn = step("Transpose", [(0, (2, 2))], 1, (2, 2), "int64", perm=(1, 0))
    find = step("LastAt", [(1, (2, 2))], 2, (5,), "int64", rows=5)
    run = engine.compile(program([ids], [turn, find], [(2, (5,))], "made indices"))
    np.testing.assert_array_equal(run([ids])[0], [1, 3, -1, -1, 2])
    ids[1, 0] = 5
    with pytest.raises(IndexOutside, match="there is no row 5 in a table of 5 rows"):
        run([ids])


def test_block(engine: Engine) -> None:
    program, (x, w, skip) = block()
    results = engine.compile(program)([x, w, skip])
    padded = torch.nn.functional.pad(torch.tensor(x[:, :, :5]), (1, 1, 1, 0))
    y = torch.nn.functional.conv2d(padded, torch.tensor(w))
    y = torch.nn.functional.leaky_relu(y, 0.2).reshape(2, 4, 2, 2, 6) + torch.tensor(skip)
    wants = [y[:, :, 1:2], y.sum((0, 2, 3, 4)), skip, skip[:1], y, y]
    for got, want in zip(results, wants, strict=True):
        assert error(got, np.asarray(want)) < 1e-5


def test_outputs_own_their_memory(engine: Engine) -> None:
    program, inputs = block()
    results = engine.compile(program)(inputs)
    for index, result in enumerate(results):
        others = inputs + results[:index] + results[index + 1 :]
        assert not any(np.shares_memory(result, other) for other in others)


def test_whole_numbers_in_a_row(engine: Engine) -> None:
    x = np.arange(1 << 19)
    [result] = engine.compile(single("Neg", [x], [(x.shape, "int64")], key="whole numbers"))([x])
    np.testing.assert_array_equal(result, -x)


@pytest.mark.parametrize("op", ["Identity", "Reshape", "Expand", "Transpose", "Pad", "Slice"])
def test_moving_nothing_still_copies(engine: Engine, op: str) -> None:
    x = noise(3, 4).astype("float32")
    attrs = {"perm": (0, 1), "axis": 0, "step": 1}
    [result] = engine.compile(single(op, [x], [((3, 4), "float32")], attrs, key="same" + op))([x])
    np.testing.assert_array_equal(result, x)
    assert not np.shares_memory(result, x)


@pytest.mark.parametrize("shape", [(3, 5), ()])
def test_a_program_without_instructions_copies(engine: Engine, shape: tuple[int, ...]) -> None:
    given = np.asarray(noise(*shape), np.float32)
    (found,) = engine.compile(program([given], [], [(0, shape)], f"copies {shape}"))([given])
    assert found.tobytes() == given.tobytes() and found.shape == shape
    assert not np.shares_memory(found, given)


def test_inputs_may_be_read_only_or_strided(engine: Engine, recwarn: pytest.WarningsRecorder) -> None:
    x = noise(4, 6).astype("float32")
    frozen = x.copy()
    frozen.flags.writeable = False
    run = engine.compile(single("Exp", [x], [((4, 6), "float32")], key="readonly"))
    for array in (frozen, np.asfortranarray(x), np.repeat(x, 2, 1)[:, ::2], x[::-1][::-1]):
        np.testing.assert_array_equal(run([array])[0], run([x])[0])
    flipped = x[::-1]
    np.testing.assert_array_equal(run([flipped])[0], run([x])[0][::-1])
    np.testing.assert_array_equal(frozen, x)
    assert not recwarn.list


def placed(array: Array, offset: int) -> Array:
    """A copy at an address that is ``offset`` above a multiple of 64."""
    buffer = np.empty(array.nbytes + 128, dtype=np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    copy: Array = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@by_operator(CASES)
def test_float32_has_the_same_bits_again_and_elsewhere(engine: Engine, cases: list[Case]) -> None:
    for case in cases:
        with told(case):
            check(engine, case, "float32", case.tolerance)
            check_bits(engine, case)


def check_bits(engine: Engine, case: Case) -> None:
    """Run one case several times, on arrays elsewhere in memory and side by side, and compare bits."""
    inputs = case.inputs("float32")
    run = engine.compile(case.program("float32"))
    first = run(inputs)
    with ThreadPoolExecutor(2) as pool:
        moved = [[placed(a, offset) for a in inputs] for offset in (0, 4, 16, 40)]
        others = list(pool.map(run, moved))
    for other in [run(inputs), *others]:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_equal_keys_are_compiled_once(engine: Engine) -> None:
    x = noise(2, 2).astype("float32")
    programs = [single("Exp", [x], [((2, 2), "float32")], key="shared") for _ in range(2)]
    assert engine.compile(programs[0]) is engine.compile(programs[1])


def test_unknown_operators_are_named(engine: Engine) -> None:
    x = noise(2, 2).astype("float32")
    with pytest.raises(UnsupportedError, match="'Frobnicate'"):
        engine.compile(single("Frobnicate", [x], [((2, 2), "float32")]))


def test_float64_needs_torch() -> None:
    x = noise(2, 2)
    with pytest.raises(UnsupportedError, match="float64"):
        get_engine("onnxruntime").compile(single("Exp", [x], [((2, 2), "float64")], key="f64"))


def test_choice_of_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("auto") == "torch"
    assert get_engine("auto") is get_engine("torch")
    with pytest.raises(InputError, match="frob"):
        get_engine("frob")
    monkeypatch.setattr("oocdl.engines.engine.installed", lambda name: False)
    assert resolve("auto") == "onnxruntime"
    monkeypatch.setattr("oocdl.engines.engine._engines", {})
    with pytest.raises(InputError, match=r"engine 'torch' needs PyTorch: pip install 'oocdl\[torch\]'$"):
        get_engine("torch")


def test_the_gate_imports_no_runtime() -> None:
    code = "import sys, oocdl.engines.engine;sys.exit(bool({'torch', 'onnxruntime'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_onnxruntime_loads_neither_pytorch_nor_its_tools_for_training() -> None:
    code = """
import sys, oocdl.engines.ort.ort_kernels
sys.exit(bool({"torch", "sympy", "onnxruntime.training"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
