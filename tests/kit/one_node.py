"""One ONNX node against a function of PyTorch, as a case of a parametrised test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import helper

from oocdl.graph.ir.graph import Array
from tests.kit import lowered


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
