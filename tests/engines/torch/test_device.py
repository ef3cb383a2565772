"""The torch engine on a device: the same path on the processor, and on a GPU where there is one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oocdl
from oocdl.cli import app
from oocdl.engines.checked_indices import IndexOutside, divides_whole_numbers
from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine import get_engine, model_of, resolve
from oocdl.engines.torch import device as torch_device
from oocdl.engines.torch import torch_pointwise, transfer
from oocdl.engines.torch.device import STREAMS, TorchDeviceEngine
from oocdl.engines.torch.torch_engine import Step
from oocdl.engines.torch.transfer import PIECES_PER_STREAM, Stream, pieces
from oocdl.errors import BudgetError, InputError, ResourceError
from oocdl.fusion.loop_axes import REDUCTIONS
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Program
from oocdl.ops import RULES
from oocdl.planning import calibrate
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.machine import machine_facts
from tests.kit.jobs import EVEN, OPTIMIZERS, Job, check, losses_of, prepare, train, unet
from tests.kit.kernel_cases import noise
from tests.kit.kernels import CASES, block, error
from tests.kit.programs import program, single

SMALL = 40
"""Bytes of a piece that nearly every array here is larger than."""
HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="PyTorch sees no GPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> TorchDeviceEngine:
    """An engine whose arrays travel in many pieces."""
    monkeypatch.setattr(transfer, "PIECE_BYTES", SMALL)
    return TorchDeviceEngine("cpu")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A U-Net with instance norm, and volumes."""
    return prepare(unet(*EVEN[0]), tmp_path_factory.mktemp("unet"))


# --- how arrays travel ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (2, 3, 1, 50), (1, 100), (100, 1)])
@pytest.mark.parametrize("most", [4, 12, 1 << 20])
def test_pieces_are_all_of_it_in_order(shape: tuple[int, ...], most: int) -> None:
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    for given in (whole, torch.from_numpy(whole)):
        parts = list(pieces(given, most))
        assert all(part.nbytes <= most for part in parts)
        np.testing.assert_array_equal(np.concatenate([np.ravel(part) for part in parts]), whole.ravel())


def forms(dtype: str) -> Iterator[Array]:
    """Arrays that lie in all kinds of ways."""
    array = (noise(6, 5, 7) * 3).astype(dtype)
    frozen = array.copy()
    frozen.flags.writeable = False
    yield from (array, frozen, array[::-1], array[:, 1:4, ::2], array.transpose(2, 0, 1))
    yield from (ordered(np.zeros, (3, 4, 5), dtype, (0, 2, 1)), array[0, 0, 0:0], np.asarray(array[0, 0, 0]))
    shifted = np.zeros(array.nbytes + 1, np.uint8)[1:].view(dtype)
    shifted[...] = array.ravel()
    yield shifted


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "bfloat16"])
def test_arrays_come_back_as_they_went(small: TorchDeviceEngine, dtype: str) -> None:
    stream = Stream(torch.device("cpu"))
    for array in forms(dtype):
        there = stream.to_device(array)
        assert str(there.dtype) == f"torch.{dtype}" and there.is_contiguous()
        for order in ((), tuple(reversed(range(array.ndim)))):
            back = ordered(np.zeros, array.shape, array.dtype, order)
            stream.to_host(there, back)
            stream.finish()
            assert back.tobytes() == array.tobytes()


