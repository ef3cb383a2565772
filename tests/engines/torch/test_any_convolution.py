"""Convolutions of any shape are right in float32 and in bfloat16, whatever oneDNN makes of them.

``OOCDL_SEEDS=1000:9000`` tries those seeds instead of the first few. ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16``
or ``AVX2`` has oneDNN take the kernels of another processor.

Then the engine's own ways, of which each case asserts that it has gone the one that is meant: first layers as
products of columns, uneven ends of volumes, thin slabs, one tap, strides.
"""

from __future__ import annotations

import ctypes
import os
from itertools import permutations

import pytest
import torch
from torch import Tensor

from oocdl.engines.convolution import Slide
from oocdl.engines.engine import get_engine
from oocdl.engines.torch.conv import compiled_gradient, dispatch, im2col, one_by_one, thin_slab
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program_cost import program_scratch_bytes
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.ops import RULES
from tests.kit.each import for_each
from tests.kit.kernels import counting, turned
from tests.kit.programs import Pads, single
from tests.kit.random_convolutions import FOUND, Convolution, Run, check, drawn, plain, runs
from tests.kit.torch_heap import peak_bytes

FIRST, LAST = map(int, os.environ.get("OOCDL_SEEDS", "0:60").split(":"))
TOLERANCES = {"float32": 5e-5, "bfloat16": 2e-2}
LEAST_BYTES = 2 << 20
"""Heap that no plan is short of."""


