"""ONNX nodes, one at a time: values and gradients are PyTorch's, in every cut, on all engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import helper

from oocdl.graph.ir.graph import Array
from tests.kit import lowered
from tests.kit.onnx_kit import bound


@dataclass(frozen=True, eq=False)
class OneNode:
    """A node and its operands, in float64."""

    op: str
    function: lowered.Formula
    """Takes the operands that are floating point."""
    arrays: Sequence[Array | None]
    """Whole numbers and bools are constants; ``None`` is left out."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 24

    def __str__(self) -> str:
        attrs = ",".join(f"{key}={value}" for key, value in self.attrs.items())
        return f"{self.op}({attrs})".replace(" ", "")


def check(case: OneNode, folder: Path) -> None:
    """Values and gradients are PyTorch's, in every cut, on all engines.

    Attributes are float32 in files, and so are some numbers in PyTorch's kernels.
    """
    names = ["" if array is None else f"x{place}" for place, array in enumerate(case.arrays)]
    given = {name: array for name, array in zip(names, case.arrays, strict=True) if array is not None}
    inputs = {name: array for name, array in given.items() if array.dtype.kind == "f"}
    constants = {name: array for name, array in given.items() if array.dtype.kind != "f"}
    node = helper.make_node(case.op, names, ["y"], name="n", **case.attrs)
    model = lowered.model_of([node], inputs, ["y"], constants, opset=case.opset)
    lowered.check(model, inputs, case.function, folder, counts=(1, 3), tolerances=(1e-7, 2e-5))


RANDOM = np.random.default_rng(0)
AROUND = np.array([-7.0, -3, -1.5, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, 1.5, 3, 7, 30]).reshape(1, 2, 7)
SLOPE = np.array([[0.25], [-0.5]])
ACTIVATIONS = [
    OneNode("HardSigmoid", F.hardsigmoid, [AROUND], {"alpha": 1 / 6}),
    OneNode("HardSwish", F.hardswish, [AROUND]),
    OneNode("Selu", F.selu, [AROUND]),
    OneNode("Celu", F.celu, [AROUND]),
    OneNode("Celu", lambda x: F.celu(x, 0.5), [AROUND], {"alpha": 0.5}),
    OneNode("Mish", F.mish, [AROUND]),
    OneNode("Swish", F.silu, [AROUND]),
    OneNode(
        "SwiGLU", lambda a, b: a * torch.sigmoid(1.5 * a) * b, [AROUND, AROUND[::-1].copy()], {"alpha": 1.5},
        opset=28),
    OneNode("Softsign", F.softsign, [AROUND]),
    OneNode("ThresholdedRelu", lambda x: F.threshold(x, 0.5, 0.0), [AROUND], {"alpha": 0.5}),
    OneNode("Shrink", F.softshrink, [AROUND], {"lambd": 0.5, "bias": 0.5}),
    OneNode("Shrink", F.hardshrink, [AROUND], {"lambd": 0.5}),
    OneNode("Elu", F.elu, [AROUND]),
    OneNode("Gelu", F.gelu, [AROUND], {"approximate": "none"}),
    OneNode("Gelu", lambda x: F.gelu(x, approximate="tanh"), [AROUND], {"approximate": "tanh"}),
    OneNode("Ceil", torch.ceil, [AROUND]),
    OneNode("Sign", torch.sign, [AROUND]),
    OneNode("Mean", lambda x, y: (x + y) / 2, [AROUND, SLOPE]),
    OneNode("PRelu", lambda x, w: F.prelu(x, w.reshape(-1)), [AROUND, SLOPE]),
    OneNode("PRelu", F.prelu, [AROUND, np.array([0.25])]),
]  # fmt: skip


