"""Arrays that stay on a device between units: the same path on the processor, which plays the device here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from oocdl.engines.engine import Part, combine, get_engine
from oocdl.engines.torch.device import LIBRARY_BYTES, TorchDeviceEngine
from oocdl.engines.torch.device_memory import DeviceMemory, Resident
from oocdl.engines.torch.transfer import Stream
from oocdl.errors import ResourceError
from oocdl.graph.ir.graph import Array
from oocdl.ops import RULES
from oocdl.runtime import combining
from tests.kit.jobs import EVEN, OPTIMIZERS, Job, check, prepare, train, unet
from tests.kit.kernel_cases import noise
from tests.kit.machine import Small
from tests.kit.programs import operand, program, single

CUT = {"parallel": {"space": (2, 2, 1)}}


class OnHost:
    """The engine "torch:cpu" as a device with so many bytes of memory of its own."""

    model = "Host 1"

    def __init__(self, nbytes: int) -> None:
        self.engine = get_engine("torch:cpu")
        assert isinstance(self.engine, TorchDeviceEngine)
        self.memory = self.engine.memory
        self.memory.free_bytes = lambda: nbytes + LIBRARY_BYTES

    def free_bytes(self) -> int:
        return 1 << 40

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A U-Net with instance norm, and volumes."""
    return prepare(unet(*EVEN[0]), tmp_path_factory.mktemp("unet"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], OnHost]]:
    """Makes the engine "torch:cpu" one of a device with so many bytes."""
    engine = get_engine("torch:cpu")

    def make(nbytes: int) -> OnHost:
        engine.forget()
        made = OnHost(nbytes)
        monkeypatch.setattr(engine, "device", made)
        return made

    yield make
    engine.forget()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> TorchDeviceEngine:
    """An engine of its own with room for everything."""
    engine = TorchDeviceEngine("cpu")
    engine.memory.free_bytes = lambda: 1 << 40
    return engine


# --- a network ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "cut"),
    [(1 << 40, {"threads": 1}), (1 << 40, CUT), (2 << 20, {**CUT, "threads": 4}), (0, {**CUT, "threads": 2})],
    ids=["whole", "cut", "tight, four threads", "nothing stays, two threads"],
)
def test_a_network_is_exact(
    device: Callable[[int], OnHost], job: Job, nbytes: int, cut: dict[str, Any], tmp_path: Path
) -> None:
    made = device(nbytes)
    run = job.fit(tmp_path / "run", engine="torch:cpu", optimizer=OPTIMIZERS["sgd"][0], **cut)
    check(run, *train(job, "sgd"), 1e-11)
    del run
    gc.collect()
    assert not any(one.is_there for one in made.memory._residents), "a session has left arrays on the device"