def test_memory_is_not_used_again_before_its_copy_is_done(
    small: TorchDeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that are done as late as they may be, as a busy device does them."""
    begun: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def late(piece: Any) -> None:
        target, source = begun.pop(id(piece), (None, None))
        if target is not None:
            target.copy_(source)

    monkeypatch.setattr(transfer._Piece, "wait", late)
    monkeypatch.setattr(transfer._Piece, "copy", lambda piece, *both: begun.update({id(piece): both}))
    stream, array = Stream(torch.device("cpu")), noise(7, 50).astype("float32")
    there, back = stream.to_device(array), np.zeros_like(array)
    stream.finish()
    np.testing.assert_array_equal(there.numpy(), array)
    stream.to_host(there, back)
    assert begun and not np.array_equal(back, array)
    stream.finish()
    np.testing.assert_array_equal(back, array)


def test_programs_run_in_pieces(small: TorchDeviceEngine) -> None:
    made, inputs = block()
    wants = get_engine("torch").compile(made)(inputs)
    outs = [ordered(np.empty, w.shape, w.dtype, tuple(reversed(range(w.ndim)))) for w in wants]
    for results in (small.compile(made)(inputs), small.compile(made)(inputs, outs)):
        for got, want in zip(results, wants, strict=True):
            assert error(got, want) < 1e-5


def test_two_programs_run_at_once_and_more_wait(small: TorchDeviceEngine) -> None:
    x = noise(64, 33).astype("float32")
    run = small.compile(single("Exp", [x], [(x.shape, "float32")], key="at once"))
    want = run([x])[0].tobytes()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: run([x])[0].tobytes(), range(40)))
    assert set(found) == {want}
    assert small._streams.qsize() == STREAMS


def test_a_run_that_breaks_off_leaves_its_stream_to_the_next(small: TorchDeviceEngine) -> None:
    table, far, near = noise(9, 8).astype("float32"), np.array([9]), np.array([4])
    run = small.compile(single("Gather", [table, near], [((1, 8), "float32")], key="broken off"))
    for _ in range(STREAMS + 1):
        with pytest.raises(IndexOutside):
            run([table, far])
    np.testing.assert_array_equal(run([table, near])[0], table[near])


def test_a_run_that_breaks_off_writes_no_results_later(
    small: TorchDeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, give, given = np.ones(3, np.float32), Stream.to_host, []

    def break_off(stream: Stream, tensor: torch.Tensor, out: Array) -> None:
        give(stream, tensor, out)
        given.append(out)
        raise KeyError

    run = small.compile(program([x], [], [(0, (3,))], "given"))
    outs = [np.zeros(3, np.float32)]
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Stream, "to_host", break_off)
        run([x], outs)
    for _ in range(STREAMS * PIECES_PER_STREAM):
        run([x])
    assert len(given) == 1 and not outs[0].any()


def test_what_a_broken_run_has_begun_goes_nowhere() -> None:
    stream, out = Stream(torch.device("cpu")), np.zeros(5, np.float32)
    stream.to_host(torch.ones(5), out)
    stream.drop()
    stream.finish()
    assert not out.any()
    assert len(stream.pieces) == PIECES_PER_STREAM


# --- exactness and determinism --------------------------------------------------------------


def test_settings_hold_while_any_run_is_there_and_are_back_afterwards() -> None:
    cudnn, entered, leave = torch.backends.cudnn, threading.Event(), threading.Event()
    before = torch_device._settings()
    try:
        cudnn.benchmark = True
        users = torch_device._settings()
        assert users != torch_device.EXACT

        def other() -> None:
            with torch_device._exactly:
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=other)
        with torch_device._exactly:
            thread.start()
            entered.wait(60)
            assert torch_device._settings() == torch_device.EXACT
        assert torch_device._settings() == torch_device.EXACT, "the other is still there"
        leave.set()
        thread.join()
        assert torch_device._settings() == users
    finally:
        torch_device._set(before)


class OneDevice(TorchDispatchMode):
    """Sees every kernel that is called, on tensors without memory that lie on no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        devices = {tensor.device.type for tensor in given if tensor.dim()}
        assert len(devices) < 2, f"{func} takes what is on {devices}"
        if devices == {"meta"}:
            self.called.add(func.overloadpacket.__name__)
        if func is torch.ops.aten._local_scalar_dense.default and given[0].is_meta:
            return given[0].dtype == torch.bool or 0
        return func(*args, **(kwargs or {}))


PROMISED = {"convolution_backward", "index_add_", "scatter_reduce_"}
"""cuDNN's, told to be deterministic; what is ordered in that mode; and maxima of whole numbers."""
DOUBTFUL = re.compile(
    r"mkldnn|backward|index_(add|put)|scatter|cum|hist|bincount|embedding|pool|upsample|put_"
)
"""Kernels of one processor alone, or of kinds of which PyTorch lists some as not deterministic."""


def test_kernels_stay_on_their_device_and_are_deterministic() -> None:
    mode = OneDevice()
    alone: set[str] = set()
    elementwise = torch_pointwise.KERNELS.keys() - REDUCTIONS.keys()
    for case in CASES:
        made = without_group_axes(case.program("float32"))
        if case.op.startswith("Ctc") or any(divides_whole_numbers(item) for item in made.instructions):
            continue  # PyTorch's kernel takes lengths as numbers, divisors are looked at: they are read back
        before = set(mode.called)
        kinds = zip(made.inputs, made.input_shapes, made.input_dtypes, strict=True)
        with torch.no_grad(), mode:
            with torch.device("meta"):
                slots = {
                    slot: torch.empty(shape, dtype=getattr(torch, dtype)) for slot, shape, dtype in kinds
                }
            for item in made.instructions:
                Step(item, (), on_device=True).run(slots, {})
        assert {tensor.device.type for tensor in slots.values()} == {"meta"}, case.name
        if case.op in elementwise:  # their gradients add up nothing
            alone |= {name for name in mode.called - before if name.endswith("_backward")}
    assert len(mode.called) > 50
    assert {name for name in mode.called - alone if DOUBTFUL.search(name)} == PROMISED


def test_a_network_is_exact(job: Job, tmp_path: Path) -> None:
    """Whole it is so in ``test_device_memory``."""
    cut = {"parallel": {"space": (2, 2, 1)}}
    run = job.fit(tmp_path / "run", engine="torch:cpu", optimizer=OPTIMIZERS["sgd"][0], **cut)
    check(run, *train(job, "sgd"), 1e-11)


def test_a_run_goes_on_with_its_device(job: Job, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["sgd"][0], "precision": "float32", "threads": 1}
    whole = job.fit(tmp_path / "whole", engine="torch:cpu", **options)
    job.fit(tmp_path / "parts", engine="torch:cpu", steps=1, **options)
    with pytest.raises(InputError, match="engine.*torch:cpu.*replan"):
        job.fit(tmp_path / "parts", engine="torch", **options)
    parts = job.fit(tmp_path / "parts", engine="torch:cpu", **options)
    assert losses_of(parts) == losses_of(whole)
    for name, weight in whole.weights.items():
        assert weight[...].tobytes() == parts.weights[name][...].tobytes()


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["torch:", "torch:xpu", "torch:cuda:x", "torch:cuda:01", "torch:cuda:999", "onnxruntime:cuda"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"no engine '{name}'; choose one of: .*torch:cuda"):
        resolve(name)


def test_a_device_that_is_not_there_is_refused_before_the_run(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"torch:cuda:{torch.cuda.device_count() if HAS_CUDA else 0}"
    way_out = rf"^there is no device for engine '{missing}': PyTorch .* sees \d+ .*; use engine='torch'"
    for ask in (lambda: job.fit(tmp_path / "run", engine=missing), lambda: get_engine(missing)):
        with pytest.raises(InputError, match=way_out):
            ask()
    words = ["fit", str(job.model), str(job.data), "--workdir", str(tmp_path / "run"), "--engine", missing]
    with pytest.raises(SystemExit, match="^2$"):
        app.main(words)
    assert f"'{missing}'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


class Tiny:
    """A device of so much memory, which arrays take and work takes with them."""

    model = "Tiny 1"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.on_host = get_engine("torch:cpu")

    def free_bytes(self) -> int:
        return self.nbytes

    def needed_bytes(self, program: Program, rules: Rules) -> int:
        return STREAMS * self.on_host.scratch_of(program, rules).scratch_bytes


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Any]:
    """The plan of a U-Net where the device has so much memory, and the largest need of its units."""
    data = tmp_path / "data.zarr"
    net = prepare(unet("instance", "maxpool", "transpose", (32, 16, 16), 1), tmp_path)
    assert data == net.data

    def plan(nbytes: int) -> tuple[oocdl.Plan, int]:
        device = Tiny(nbytes)
        monkeypatch.setattr(get_engine("torch:cpu"), "device", device)
        made = oocdl.plan(net.model, net.data, engine="torch:cpu", memory="4GiB", loss="cross_entropy")
        units = [unit for layer in made.compiled.plan.layers for unit in layer.units]
        return made, max(device.needed_bytes(unit.program, RULES) for unit in units)

    return plan


def test_units_are_made_to_fit_the_device(fits: Callable[[int], Any]) -> None:
    roomy, most = fits(1 << 40)
    tight, less = fits(most // 2)
    assert less <= most // 2 < most
    assert tight.compiled.plan.tasks > roomy.compiled.plan.tasks


def test_a_device_too_small_for_any_unit_is_refused(fits: Callable[[int], Any]) -> None:
    with pytest.raises(
        BudgetError, match=r"^units of layer '.+' need \d+ MiB of engine 'torch:cpu' \(Tiny 1\), .* or use"
    ):
        fits(1 << 10)


def test_a_frozen_plan_and_a_prediction_are_refused_too(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.fit(tmp_path / "run", engine="torch:cpu", steps=1)
    monkeypatch.setattr(get_engine("torch:cpu"), "device", Tiny(1 << 10))
    with pytest.warns(UserWarning, match="device was"), pytest.raises(BudgetError, match="Tiny 1"):
        job.fit(tmp_path / "run", engine="torch:cpu")
    with pytest.raises(BudgetError, match="Tiny 1"):
        run.evaluate(job.data, batch_size=1)


def test_memory_of_the_device_that_others_take_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    engine, x = TorchDeviceEngine("cpu"), noise(3).astype("float32")
    run = engine.compile(single("Exp", [x], [((3,), "float32")], key="full"))
    monkeypatch.setattr(Stream, "to_device", full)
    with pytest.raises(ResourceError, match=r"'torch:cpu' has no memory left; .* use engine='torch'$"):
        run([x])
    monkeypatch.undo()
    assert engine._streams.qsize() == STREAMS and run([x])[0].tobytes() == run([x])[0].tobytes()


# --- what is counted ------------------------------------------------------------------------


def test_pinned_memory_is_counted_with_the_process(job: Job) -> None:
    held = get_engine("torch:cpu").held_bytes
    assert held == STREAMS * PIECES_PER_STREAM * transfer.PIECE_BYTES
    options: dict[str, Any] = {"memory": "2GiB", "loss": "cross_entropy"}
    first, second = (
        oocdl.plan(job.model, job.data, engine=name, **options) for name in ("torch", "torch:cpu")
    )
    assert second.machine.reserved_bytes - first.machine.reserved_bytes == held


def test_work_is_the_devices_where_it_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((1 << 10,), np.float32)
    copies = program([x], [], [(0, x.shape)], "work of a copy")
    engine = TorchDeviceEngine("cpu")
    assert engine.scratch_of(copies, RULES).scratch_bytes >= 2 * x.nbytes
    monkeypatch.setattr(engine, "_is_host", False)
    assert engine.scratch_of(copies, RULES).scratch_bytes == 0
    assert engine.needed_bytes(copies, RULES) >= torch_device.LIBRARY_BYTES + STREAMS * 2 * x.nbytes


def test_what_the_processor_does_for_a_device_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchDeviceEngine("cpu")
    monkeypatch.setattr(engine, "_is_host", False)
    case = next(case for case in CASES if case.op == "CtcGrad")
    assert engine.scratch_of(case.program("float32"), RULES).scratch_bytes > 0


def test_rates_and_plans_name_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_of("torch") == model_of("torch:cpu") == "" != calibrate.cache_path("torch:cpu").name
    assert "device" not in calibrate._facts("torch:cpu")
    calibrate.store_rates("torch:cpu", NOMINAL)
    assert calibrate.load_rates("torch:cpu") == NOMINAL and calibrate.load_rates("torch") is None
    monkeypatch.setattr(get_engine("torch:cpu"), "device", Tiny(0))
    assert calibrate._facts("torch:cpu")["device"] == "Tiny 1"
    assert machine_facts("torch:cpu")["device"] == "Tiny 1"
    with pytest.warns(UserWarning, match="outdated"):
        assert calibrate.load_rates("torch:cpu") is None


def test_a_devices_rates_are_by_the_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread that waits for its device takes no time of the processor."""
    engine = get_engine("torch:cpu")
    waiting = threading.Event()
    bench = calibrate._Bench(engine, 1)
    idle = bench._median([lambda: waiting.wait(0.02)])
    monkeypatch.setattr(engine, "device", Tiny(0))
    assert bench._median([lambda: waiting.wait(0.02)]) >= 0.02 > idle


# --- on a GPU -------------------------------------------------------------------------------


@needs_cuda
def test_a_network_is_exact_on_a_gpu(job: Job, tmp_path: Path) -> None:
    truth, optimizer = train(job, "sgd"), OPTIMIZERS["sgd"][0]
    for name, cut in {"whole": {"threads": 1}, "cut": {"parallel": {"space": (2, 2, 1)}}}.items():
        check(job.fit(tmp_path / name, engine="torch:cuda", optimizer=optimizer, **cut), *truth, 1e-11)


@needs_cuda
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equal_bits_on_a_gpu(job: Job, precision: str, tmp_path: Path) -> None:
    if precision == "bfloat16" and not get_engine("torch:cuda").has_bfloat16:
        pytest.skip("this GPU has no bfloat16")
    options: dict[str, Any] = {"precision": precision, "parallel": {"space": (2, 2, 1)}}
    first, again = (job.fit(tmp_path / name, engine="torch:cuda", **options) for name in ("1", "2"))
    for name, weight in first.weights.items():
        assert weight[...].tobytes() == again.weights[name][...].tobytes()
    processor = job.fit(tmp_path / "processor", engine="torch", **{**options, "precision": "float32"})
    rough = 1e-4 if precision == "float32" else 3e-2
    np.testing.assert_allclose(losses_of(processor), losses_of(first), rtol=rough)


@needs_cuda
def test_what_runs_take_of_a_gpu_is_what_they_say(job: Job) -> None:
    engine = get_engine("torch:cuda")
    assert isinstance(engine, TorchDeviceEngine)
    made = oocdl.plan(job.model, job.data, engine="torch:cuda", loss="cross_entropy")
    for layer in made.compiled.plan.layers:
        for unit in layer.units:
            p = unit.program
            arrays = [*map(np.zeros, p.input_shapes, p.input_dtypes)]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            engine.compile(p)(arrays)
            taken = torch.cuda.max_memory_allocated() - before
            assert taken <= engine.needed_bytes(p, RULES)