@pytest.fixture(params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> str:
    """Each that oneDNN convolves in."""
    if request.param == "bfloat16" and not get_engine("torch").has_bfloat16:
        pytest.skip("this processor does not multiply in bfloat16")
    return str(request.param)


@pytest.mark.parametrize("engine", ["torch", "torch:cpu"])
@pytest.mark.parametrize("case", FOUND, ids=lambda case: f"{case.channels}-{case.space}-{case.window}")
def test_what_was_wrong_once(case: Convolution, engine: str, dtype: str) -> None:
    for run in runs(case, dtype):
        check(run, TOLERANCES[dtype], engine)


@for_each(FOUND)
def test_what_is_done_instead_is_counted(case: Convolution) -> None:
    engine = get_engine("torch")
    for dtype in [dtype for dtype in TOLERANCES if dtype == "float32" or engine.has_bfloat16]:
        for run in runs(case, dtype):
            said, taken = engine.scratch_of(run.program, RULES).scratch_bytes, peak_bytes(run.program)
            assert taken <= max(said, LEAST_BYTES), (run.program.instructions[0].op, dtype, said, taken)


@pytest.mark.parametrize("first", range(FIRST, LAST, 20))
def test_random_convolutions(first: int, dtype: str) -> None:
    @for_each(range(first, min(first + 20, LAST)))
    def are_right(seed: int) -> None:
        for run in runs(drawn(seed), dtype):
            check(run, TOLERANCES[dtype])

    are_right()


ONES = (1, 1, 1)
EVEN: Pads = ((1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize("pads", [EVEN, ((1, 0), (0, 2), (1, 1)), ((0, 0),) * 3], ids=("even", "odd", "none"))
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [1, 2])
def test_first_layers(channels: int, dilation: int, pads: Pads, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [counting(monkeypatch, im2col, name) for name in ("convolve", "weight_gradient")]
    case = Convolution((channels, 16), (7, 8, 9), (3, 3, 3), pads, ONES, (dilation,) * 3, batch=2)
    for run in runs(case, "float32"):
        check(run)
    assert [len(calls) for calls in made] == [1, 1]


# Windows of three and of five along the depth; wide enough for oneDNN by our hand, and by PyTorch's.
ENDS = [
    pytest.param((batch, 3, 20, 9, width), window, pads, id=f"{batch}x{width}-{window}-{pads[0]}{pads[1]}")
    for batch, width in ((1, 64), (2, 9))
    for window, pads in (
        (3, (1, 0)), (3, (0, 1)), (3, (2, 1)), (5, (2, 0)), (5, (0, 2)), (5, (1, 2)), (5, (2, 1)),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "window", "pads"),
    [(1, 2, (2, 0)), (1, 3, (2, 1)), (2, 3, (0, 2)), (3, 2, (0, 3)), (4, 5, (4, 1)), (1, 1, (1, 0))],
)
def test_windows_that_see_nothing_but_padding(depth: int, window: int, pads: tuple[int, int]) -> None:
    """At ends of a volume that are thinner than a window, or padded by more than one sees."""
    around = (pads, (1, 1), (1, 1))
    for run in runs(Convolution((16, 16), (depth, 6, 7), (window, 3, 3), around, ONES, ONES), "float32"):
        check(run)


def check_ends(made: list[Tensor], ends: list[Tensor], wanted: Shape, depth: tuple[int, int]) -> None:
    """No operand was padded by a copy."""
    if wanted[0] == 1:
        assert len(ends) == 1 and not made, "one sample is made where it belongs, its ends by themselves"
    else:
        assert made[0].shape[2] == wanted[2] + abs(depth[0] - depth[1]), "too much is made, and cut off"


@pytest.mark.parametrize(("shape", "window", "depth"), ENDS)
def test_convolution_and_gradient_of_the_weights_at_the_end_of_a_volume(
    shape: Shape, window: int, depth: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("_convolve", "_row_by_row", "_with_ends")
    made, ends, apart = (counting(monkeypatch, dispatch, name) for name in names)
    pads = (depth, (1, 1), (1, 1))
    case = Convolution((3, 16), shape[2:], (window, 3, 3), pads, ONES, ONES, shape[0])
    convolved, _, weight_grad = runs(case, "float32")
    check(convolved)
    check_ends(made, ends, convolved.wanted.shape, depth)
    check(weight_grad)
    assert len(apart) == 1


@pytest.mark.parametrize(("shape", "window", "depth"), ENDS)
def test_gradient_of_the_data_at_the_end_of_a_volume(
    shape: Shape, window: int, depth: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab at an end sees fewer windows there than at its other end: the crop is uneven."""
    made, ends = (counting(monkeypatch, dispatch, name) for name in ("_convolve", "_row_by_row"))
    reach = window - 1
    pads = ((reach - depth[0], reach - depth[1]), (1, 1), (1, 1))
    space = (20 + reach - sum(pads[0]), *shape[3:])
    case = Convolution((3, 16), space, (window, 3, 3), pads, ONES, ONES, shape[0])
    transposed = runs(case, "float32")[1]
    check(transposed)
    check_ends(made, ends, transposed.wanted.shape, depth)


SLAB = Convolution((4, 2), (3, 40, 64), (3, 3, 3), ((0, 0), (1, 1), (1, 1)), ONES, ONES, is_turned=False)
BLOCKS = plain((2, 4), (6, 80, 128), (2, 2, 2), 0, 2)._replace(is_turned=False)
CASES = {"Conv": (SLAB, 0), "ConvTranspose": (BLOCKS, 1), "ConvWeightGrad": (SLAB, 2)}


@pytest.mark.parametrize("op", CASES)
def test_thin_slab_is_right_and_takes_no_im2col(op: str) -> None:
    case, place = CASES[op]
    run = runs(case, "float32")[place]
    assert run.arrays[0].shape == (1, 4, 3, 40, 64) and 4 * 3 * 40 <= THIN_SLAB_ELEMENTS < 4 * 3 * 40 * 64
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        check(run)
    names = {event.name for event in profile.events()}
    assert any("mkldnn" in name for name in names)
    assert not any("slow_conv" in name for name in names)


def test_work_space_counts_the_copies_of_thin_slabs() -> None:
    program, (x, dy), _ = runs(SLAB, "float32")[2]
    # Each operand twice, once of them with channels rounded up to 16 by oneDNN.
    operands = x.size * (1 + 16 / 4) + dy.size * (1 + 16 / 2)
    assert program_scratch_bytes(program, RULES) >= 4 * operands


def lying(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """``x`` with its axes from outermost to innermost in memory; one sample has the stride of its place."""
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("taps", [(3, 3), (1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_any_order_in_memory_gives_the_same_numbers(
    samples: int, taps: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(samples, 6, 5, 5, dtype=torch.float64)
    w = torch.randn(4, 3, *taps, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, stride=2, groups=2)
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, w, dy)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-4
    for order in permutations(range(4)):
        lies = lying(x, order).to(dtype), dy.to(dtype)
        found = thin_slab.of_groups(*lies, w.shape, (0, 0), Slide((2, 2), (1, 1), 2))
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [(32, 16), (8, 24), (16, 4)], ids=str)
@pytest.mark.parametrize("space", [(7, 10), (4, 7, 5)], ids=str)
def test_one_tap(
    space: Shape, channels: tuple[int, int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("convolve", "transposed", "weight_gradient")
    made = [counting(monkeypatch, one_by_one, name) for name in names]
    seen = tuple((extent - 1) // stride * stride + 1 for extent in space)  # as the cutter has it
    convolved, (whole, arrays, dx), weight_grad = runs(
        plain(channels, seen, (1,) * len(space), 0, stride)._replace(batch=2), "float32"
    )
    has_blocks = channels[1] >= 8  # what has fewer channels is made as planes
    if has_blocks:
        check(convolved)
        check(weight_grad)
    for start, extent in ((0, seen[-1]), (1, 3), (2, 1)):  # boxes along the last axis
        box = dx[..., start : start + extent]
        attrs = {**whole.instructions[0].attrs, "crop": (*(0,) * (len(space) + 1), start)}
        key = f"{whole.key} from {start}"
        part = single("ConvTranspose", arrays, [(box.shape, "float32")], attrs, key=key)
        check(Run(turned(part), arrays, box))
    assert len(made[1]) == 3 and len(made[0]) >= 1 and len(made[2]) == has_blocks


@pytest.mark.parametrize(
    "pads", [((1, 0), (1, 0)), ((1, 0), (1, 1)), ((0, 1), (1, 0)), ((1, 0), (2, 0))], ids=str
)
def test_strided_window_at_an_uneven_end(pads: Pads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of three at every second place does not see the last padding: no padded copy is made."""
    monkeypatch.setattr(compiled_gradient, "loop_by_shape", lambda *_: None)
    space = tuple(9 - sum(pair) for pair in pads)
    convolved, _, weight_grad = runs(
        Convolution((16, 16), space, (3, 3), pads, (2, 2), (1, 1), batch=2), "float32"
    )
    copies = counting(monkeypatch, dispatch.F, "pad")
    check(convolved)
    check(weight_grad)
    assert len(copies) == (0 if pads[0] == (1, 0) and pads[1] in ((1, 0), (1, 1)) else 2)


def test_few_samples_go_to_onednn_as_many_do(capfd: pytest.CaptureFixture[str]) -> None:
    """PyTorch on one thread would take a product for one tap and fewer than 16 samples."""
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
        for run in runs(plain((32, 64), (20, 20), (1, 1), 0)._replace(batch=2), "float32"):
            check(run)
        ctypes.CDLL(None).fflush(None)
    called = [line for line in capfd.readouterr().out.splitlines() if ",exec,cpu,convolution" in line]
    kinds = [line.split(",")[7].split("_")[0] for line in called]
    assert kinds == ["forward", "forward", "backward"]
