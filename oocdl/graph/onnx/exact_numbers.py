"""Numbers of a module's code, which a file rounds to float32, as the code has them.

ONNX's attributes are float32, and so are the constants of a network of float32. In float64 a module computes
with 0.1 all the same, and with the square root of 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.model_file import OnnxNode

_KNOWN = (
    math.pi,
    math.e,
    math.sqrt(2),
    math.sqrt(0.5),
    math.sqrt(2 / math.pi),
    2 / math.sqrt(math.pi),
    math.log(2),
    1 / math.log(2),
    math.log(10),
    1 / math.log(10),
    *(1 / number for number in range(3, 13)),
    *(0.1**digits for digits in range(1, 7)),
)
"""Numbers that exporters put into activations, logarithms, roots and roundings."""


class ExactNumbers:
    """Finds the number that was rounded to float32.

    ``numbers``: those of the module, of which the first of equal ones counts. A tensor of float32 that holds
    a tenth is among them as it is, and so stays as it is.
    """

    def __init__(self, numbers: Iterable[float]) -> None:
        self._exact: dict[float, float] = {}
        for number in (*numbers, *_KNOWN, *(-known for known in _KNOWN)):
            self._exact.setdefault(float(np.float32(number)), number)

    def number(self, value: float) -> float:
        return self._exact.get(float(np.float32(value)), value)

    def array(self, array: Array) -> Array:
        """Return one number of a float type as float64, as the code has it; any other array as it is.

        What is computed of such numbers is float64 too, as in Python.
        """
        if array.dtype.kind != "f" or array.size != 1:
            return array
        value = float(array.reshape(()))
        return np.full(array.shape, self._exact.get(value, value))

    def nodes(self, nodes: Sequence[OnnxNode]) -> tuple[OnnxNode, ...]:
        return tuple(replace(node, attrs=self._attrs(node.op, node.attrs)) for node in nodes)

    def _attrs(self, op: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
        if op == "Constant" and "value_float" in attrs:
            return {"value": self.array(np.asarray(attrs["value_float"], np.float32))}
        return {name: self._attr(value) for name, value in attrs.items()}

    def _attr(self, value: Any) -> Any:
        if isinstance(value, float):
            return self.number(value)
        if isinstance(value, tuple) and value and isinstance(value[0], float):
            return tuple(map(self.number, value))
        return self.array(value) if isinstance(value, np.ndarray) else value
