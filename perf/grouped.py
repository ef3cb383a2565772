"""Convolutions with groups beside PyTorch: forward and both gradients, one core.

    python perf/grouped.py            # --toy at small size

"oocdl" is the torch engine's program of one node, with its data as it lies in a run; "PyTorch" is the same
convolution and its backward on contiguous tensors, and on tensors with their channels last. All take turns;
the least of all calls counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from measure import report, short_parser

from oocdl.engines.torch.torch_engine import TorchEngine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.speed import Probe
from oocdl.planning.probes import probe_program

CASES = {
    # batch, groups, channels of one, spatial extents, kernel, stride
    "MobileNetV2, 96 of 112², 3²": (1, 96, 1, (112, 112), 3, 1),
    "MobileNetV2, 8 x 96 of 112², 3², stride 2": (8, 96, 1, (112, 112), 3, 2),
    "MobileNetV2, 8 x 384 of 14², 3²": (8, 384, 1, (14, 14), 3, 1),
    "ConvNeXt, 4 x 96 of 56², 7²": (4, 96, 1, (56, 56), 7, 1),
    "ResNeXt 32x4d, 4 x 128 of 56², 3²": (4, 32, 4, (56, 56), 3, 1),
    "depthwise, 32 of 48³, 3³": (1, 32, 1, (48, 48, 48), 3, 1),
    "depthwise, 4 x 256 of 500, 15": (4, 256, 1, (500,), 15, 1),
}
OPERATORS = ("Conv", "ConvTranspose", "ConvWeightGrad")


def least_seconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """The least time of each call, which take turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def ours(op: str, case: tuple[Any, ...]) -> Callable[[], Any]:
    """The engine's program of one operator."""
    batch, groups, channels, space, kernel, stride = case
    rank, made = len(space), tuple((extent - 1) // stride + 1 for extent in space)
    attrs: dict[str, Any] = {"strides": (stride,) * rank, "dilations": (1,) * rank, "grouped": True}
    attrs["pads"] = (kernel // 2,) * (2 * rank)
    x = ((batch, groups, channels, *space), "float32")
    y = ((batch, groups, channels, *made), "float32")
    w = ((groups, channels, channels, *(kernel,) * rank), "float32")
    probe = {
        "Conv": Probe("Conv", (x, w), attrs),
        "ConvTranspose": Probe("ConvTranspose", (y, w), {**attrs, "spatial": space}),
        "ConvWeightGrad": Probe("ConvWeightGrad", (x, y), {**attrs, "kernel_shape": (kernel,) * rank}),
    }[op]
    program = probe_program(probe, (4, 5))
    given = zip(program.input_shapes, program.input_orders, strict=True)
    arrays = [ordered(np.ones, shape, "float32", order) for shape, order in given]
    run = TorchEngine(1).compile(program)
    outs = run(arrays)
    return lambda: run(arrays, outs)


def theirs(op: str, case: tuple[Any, ...], last: bool) -> Callable[[], Any]:
    """PyTorch's operator, as its autograd calls it."""
    batch, groups, channels, space, kernel, stride = case
    rank = len(space)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank) if last else None
    order = order or torch.contiguous_format
    x = torch.ones(batch, groups * channels, *space).contiguous(memory_format=order)
    w = torch.ones(groups * channels, channels, *(kernel,) * rank).contiguous(memory_format=order)
    slides = [stride] * rank, [kernel // 2] * rank, [1] * rank, False, [0] * rank, groups
    forward = torch.ops.aten.convolution
    dy = torch.ones_like(forward(x, w, None, *slides))
    wanted = [op == "ConvTranspose", op == "ConvWeightGrad", False]
    if op == "Conv":
        return lambda: forward(x, w, None, *slides)
    return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *slides, wanted)


def rows(toy: bool) -> list[dict[str, Any]]:
    """The figures of all cases."""
    torch.set_num_threads(1)
    found = []
    for name, (batch, groups, channels, space, kernel, stride) in CASES.items():
        extents = tuple(min(extent, 16) for extent in space) if toy else space
        case = (batch, groups, channels, extents, kernel, stride)
        for op in OPERATORS:
            calls = [ours(op, case), theirs(op, case, False), theirs(op, case, True)]
            mine, planes, last = least_seconds(calls, 1 if toy else 15)
            found.append(dict(case=name, op=op, oocdl=mine, planes=planes, channels_last=last))
    return found


def main() -> None:
    """Print a table of milliseconds."""
    args = short_parser(__doc__).parse_args()
    made, figures = rows(args.toy), ("oocdl", "planes", "channels_last")
    cells = [[row["case"], row["op"], *(f"{1e3 * row[name]:.2f}" for name in figures)] for row in made]
    report(args, ["case", "operator", "oocdl ms", "PyTorch, planes", "PyTorch, channels last"], cells, made)


if __name__ == "__main__":
    main()
