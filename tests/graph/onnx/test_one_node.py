"""Forms of ONNX nodes that ONNX's own tests lack: values and gradients are PyTorch's, in every cut.

Operators whose forms are all in ``test_node_tests`` are not here: of what they are lowered to, gradients are
tested in ``tests/ops``, cuts in ``tests/graph/partition``, engines in ``tests/engines``.
"""

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
from oocdl.ops import RULES
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
Q, K, V = (RANDOM.normal(size=(2, heads, length, 4)) for heads, length in ((4, 5), (2, 6), (2, 6)))
SEEN = RANDOM.uniform(size=(2, 1, 5, 6)) > 0.4
SEEN[0, 0, 1] = False
SEEN_KEYS = OneNode(
    "Attention",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, attn_mask=torch.tensor(SEEN)),
    [Q, K, V, SEEN],
)  # where a query sees no key, the result is 0


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


MOVED = RANDOM.normal(size=(3, 4, 5))
LENGTHS = np.array([4, 0, 2])


def turned(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The first elements of axis 1 of each sample, turned round."""
    rows = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(x, lengths.tolist(), strict=True)]
    return torch.stack(rows)


REVERSED = OneNode(
    "ReverseSequence", lambda x: turned(x, torch.as_tensor(LENGTHS)), [MOVED, LENGTHS],
    {"batch_axis": 0, "time_axis": 1})  # fmt: skip


def test_sequences_of_lengths_that_data_tells(tmp_path: Path) -> None:
    inputs = {"x": MOVED, "n": LENGTHS}
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], name="n", batch_axis=0, time_axis=1)
    lowered.check(lowered.model_of([node], inputs, ["y"]), inputs, turned, tmp_path, counts=(1, 3))


REDUCED = RANDOM.normal(size=(2, 3, 5))


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


def test_options_that_change_nothing_leave_the_map_as_it_is(tmp_path: Path) -> None:
    def maps(**attrs: Any) -> list[Mapping[str, Any]]:
        """What the maps are told that a Resize of ``[9, 6]`` becomes."""
        node = helper.make_node("Resize", ["x", "", "", "size"], ["y"], name="n", mode="linear", **attrs)
        known = {"size": np.array([9, 8])}
        model = lowered.model_of([node], {"x": np.zeros((9, 6))}, ["y"], known, opset=19)
        return [node.attrs for node in bound(model, tmp_path).graph.nodes]

    assert len(maps()) == 1 and maps(exclude_outside=1, cubic_coeff_a=-0.5) == maps()


COMPLEX = RANDOM.normal(size=(2, 6, 3, 2))
REAL = COMPLEX[..., :1]
SIGNAL, HANN = RANDOM.normal(size=(2, 23, 1)), torch.hann_window(8, dtype=torch.float64)


def spectrum(**options: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The transform along axis 1 of what has its parts last."""

    def run(x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
        return torch.view_as_real(torch.fft.fft(z, dim=1, **options))

    return run


def frames(x: torch.Tensor) -> torch.Tensor:
    """Spectra of frames, [N, frames, frequencies, 2]."""
    made = torch.stft(x[..., 0], 8, 3, window=HANN, center=False, return_complex=True)
    return torch.view_as_real(made).transpose(1, 2)


SPECTRA = [
    OneNode("DFT", spectrum(n=4), [COMPLEX, np.array(4), np.array(1)]),
    OneNode("DFT", spectrum(n=9), [REAL, np.array(9), np.array(1)]),
]


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


@pytest.mark.parametrize("case", [*CONTRACTIONS, SEEN_KEYS, *PADDING, REVERSED, *SPECTRA], ids=str)
def test_values_and_gradients_are_pytorchs_in_every_cut(case: OneNode, tmp_path: Path) -> None:
    check(case, tmp_path)


SCORES = RANDOM.normal(size=(4, 3, 5))
LABELS = RANDOM.integers(3, size=(4, 5))
LABELS[0, :3] = -100
WEIGHTS = np.array([0.5, 2.0, 0.25])


def loss_model(op: str, weights: Any = None, outputs: int = 1, **attrs: Any) -> Any:
    names = ["x", "y"] + ["w"] * (weights is not None)
    results = ["z", "chances"][:outputs]
    return lowered.model_of(
        [helper.make_node(op, names, results, name="n", **attrs)],
        {"x": SCORES, "y": LABELS},
        results,
        {"w": weights} if weights is not None else {},
    )


KNOWN = np.abs(LABELS) % 3
MASKED = np.where(np.arange(3)[:, None] == 2, -np.inf, SCORES)
CROSS = "SoftmaxCrossEntropyLoss"
LOSSES: dict[str, tuple[Any, Any, Any, Any]] = {
    "the loss and its logarithms": (
        loss_model(CROSS, outputs=2, ignore_index=-100), SCORES, LABELS,
        lambda x, y: (F.cross_entropy(x, y), F.log_softmax(x, 1))),
    "a class that is masked by infinity": (loss_model(CROSS), MASKED, KNOWN % 2, F.cross_entropy),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_pytorchs(name: str, tmp_path: Path) -> None:
    made, scores, labels, formula = LOSSES[name]
    lowered.check(made, {"x": scores, "y": labels}, formula, tmp_path, counts=(1, 3))


def test_no_label_counts_is_no_number_and_so_is_a_label_that_is_no_class(tmp_path: Path) -> None:
    for labels, ignored in ((np.full((4, 5), 1), 1), (np.full((4, 5), 3), 1)):
        made = loss_model(CROSS, ignore_index=ignored)
        graph, outputs, _ = lowered.with_gradients(made, tmp_path, {"x": SCORES, "y": labels}, "float64")
        found = lowered.run_graph(graph, RULES, {"x": SCORES, "y": labels}, engine="torch")
        assert np.isnan(found.outputs[outputs[0]])


def test_class_weights_are_not_trained(tmp_path: Path) -> None:
    assert not bound(loss_model(CROSS, WEIGHTS), tmp_path).weights