Q, K, V = (RANDOM.normal(size=(2, heads, length, 4)) for heads, length in ((4, 5), (2, 6), (2, 6)))
FLAT = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(2, x.shape[2], -1) for x in (Q, K, V)]
BIAS = RANDOM.normal(size=(4, 5, 6))
SEEN = RANDOM.uniform(size=(2, 1, 5, 6)) > 0.4
SEEN[0, 0, 1] = False
CAUSAL = torch.ones(5, 6, dtype=torch.bool).tril()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
    """PyTorch's; where a query sees no key, the result is 0."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more)


def side_by_side(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same for heads that lie side by side."""
    q, k, v = (x.unflatten(2, (heads, 4)).transpose(1, 2) for x, heads in ((q, 4), (k, 2), (v, 2)))
    return attention(q, k, v, attn_mask=CAUSAL).transpose(1, 2).flatten(2)


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, times those of the angles."""
    pairs = torch.view_as_complex(x.unflatten(3, (2, 2)).transpose(3, 4).contiguous())
    made = pairs * torch.complex(cosine, sine)[:, None]
    return torch.view_as_real(made).transpose(3, 4).flatten(3)


ANGLES = RANDOM.normal(size=(2, 5, 2))
ATTENTION = [
    OneNode("Attention", attention, [Q, K, V]),
    OneNode("Attention", lambda q, k, v: attention(q, k, v, attn_mask=CAUSAL), [Q, K, V], {"is_causal": 1}),
    OneNode("Attention", lambda q, k, v, m: attention(q, k, v, attn_mask=m), [Q, K, V, BIAS]),
    OneNode("Attention", lambda q, k, v: attention(q, k, v, attn_mask=torch.tensor(SEEN)), [Q, K, V, SEEN]),
    OneNode("Attention", side_by_side, FLAT, {"is_causal": 1, "q_num_heads": 4, "kv_num_heads": 2}),
    OneNode("RotaryEmbedding", rotated, [Q, np.cos(ANGLES), np.sin(ANGLES)]),
]  # fmt: skip


def test_queries_of_an_image_are_counted_row_by_row(tmp_path: Path) -> None:
    """A band counts along the axis of queries, so that this is not cut as rows and columns are."""
    inputs = {"x": RANDOM.normal(size=(1, 3, 4, 2))}
    nodes = [
        helper.make_node("Tanh", ["x"], ["image"], name="tanh"),
        helper.make_node("Reshape", ["image", "flat"], ["q"], name="flatten"),
        helper.make_node("Attention", ["q", "q", "q"], ["made"], name="attend", is_causal=1),
        helper.make_node("Reshape", ["made", "square"], ["back"], name="square_again"),
        helper.make_node("Add", ["image", "back"], ["y"], name="add"),
    ]
    sizes = {"flat": np.array([1, 1, 12, 2]), "square": np.array([1, 3, 4, 2])}

    def formula(x: torch.Tensor) -> torch.Tensor:
        image = torch.tanh(x)
        q = image.reshape(1, 1, 12, 2)
        return image + F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(image.shape)

    lowered.check(lowered.model_of(nodes, inputs, ["y"], sizes, opset=23), inputs, formula, tmp_path)


PADDED = np.random.default_rng(0).normal(size=(2, 3, 5, 4))
ENDS = np.array([3, 1, 2, 0])  # of the axes 2 and 3: before both, after both
MODES = {"edge": "replicate", "reflect": "reflect", "wrap": "circular"}


def padded(*pads: int, mode: str = "constant", value: float = 0.0) -> lowered.Formula:
    """PyTorch's pads: the last axis first, before and after."""
    return partial(F.pad, pad=pads, mode=mode, value=value if mode == "constant" else None)


def reflected_twice(x: torch.Tensor) -> torch.Tensor:
    """Five more elements of an axis of three, as NumPy has them; PyTorch refuses it."""
    return x[:, torch.as_tensor(np.pad(np.arange(3), (5, 4), mode="reflect"))]


def pads(axis: int, rank: int, before: int, after: int) -> np.ndarray:
    found = np.zeros((2, rank), np.int64)
    found[:, axis] = before, after
    return found.reshape(-1)