def test_bits_do_not_depend_on_what_leaves(
    device: Callable[[int], OnHost], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    leave = Resident.leave
    monkeypatch.setattr(Resident, "leave", lambda one: (left.append(one.nbytes), leave(one)))
    weights, counts = [], []
    for nbytes in (1 << 40, 2 << 20, 0):
        device(nbytes)
        left.clear()
        run = job.fit(tmp_path / str(nbytes), engine="torch:cpu", precision="float32", **CUT)
        weights.append({name: weight[...].tobytes() for name, weight in run.weights.items()})
        counts.append(len(left))
    assert weights[0] == weights[1] == weights[2]
    assert counts[0] == 0 < counts[1] < counts[2]


def test_arrays_go_to_the_host_only_where_they_are_wanted(
    device: Callable[[int], OnHost], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, and weights and Adam's states for commits: no activation, gradient or partial sum."""
    device(1 << 40)
    fetched: list[int] = []
    give = Stream.to_host
    monkeypatch.setattr(Stream, "to_host", lambda *a: (fetched.append(a[1].nbytes), give(*a))[1])
    run = job.fit(tmp_path / "run", engine="torch:cpu", steps=3, commit_seconds=1e9, **CUT)
    weights = sum(weight.nbytes for weight in run.weights.values())
    commits = 2  # after the first step, and at the end
    assert sum(fetched) <= commits * 3 * weights + 3 * 8


def test_memory_of_the_host_may_be_tight_too(device: Callable[[int], OnHost], tmp_path: Path) -> None:
    """What RAM has no room for goes on from the device to the disk, and comes back to the device."""
    job = prepare(unet("instance", "maxpool", "transpose", (32, 32, 32), 1), tmp_path)
    device(2 << 20)
    options: dict[str, Any] = {"engine": "torch:cpu", "precision": "float32", "threads": 1, "steps": 2, **CUT}
    # The guard looks at nothing here: the processor plays the device, in the memory of the host.
    small = {mib: Small(mib << 20, process_bytes=1 << 20) for mib in (500, 2)}
    runs = [job.fit(tmp_path / str(mib), one, memory="4GiB", **options) for mib, one in small.items()]
    assert runs[0].history[-1]["written_bytes"] == 0 < runs[1].history[-1]["written_bytes"]
    losses = [[row["loss"] for row in run.history] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-5)


# --- one array ------------------------------------------------------------------------------


def test_results_are_filled_when_they_are_wanted(small: TorchDeviceEngine) -> None:
    x, out = noise(3, 4).astype("float32"), np.zeros((3, 4), np.float32)
    exp = single("Exp", [x], [(x.shape, "float32")], key="later")
    (made,) = small.run(exp, RULES, [[Part(x)]], [out])
    assert not out.any()
    made.settle()
    np.testing.assert_array_equal(out, small.compile(exp)([x])[0])
    out[...] = 0
    made.settle()
    assert not out.any(), "an array that is there is not copied again"


def test_inputs_are_put_together_of_parts(small: TorchDeviceEngine) -> None:
    x = noise(6, 4).astype("float32")
    exp = single("Exp", [x], [(x.shape, "float32")], key="parts")
    there, out = small.keep(x[:4]).hold(), np.zeros_like(x)
    rows = slice(0, 2), slice(2, 5), slice(5, 6)
    parts = [
        Part(x[rows[0]], (), (rows[0],)), Part(there, (slice(2, 4),), (slice(2, 4),)),
        Part(x[4:], (), (slice(4, 6),)),
    ]  # fmt: skip
    small.run(exp, RULES, [parts], [out])[0].settle()
    np.testing.assert_array_equal(out, small.compile(exp)([x])[0])


def test_a_part_of_a_result_does_not_keep_all_of_it(small: TorchDeviceEngine) -> None:
    x = np.ones((64, 64), np.float32)
    part = replace(program([x], [], [], "a part"), outputs=(operand(0, (2, 64), ((0, 2), (0, 64))),))
    out = np.zeros((2, 64), np.float32)
    (made,) = small.run(part, RULES, [[Part(x)]], [out])
    assert made.hold().untyped_storage().nbytes() == out.nbytes


@pytest.mark.parametrize("how", ["sum", "max", "logsumexp", "moments"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_partial_results_are_combined_as_on_the_host(small: TorchDeviceEngine, how: str, dtype: str) -> None:
    width = 2 if how == "moments" else 1
    given = [[np.abs(noise(5, seed=3 * n + i)).astype(dtype) for i in range(width)] for n in range(3)]
    kept = [[array.copy() for array in arrays] for arrays in given]
    counts, outs = (4, 7, 2), [np.zeros(5, dtype) for _ in range(width)]
    mixed = [[small.keep(array).hold() for array in given[0]], *given[1:]]
    for made in small.combine(how, mixed, counts, outs):
        made.settle()
    want, count = [array.copy() for array in given[0]], counts[0]
    for other, elements in zip(given[1:], counts[1:], strict=True):
        combine(np, how, want, count, other, elements)
        count += elements
    for got, expected in zip(outs, want, strict=True):
        if how == "logsumexp":
            np.testing.assert_allclose(got, expected, rtol=1e-6 if dtype == "float32" else 1e-14)
        else:
            assert got.tobytes() == expected.tobytes()
    assert all((a == b).all() for x, y in zip(given, kept, strict=True) for a, b in zip(x, y, strict=True))


def test_a_total_is_not_where_a_result_may_still_arrive(small: TorchDeviceEngine) -> None:
    """Another thread may be on the way to fill the array of a result that was added to a partial sum."""
    own = [np.zeros(3, np.float32)]
    before = SimpleNamespace(shape=(3,), dtype=np.dtype("float32"))
    before.on_device = small.keep(np.ones(3, np.float32)).hold
    call = SimpleNamespace(combines=("sum",), partial_sums=((0, 4),), unit=SimpleNamespace(counts=[5]))
    held = SimpleNamespace(empty=np.empty)
    x = np.full(3, 2, np.float32)
    devices = [*small.run(single("Neg", [x], [((3,), "float32")]), RULES, [[Part(x)]], own)]
    results, late = [*own], devices[0]
    combining.add_partial_sums(held, small, call, results, devices, [before])  # type: ignore[arg-type]
    devices[0].settle()
    late.settle()
    assert results[0].tolist() == [-1, -1, -1] and own[0].tolist() == [-2, -2, -2]


def test_what_was_used_the_longest_ago_leaves_first() -> None:
    outs = [np.zeros(4, np.float32) for _ in range(3)]

    def fetch(tensor: torch.Tensor, ready: object, out: Array) -> None:
        out[...] = tensor.numpy()

    memory = DeviceMemory(lambda: 48, fetch)
    made = [memory.add(torch.full((4,), float(n + 1)), None, out) for n, out in enumerate(outs)]
    memory.make_room(0)
    made[0].hold()
    memory.make_room(16)
    assert [one.is_there for one in made] == [True, False, True]
    assert [out[0] for out in outs] == [0, 2, 0]
    memory.make_room()
    assert [out[0] for out in outs] == [1, 2, 3] and made[0].hold() is None
    made[0].settle()


def test_an_array_is_fetched_once_by_many_threads() -> None:
    fetched, gate = [], threading.Event()

    def fetch(tensor: torch.Tensor, ready: object, out: Array) -> None:
        gate.wait(5)
        fetched.append(ready)
        out[...] = 1

    out = np.zeros(4, np.float32)
    made = DeviceMemory(lambda: 0, fetch).add(torch.ones(4), "ready", out)
    threads = [threading.Thread(target=made.settle if n else made.leave) for n in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert fetched == ["ready"] and out.all()


def test_a_full_device_gives_up_what_it_keeps(
    small: TorchDeviceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = np.ones(3, np.float32), np.zeros(3, np.float32)
    exp = single("Exp", [x], [((3,), "float32")], key="full, once")
    kept = small.keep(x)
    to_device, failures = Stream.to_device, [1]

    def full(stream: Stream, array: Array) -> torch.Tensor:
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return to_device(stream, array)

    monkeypatch.setattr(Stream, "to_device", full)
    small.run(exp, RULES, [[Part(x)]], [out])[0].settle()
    assert out[0] == pytest.approx(np.e) and kept.hold() is None
    failures.append(1)
    assert small.keep(x).hold() is not None
    failures.extend([1, 1])
    with pytest.raises(ResourceError, match="has no memory left"):
        small.run(exp, RULES, [[Part(x)]], [out])
