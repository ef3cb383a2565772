"""All cases of all operators, a program of several instructions, how large an error is, counted calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Instruction, Program
from tests.kit import kernel_cases
from tests.kit.kernel_cases import Case, noise
from tests.kit.programs import operand, program
from tests.kit.window_cases import convolutions, grouped, pools

_BY_HAND = [
    *kernel_cases.pointwise(),
    *kernel_cases.structure(),
    *kernel_cases.lookups(),
    *kernel_cases.reductions(),
    *kernel_cases.contractions(),
    *kernel_cases.resamples(),
    *convolutions(),
    *grouped(),
    *pools(),
]
CASES = [*_BY_HAND, *kernel_cases.others({case.op for case in _BY_HAND})]


def by_operator(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Give a test ``cases``, those of one operator at a time: a test costs more than most cases do."""
    ops: dict[str, list[Case]] = {}
    for case in cases:
        ops.setdefault(case.op, []).append(case)
    return pytest.mark.parametrize("cases", ops.values(), ids=ops)


@contextmanager
def told(case: Case) -> Iterator[None]:
    """Say which case a failure is of."""
    try:
        yield
    except BaseException as failure:
        failure.add_note(case.name)
        raise


def error(got: Array, want: Array) -> float:
    """Largest difference relative to the largest value; equal infinities do not differ."""
    same = got == want
    finite = np.where(same, 0, got) - np.where(same, 0, want)
    scale = max(float(np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0.0)), 1e-30)
    return float(np.abs(finite).max(initial=0.0)) / scale


def counting(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Tensor]:
    """Record what a function of a module returns from now on, call by call."""
    whole: Callable[..., Tensor] = getattr(module, name)
    calls: list[Tensor] = []

    def call(*args: Any, **options: Any) -> Tensor:
        calls.append(whole(*args, **options))
        return calls[-1]

    monkeypatch.setattr(module, name, call)
    return calls


def turned(program: Program) -> Program:
    """The same program, all that has axes of space lying with its channels last."""
    shapes = dict(zip(program.inputs, program.input_shapes, strict=True))
    for item in program.instructions:
        shapes |= dict(zip(item.outputs, item.shapes, strict=True))
    grouped = any(item.attrs.get("grouped") for item in program.instructions)
    channels = (1, 2) if grouped else (1,)
    orders = {
        slot: (0, *range(1 + len(channels), len(s)), *channels)
        for slot, s in shapes.items()
        if len(s) - len(channels) in (3, 4)
    }
    return replace(program, orders=tuple(orders.items()), key=f"{program.key} last")


def block() -> tuple[Program, list[Array]]:
    """Conv, LeakyRelu, residual: crops, factored slots, outputs that are cropped or given."""
    x, w, skip = noise(2, 3, 8, 6), noise(4, 3, 3, 3, seed=1), noise(2, 4, 2, 2, 6, seed=2)
    inputs = [a.astype("float32") for a in (x, w, skip)]
    wide, flat, kind = (2, 4, 2, 2, 6), (2, 4, 4, 6), ("float32",)
    read = operand(0, (2, 3, 5, 6), [(0, 2), (0, 3), (0, 5), (0, 6)], [(0, 0), (0, 0), (1, 0), (1, 1)])
    slides = {"strides": (1, 1), "dilations": (1, 1), "pads": (1, 1, 1, 1)}
    conv = Instruction("Conv", (read, operand(1, (4, 3, 3, 3))), (3,), (flat,), (wide,), kind, slides)
    relu = Instruction("LeakyRelu", (operand(3, wide),), (4,), (wide,), (wide,), kind, {"alpha": 0.2})
    add = Instruction("Add", (operand(4, wide), operand(2, wide)), (5,), (wide,), (wide,), kind)
    axes = {"axes": (0, 2, 3)}
    total = Instruction("ReduceSum", (operand(5, flat),), (6,), ((1, 4, 1, 1),), ((4,),), kind, axes)
    made = program(inputs, [conv, relu, add, total], [], "block")
    outputs = (
        operand(5, (2, 4, 1, 2, 6), [(0, 2), (0, 4), (1, 2), (0, 2), (0, 6)]),
        operand(6, (4,)),
        operand(2, wide),
        operand(2, (1, 4, 2, 2, 6), [(0, 1), (0, 4), (0, 2), (0, 2), (0, 6)]),
        operand(5, wide),
        operand(5, wide),
    )
    return replace(made, outputs=outputs), inputs