CROPPING = np.array([0, 0, 1, -1, 0, 0, -2, 2])
PADDING = [
    *(
        OneNode("Pad", padded(1, 0, 3, 2, mode=mode), [PADDED, ENDS, None, np.array([2, -1])], {"mode": name})
        for name, mode in MODES.items()
    ),
    *(
        OneNode("Pad", padded(-1, 2, 1, -2, mode=mode), [PADDED, CROPPING], {"mode": name})
        for name, mode in MODES.items()
    ),
    OneNode("Pad", reflected_twice, [PADDED, pads(1, 4, 5, 4)], {"mode": "reflect"}),
    OneNode("Pad", padded(1, 0, 3, 2, value=7), [PADDED, ENDS, np.array(7), np.array([2, 3])]),
    OneNode(  # a number so large that it would take the elements' digits with it if it were added
        "Pad",
        padded(-1, 2, 1, -2, value=2.0**100),
        [PADDED],
        {"pads": CROPPING.tolist(), "value": 2.0**100},
        opset=9,
    ),
    OneNode("Pad", padded(-1, 2, 1, -2), [PADDED, CROPPING]),
    OneNode("Pad", padded(1, 2, mode="replicate"), [PADDED[0], pads(2, 3, 1, 2)], {"mode": "edge"}, 11),
]  # fmt: skip


def test_pads_of_zero_vanish(tmp_path: Path) -> None:
    for mode in ("constant", *MODES):
        node = helper.make_node("Pad", ["x", "p", "c"], ["y"], mode=mode)
        known = {"p": np.zeros(4, int), "c": np.array(3.0)}
        model = lowered.model_of([node], {"x": PADDED[0, 0]}, ["y"], known, opset=21)
        (copied,) = bound(model, tmp_path).graph.nodes
        assert (copied.op, copied.inputs) == ("Cast", ("x",))  # an output is never an input itself


LINE, PLANE = RANDOM.normal(size=(2, 2, 8)), RANDOM.normal(size=(2, 2, 7, 6))
VOLUME = RANDOM.normal(size=(1, 2, 4, 5, 6))


def dilated(x: torch.Tensor) -> torch.Tensor:
    """Averages of two elements with one between them, padded by zeros that count."""
    weights = torch.full((1, 1, 2), 0.5, dtype=x.dtype)
    return F.conv1d(x.flatten(0, 1)[:, None], weights, padding=1, dilation=2).reshape(*x.shape[:2], -1)


def windows(kernel: list[int], stride: int = 1, pad: int = 0, **more: Any) -> dict[str, Any]:
    """Attributes of a pooling that is alike along all axes but for its kernel."""
    rank = len(kernel)
    return {"kernel_shape": kernel, "strides": [stride] * rank, "pads": [pad] * 2 * rank, **more}


CEIL = windows([3, 2], 2, 1, ceil_mode=1)
POOLING = [
    OneNode("AveragePool", lambda x: F.avg_pool1d(x, 2), [LINE], {"kernel_shape": [2], "strides": [2]}),
    OneNode("AveragePool", dilated, [LINE], windows([2], pad=1, dilations=[2], count_include_pad=1)),
    *(
        OneNode(
            "AveragePool",
            lambda x, counts=counts: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True, count_include_pad=counts),
            [PLANE],
            {**CEIL, "count_include_pad": int(counts)},
        )
        for counts in (False, True)
    ),
    OneNode(
        "AveragePool",
        lambda x: (
            F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1) / F.avg_pool2d(F.pad(x * 0 + 1, (0, 1, 0, 1)), 2, 1)
        ),
        [PLANE],
        {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    OneNode("AveragePool", lambda x: F.avg_pool3d(x, (2, 3, 2), 2), [VOLUME], windows([2, 3, 2], 2)),
    # A third window would start in the padding at the end.
    OneNode(
        "AveragePool", lambda x: F.avg_pool1d(x, 2, 5, 1, True, False), [LINE],
        windows([2], 5, 1, ceil_mode=1)),
    OneNode("MaxPool", lambda x: F.max_pool1d(x, 2, 5, 1, 1, True), [LINE], windows([2], 5, 1, ceil_mode=1)),
    OneNode("MaxPool", lambda x: F.max_pool2d(x, (3, 2), 2, 1, 1, True), [PLANE], CEIL),
    OneNode(
        "MaxPool", lambda x: F.max_pool3d(x, 2, 2, 0, 1, True), [VOLUME], windows([2] * 3, 2, ceil_mode=1)),
    OneNode("GlobalMaxPool", lambda x: F.adaptive_max_pool3d(x, 1), [VOLUME]),
    OneNode("GlobalAveragePool", lambda x: F.adaptive_avg_pool2d(x, 1), [PLANE]),
]  # fmt: skip


