"""What programs take of the heap is what ``TorchEngine.scratch_of`` says, as PyTorch's profiler counts it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oocdl
from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import conv_scratch
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.speed import Probe
from oocdl.ops import RULES
from oocdl.planning.probes import probe_program
from oocdl.presets.unets import write_unet3d
from tests.kit import models, nets
from tests.kit.programs import operand, step
from tests.kit.programs import program as program_of
from tests.kit.random_convolutions import plain, runs

torch = pytest.importorskip("torch")
from tests.kit.torch_heap import peak_bytes  # noqa: E402

SIZE = 40
IMAGES = (8, 3, 128, 128)
LEAST_BYTES = 1 << 20
"""Of programs that count: chains of one block or two are of no matter to a plan."""


def planned(model: Path, data: Path, cuts: Iterable[dict[str, Any]], **options: Any) -> list[Program]:
    """All programs of a step, cut in each of these ways."""
    found = {}
    for parallel in cuts:
        plan = oocdl.plan(
            model, data, engine="torch", memory="2GiB", loss="cross_entropy", parallel=parallel, **options
        )
        for layer in plan.compiled.plan.layers:
            found |= {unit.program.key: unit.program for unit in layer.units}
    return list(found.values())


def unet(folder: Path) -> list[Program]:
    """Of a U-Net's step, whole and in thin slabs: ends of the volume, and what lies between."""
    model = folder / "unet.onnx"
    write_unet3d(model, base=16, depth=2, classes=3)
    random = np.random.default_rng(0)
    shape = (1, 1, SIZE, SIZE, SIZE)
    arrays = {"image": random.random(shape, np.float32), "labels": random.integers(0, 3, (1, *shape[2:]))}
    data = nets.write_data(folder / "data.zarr", arrays)
    return planned(model, data, ({"space": (slabs, 1, 1)} for slabs in (2, 10)))


def images(
    folder: Path, network: torch.nn.Module, *cuts: dict[str, Any], shape: Shape = IMAGES, classes: int = 10
) -> list[Program]:
    """Of a step of a network of images."""
    random = np.random.default_rng(0)
    model = models.export(network, (torch.zeros(shape),), folder / "images.onnx")
    arrays = {"x": random.random(shape, np.float32), "labels": random.integers(0, classes, shape[0])}
    data = nets.write_data(folder / "data.zarr", arrays)
    return planned(model, data, cuts, batch_size=shape[0])


def resnet(folder: Path) -> list[Program]:
    """Of a bottleneck network's step, cut by images alone and in strips of them."""
    network = models.ResNet((2, 2), 32, bottleneck=True, stem="imagenet")
    return images(folder, network, {"batch": 2}, {"batch": IMAGES[0]}, {"batch": 2, "space": (2, 1)})


def grouped(folder: Path) -> list[Program]:
    """Of a step of a network of depthwise and grouped convolutions, cut by images, and in strips of them."""
    return images(folder, models.Grouped(2), {"batch": 2}, {"batch": 2, "space": (2, 1)})