MOVED = RANDOM.normal(size=(3, 4, 5))
LENGTHS = np.array([4, 0, 2])


def turned(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The first elements of axis 1 of each sample, turned round."""
    rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x, lengths.tolist(), strict=True)]
    return torch.stack(rows)


FOLDED = {"dilation": (1, 2), "padding": (1, 0), "stride": (2, 1)}
REARRANGED = [
    OneNode(
        "ReverseSequence", lambda x: turned(x, torch.as_tensor(LENGTHS)), [MOVED, LENGTHS],
        {"batch_axis": 0, "time_axis": 1}),
    OneNode(
        "ReverseSequence", lambda x: turned(x.mT, torch.as_tensor(LENGTHS)).mT, [MOVED, LENGTHS],
        {"batch_axis": 0, "time_axis": 2}),
    OneNode(
        "Col2Im",
        lambda x: F.fold(x, (5, 6), (2, 3), **FOLDED),  # type: ignore[arg-type]
        [RANDOM.normal(size=(2, 3 * 6, 6)), np.array([5, 6]), np.array([2, 3])],
        {"dilations": [1, 2], "pads": [1, 0, 1, 0], "strides": [2, 1]},
    ),
]  # fmt: skip


def test_sequences_of_lengths_that_data_tells(tmp_path: Path) -> None:
    inputs = {"x": MOVED, "n": LENGTHS}
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], name="n", batch_axis=0, time_axis=1)
    lowered.check(lowered.model_of([node], inputs, ["y"]), inputs, turned, tmp_path, counts=(1, 3))


REDUCED = RANDOM.normal(size=(2, 3, 5))
TIED = np.round(REDUCED)
ZEROS = REDUCED * (RANDOM.uniform(size=REDUCED.shape) > 0.3)
ZEROS[0, 1] = 0
AXIS, AXES = np.array(1), np.array([0, 2])


def exclusive(x: torch.Tensor) -> torch.Tensor:
    """Sums of all before, from the other end."""
    return x.flip(1).cumsum(1).flip(1) - x


REDUCTIONS = [
    OneNode("ReduceMax", lambda x: x.amax((0, 2), keepdim=True), [TIED, AXES]),
    OneNode("ReduceMin", lambda x: x.amin((0, 2)), [TIED, AXES], {"keepdims": 0}),
    OneNode("ReduceProd", lambda x: x.prod(2, keepdim=True), [ZEROS, np.array([2])]),
    OneNode("ReduceProd", lambda x: x.prod(), [REDUCED + 2], {"keepdims": 0}),
    OneNode("ReduceLogSum", lambda x: x.sum(1, keepdim=True).log(), [np.abs(REDUCED), np.array([1])]),
    OneNode("ReduceL2", lambda x: torch.linalg.vector_norm(x, dim=2, keepdim=True), [ZEROS, np.array([2])]),
    OneNode("ReduceMean", lambda x: x, [REDUCED, np.array([], np.int64)], {"noop_with_empty_axes": 1}),
    OneNode("ArgMax", lambda x: x.argmax(2, keepdim=True), [TIED], {"axis": 2}),
    OneNode("ArgMin", lambda x: x.argmin(1), [REDUCED], {"axis": 1, "keepdims": 0}),
    OneNode("CumSum", lambda x: x.cumsum(1), [REDUCED, AXIS]),
    OneNode("CumSum", exclusive, [REDUCED, AXIS], {"exclusive": 1, "reverse": 1}),
    OneNode("CumProd", lambda x: x.cumprod(2), [REDUCED, np.array(2)], opset=26),
    OneNode(
        "Softmax", lambda x: F.softmax(x.flatten(1), 1).reshape(x.shape), [REDUCED], {"axis": 1}, opset=11),
    OneNode(
        "RMSNormalization", lambda x, w: F.rms_norm(x, (3, 5), w, 1e-5),
        [REDUCED, RANDOM.normal(size=(3, 5))], {"axis": 1}),
    OneNode(
        "LRN", lambda x: F.local_response_norm(x, 3, 0.1, 0.5, 2.0), [REDUCED],
        {"size": 3, "alpha": 0.1, "beta": 0.5, "bias": 2.0}),
]  # fmt: skip


@pytest.mark.parametrize("read", [("y", "mean", "inverse"), ("mean",), ("inverse",)])
def test_a_layer_norm_tells_mean_and_inverse_deviation(read: tuple[str, ...], tmp_path: Path) -> None:
    def formula(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variance, mean = torch.var_mean(x, (1, 2), correction=0, keepdim=True)
        made = {"y": F.layer_norm(x, (3, 5), w), "mean": mean, "inverse": (variance + 1e-5).rsqrt()}
        return tuple(made[name] for name in read)

    node = helper.make_node("LayerNormalization", ["x", "w"], ["y", "mean", "inverse"], name="n", axis=1)
    inputs = {"x": REDUCED, "w": RANDOM.normal(size=(3, 5))}
    model = lowered.model_of([node], inputs, list(read))
    lowered.check(model, inputs, formula, tmp_path, counts=(1, 3), tolerances=(1e-7, 2e-5))


RESIZED = np.random.default_rng(0).normal(size=(2, 2, 9, 6))
RESIZE_MODES = {"linear": "bilinear", "cubic": "bicubic"}
AS_PYTORCH = {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}
"""What PyTorch's exporter writes for ``antialias=True``."""


def interpolate(
    mode: str, size: tuple[int, int], align_corners: bool | None = None, antialias: bool = False
) -> lowered.Formula:
    return partial(
        F.interpolate, size=size, mode=RESIZE_MODES[mode], align_corners=align_corners, antialias=antialias
    )


def resize(mode: str, size: tuple[int, int], function: lowered.Formula, **attrs: object) -> OneNode:
    arrays = [RESIZED, None, None, np.array([2, 2, *size])]
    return OneNode("Resize", function, arrays, {"mode": mode, **attrs})


def cubic_without_outside(x: torch.Tensor) -> torch.Tensor:
    """Nine resized to twelve along axis 2, by those of the four neighbours that there are."""
    rows = []
    for at in ((np.arange(12) + 0.5) * 9 / 12) - 0.5:
        near = np.arange(int(np.floor(at)) - 1, int(np.floor(at)) + 3)
        near = near[(near >= 0) & (near < 9)]
        d = abs(near - at)
        close, far = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
        weights = torch.as_tensor(np.where(d <= 1, close, far))
        rows.append((x[:, :, near] * (weights / weights.sum())[:, None]).sum(2))
    return torch.stack(rows, 2)


RESIZING = [
    resize("cubic", (12, 4), interpolate("cubic", (12, 4))),
    resize(
        "cubic", (5, 7), interpolate("cubic", (5, 7), align_corners=True),
        coordinate_transformation_mode="align_corners"),
    resize("cubic", (12, 6), cubic_without_outside, exclude_outside=1),
    *(
        resize(mode, size, interpolate(mode, size, antialias=True), **AS_PYTORCH)
        for mode in RESIZE_MODES
        for size in ((4, 5), (2, 8))
    ),
    OneNode(
        "Resize", interpolate("cubic", (5, 4)), [RESIZED, None, None, np.array([4, 5])],
        {"mode": "cubic", "axes": [3, -2]}),
]  # fmt: skip
SLOW = pytest.mark.slow
PADDINGS = ("zeros", "border", "reflection")
SHAPES = {2: (2, 3, 4, 5), 3: (1, 2, 3, 2, 4)}
"""Number of axes -> shape of what is sampled at a grid of ``[3, *the last extents]``."""
SAMPLED = {
    (mode, axes, padding, corners)
    for mode, axes in (("linear", 2), ("nearest", 2), ("cubic", 2), ("linear", 3), ("nearest", 3))
    for padding in PADDINGS
    for corners in (0, 1)
}
QUICK = {
    ("linear", 2, "zeros", 0),
    ("linear", 2, "border", 1),
    ("nearest", 2, "reflection", 0),
    ("nearest", 3, "border", 1),
    ("cubic", 2, "zeros", 1),
    ("cubic", 2, "reflection", 0),
    ("linear", 3, "reflection", 1),
}
"""Those that run without ``--slow``."""


@pytest.mark.parametrize(
    ("mode", "axes", "padding", "corners"),
    [pytest.param(*case, marks=() if case in QUICK else SLOW) for case in sorted(SAMPLED)],
)
def test_a_grid_samples_as_pytorch_does(
    mode: str, axes: int, padding: str, corners: int, tmp_path: Path
) -> None:
    """The gradient of the grid is checked, too; much of it lies outside, some beyond a second border."""
    names, random = {"linear": "bilinear", "cubic": "bicubic"}, np.random.default_rng(0)
    batch, _, _, *rest = SHAPES[axes]
    grid = random.uniform(-1.5, 1.5, (batch, 3, *rest, axes)) * random.choice([1, 3], (batch, 3, *rest, axes))
    function = partial(
        F.grid_sample, mode=names.get(mode, mode), padding_mode=padding, align_corners=bool(corners)
    )
    arrays = [random.normal(size=SHAPES[axes]), grid]
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    check(OneNode("GridSample", function, arrays, attrs), tmp_path)


@pytest.mark.parametrize("padding", ["reflection", *(pytest.param(p, marks=SLOW) for p in PADDINGS[:2])])
@pytest.mark.parametrize("corners", [0, 1])
def test_a_grid_that_meets_elements_and_borders_has_pytorchs_gradient(
    padding: str, corners: int, tmp_path: Path
) -> None:
    """Places that are exact in binary: at elements, at both borders, a border beyond; an axis of one."""
    lines = np.array([-3.0, -1.5, -1.25, -1.0, -0.5, 0.0, 0.25, 0.75, 1.0, 1.25, 2.0, 3.0])
    grid = np.stack(np.meshgrid(lines, lines), -1)[None]
    function = partial(F.grid_sample, mode="bilinear", padding_mode=padding, align_corners=bool(corners))
    attrs = {"mode": "linear", "padding_mode": padding, "align_corners": corners}
    for extents in ((5, 9), (1, 5)):
        x = np.random.default_rng(0).normal(size=(1, 2, *extents))
        check(OneNode("GridSample", function, [x, grid], attrs), tmp_path)


def maps(
    folder: Path, size: Sequence[int], roi: Sequence[float] = (), **attrs: Any
) -> list[Mapping[str, Any]]:
    """What the maps are told that a Resize of ``[9, 6]`` becomes."""
    node = helper.make_node("Resize", ["x", "roi" if roi else "", "", "size"], ["y"], name="n", **attrs)
    known: Mapping[str, Any] = {"size": np.array(size), "roi": np.array(roi)}
    model = lowered.model_of([node], {"x": RESIZED[0, 0]}, ["y"], known, opset=19)
    return [node.attrs for node in bound(model, folder).graph.nodes]


def test_options_that_change_nothing_leave_the_map_as_it_is(tmp_path: Path) -> None:
    plain = maps(tmp_path, [9, 8], mode="linear")
    assert len(plain) == 1
    assert maps(tmp_path, [9, 8], mode="linear", exclude_outside=1, cubic_coeff_a=-0.5) == plain


COMPLEX = RANDOM.normal(size=(2, 6, 3, 2))
REAL = COMPLEX[..., :1]
HALF = COMPLEX[:, :4].copy()
HALF[:, ::3, :, 1] = 0  # as the spectrum of real numbers has it
SIGNAL, HANN = RANDOM.normal(size=(2, 23, 1)), torch.hann_window(8, dtype=torch.float64)


def spectrum(**options: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The transform along axis 1 of what has its parts last."""

    def run(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
        return torch.view_as_real(torch.fft.fft(z, dim=1, **options))

    return run


def back(x: torch.Tensor) -> torch.Tensor:
    """Real numbers, of one half of their spectrum."""
    return torch.fft.irfft(torch.view_as_complex(x.contiguous()), dim=1)[..., None]


def frames(x: torch.Tensor) -> torch.Tensor:
    """Spectra of frames, [N, frames, frequencies, 2]."""
    made = torch.stft(x[..., 0], 8, 3, window=HANN, center=False, return_complex=True)
    return torch.view_as_real(made).transpose(1, 2)


def grid(corners: bool, *size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The grid of PyTorch."""
    return lambda x: F.affine_grid(x, list(size), align_corners=corners)


SIGNALS = [
    OneNode("DFT", spectrum(), [COMPLEX, None, np.array(1)]),
    OneNode("DFT", spectrum(n=4), [COMPLEX, np.array(4), np.array(1)]),
    OneNode("DFT", spectrum(n=9), [REAL, np.array(9), np.array(1)]),
    OneNode("DFT", lambda x: spectrum()(x)[:, :4], [REAL, None, np.array(1)], {"onesided": 1}),
    OneNode(
        "DFT", lambda x: torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x.contiguous()), dim=1)),
        [COMPLEX, None, np.array(1)], {"inverse": 1}),
    OneNode("DFT", back, [HALF, None, np.array(1)], {"inverse": 1, "onesided": 1}),
    OneNode("DFT", spectrum(), [REAL], {"axis": 1}, opset=17),
    OneNode("AffineGrid", grid(False, 2, 1, 3, 4), [RANDOM.normal(size=(2, 2, 3)), np.array([2, 1, 3, 4])]),
    OneNode(
        "AffineGrid", grid(True, 2, 1, 3, 1, 2), [RANDOM.normal(size=(2, 3, 4)), np.array([2, 1, 3, 1, 2])],
        {"align_corners": 1}),
]  # fmt: skip


def test_frames_of_a_window_are_pytorchs(tmp_path: Path) -> None:
    constants = {"step": np.array(3), "window": HANN.numpy(), "length": np.array(8)}
    node = helper.make_node("STFT", ["x", *constants], ["y"], name="n")
    model = lowered.model_of([node], {"x": SIGNAL}, ["y"], constants)
    lowered.check(model, {"x": SIGNAL}, frames, tmp_path, counts=(1, 3), tolerances=(1e-7, 2e-5))


EQUATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij->ji": ((2, 3),),
    "bij->i": ((2, 3, 4),),
    "ii->": ((3, 3),),
    "...ii->...i": ((2, 3, 3),),
    "iji->ji": ((3, 2, 3),),
    "ij,jk": ((2, 3), (3, 4)),
    "...ij,...jk->...ik": ((2, 1, 2, 3), (4, 3, 2)),
    "bii,bij->bj": ((2, 3, 3), (2, 3, 4)),
    "ab,bc,cd,d->a": ((2, 3), (3, 2), (2, 4), (4,)),
    "i,i": ((3,), (3,)),
    "bhqd,bhkd->bhqk": ((2, 2, 3, 2), (2, 2, 3, 2)),
}
CONTRACTIONS = [
    OneNode(
        "Einsum",
        lambda *xs, equation=equation: torch.einsum(equation, *xs),
        [RANDOM.normal(size=shape) for shape in shapes],
        {"equation": equation},
    )
    for equation, shapes in EQUATIONS.items()
]
TABLES = (CONTRACTIONS, ACTIVATIONS, ATTENTION, PADDING, POOLING, REARRANGED, REDUCTIONS, RESIZING, SIGNALS)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0, affine_grid:UserWarning")
@pytest.mark.parametrize("case", [case for table in TABLES for case in table], ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)