@pytest.fixture(scope="module", params=[unet, resnet, grouped], ids=["unet", "resnet", "grouped"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Program]:
    """Of all layers of a step."""
    made: list[Program] = request.param(tmp_path_factory.mktemp("work"))
    return made


@pytest.mark.parametrize("threads", [1, 2])
def test_programs_take_no_more_than_they_say_and_not_much_less(programs: list[Program], threads: int) -> None:
    engine = get_engine("torch")
    some = programs[::threads]
    programs = [replace(one, threads=threads, key=f"{one.key} on {threads}") for one in some]
    said = {program.key: engine.scratch_of(program, RULES).scratch_bytes for program in programs}
    taken = {program.key: peak_bytes(program) for program in programs}
    large = [program for program in programs if taken[program.key] > LEAST_BYTES]
    assert len(large) > (20 if threads == 1 else 4)
    over = [program for program in large if taken[program.key] > said[program.key]]
    assert not {str([item.op for item in p.instructions]): (taken[p.key], said[p.key]) for p in over}
    most = 1.7 if threads == 1 else 2  # what each thread may have of its own
    assert sum(said[p.key] for p in large) < most * sum(taken[p.key] for p in large)


def test_on_a_device_they_take_no_more_than_is_asked_for(programs: list[Program]) -> None:
    engine, over = get_engine("torch:cpu"), {}
    for program in programs:
        said, taken = engine.scratch_of(program, RULES).scratch_bytes, peak_bytes(program, "torch:cpu")
        if taken > max(said, LEAST_BYTES):
            over[str([item.op for item in program.instructions])] = taken, said
    assert not over


SHAPE = (512, 600, 3)
TURNED = step("Transpose", [(0, SHAPE)], 5, (600, 512, 3), perm=(1, 0, 2))
VIEWS = {
    "turned": step("Transpose", [(0, SHAPE)], 9, (600, 512, 3), perm=(1, 0, 2)),
    "turned inside": step("Transpose", [(0, SHAPE)], 9, (512, 3, 600), perm=(0, 2, 1)),
    "every second": step("Slice", [(0, SHAPE)], 9, (512, 300, 3), axis=1, step=2),
    "expanded": step("Expand", [(0, (512, 1, 3))], 9, SHAPE),
    "turned, as it is": step("Identity", [(5, (600, 512, 3))], 9, (600, 512, 3)),
    "turned back": step("Transpose", [(5, (600, 512, 3))], 9, SHAPE, perm=(1, 0, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_loop_that_copies_a_view_says_so(name: str) -> None:
    """As updates of weights do whose gradients are products the other way round."""
    views = [TURNED, VIEWS[name]] if VIEWS[name].operands[0].slot else [VIEWS[name]]
    read, made = views[0].operands[0].shape, views[-1].shapes[0]
    added = step("Add", [(1, made), (9, made)], 3, made)
    arrays = [np.zeros(read, np.float32), np.zeros(made, np.float32)]
    program = program_of(arrays, [*views, added], [(3, made)], f"view {views}")
    said, taken = get_engine("torch").scratch_of(program, RULES).scratch_bytes, peak_bytes(program)
    assert (taken > LEAST_BYTES) == (name != "turned back") and taken <= said


@pytest.mark.parametrize("axis", [2, 4])
def test_resampling_takes_no_more_than_it_says_and_never_a_matrix(axis: int) -> None:
    shape = [1, 2, 3, 3, 3]
    shape[axis] = 40_000
    attrs = {"mode": "linear", "coordinates": "half_pixel", "transposed": False}
    probe = Probe("Resample", ((tuple(shape), "float32"),), {**attrs, "axis": axis, "size": 80_000})
    program = probe_program(probe)
    for engine in ("torch", "torch:cpu"):
        said = get_engine(engine).scratch_of(program, RULES).scratch_bytes
        assert LEAST_BYTES < peak_bytes(program, engine) <= said < 40 << 20


@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("loop", [False, True], ids=["onednn", "loop"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("space", [(48, 48), (16, 20), (12, 12, 12)], ids=str)
def test_small_samples_that_pytorch_takes_by_im2col(
    space: Shape, stride: int, loop: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 20,480 numbers: a copy of nine or 27 times that. Apart: a part of what is made is the result."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2" if loop else "AVX512")
    case = plain((8, 16), space, (3,) * len(space), 1, stride)
    for program, _, _ in runs(case, "float32"):
        program = replace(program, key=f"{program.key} {loop} {apart}")
        if apart:
            (whole,) = program.outputs
            kept = whole.shape[-1] - 1
            crop = [*((0, n) for n in whole.shape[:-1]), (0, kept)]
            part = operand(whole.slot, (*whole.shape[:-1], kept), crop)
            program = replace(program, outputs=(part,))
        said = get_engine("torch").scratch_of(program, RULES).scratch_bytes
        assert peak_bytes(program) <= said, program.key


def test_blocks_of_16_channels_for_each_group_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN allocates them itself, unseen by PyTorch's profiler: 12 MiB of resident memory in this case."""
    monkeypatch.setattr(conv_scratch, "loop_by_shape", lambda *_: None)
    depthwise = torch.nn.Conv2d(512, 512, 5, padding=2, groups=512)
    ends = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 512, 1), depthwise, *ends)
    found = images(tmp_path, network, {"batch": 1}, shape=(2, 3, 8, 8), classes=512)
    steps = [(program, item) for program in found for item in program.instructions]
    (program,) = (one for one, item in steps if item.op == "ConvWeightGrad" and item.attrs.get("grouped"))
    said = get_engine("torch").scratch_of(program, RULES).scratch_bytes
    assert said > 512 * 16 * 16 * 25 * 4
