"""Facts that ONNX cannot express, kept in a file's ``metadata_props``: which tensors are trained, and how.

ONNX knows initializers. Whether one is a parameter, a frozen one, a buffer, or a statistic that a norm in
training mode updates, which row of an embedding is padding, and what a tensor is called in PyTorch is written
here by ``oocdl.from_torch``, as one JSON text. A file may come from anywhere, so all of it is checked.
"""

from __future__ import annotations

import json
import math
from collections import Counter as CountOf
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import numpy as np
import onnx

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.bodies import owners, results_of_bodies
from oocdl.graph.onnx.input_sizes import OpenAxes, is_readable
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.tensors import WeightSource

KEY = "oocdl.module"
FORMAT = 2
KINDS = ("parameter", "buffer", "statistic")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Facts about one initializer."""

    kind: str
    """A ``parameter``; a ``buffer``, which nothing changes; or a ``statistic``, which its norms update."""
    names: tuple[str, ...]
    """All names of the tensor in the module, as ``state_dict`` has them; several where it is tied."""
    requires_grad: bool = False
    """Whether the parameter is trained."""
    padding_idx: int | None = None
    """The row of an embedding that gets no gradient."""


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A ``num_batches_tracked`` of the module, which ONNX has no tensor for."""

    start: int
    """Value when the file was written."""
    per_pass: int
    """Calls of its norm in one pass."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Facts of a file about the module that it was made of."""

    module: str
    exporter: str
    """Name of the exporter that wrote the graph."""
    facts: Mapping[str, Fact]
    """Initializer -> its facts. One that is absent is a constant of the module's code."""
    unread: tuple[str, ...] = ()
    """Parameters that the forward pass does not read: they are not in the file, and never change."""
    counters: Mapping[str, Counter] = field(default_factory=dict)
    sizes: OpenAxes = field(default_factory=OpenAxes)
    """Sizes of its inputs under which the file is the module."""
    compared: bool = True
    """Whether file and module were compared by numbers."""
    predicts: str = ""
    """Differences of its predictions from those of the module in evaluation mode; empty: none."""
    notes: tuple[str, ...] = ()
    """Remarks on what the user may not expect."""
    numbers: tuple[float, ...] = ()
    """Numbers of the module's code that float32 cannot hold."""

    def initializer_of(self, name: str) -> str | None:
        """Return the initializer that holds the tensor ``name`` of the module; None if none does."""
        return next((key for key, fact in self.facts.items() if name in fact.names), None)

    def text(self) -> str:
        """Return the JSON text that ``read_metadata`` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)})


def write_metadata(model: onnx.ModelProto, metadata: Metadata) -> None:
    """Put ``metadata`` into the model, in place of what it had."""
    kept = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, {**kept, KEY: metadata.text()})


def read_metadata(
    model: onnx.ModelProto, initializers: Mapping[str, WeightSource], nodes: tuple[OnnxNode, ...]
) -> Metadata | None:
    """Read what ``write_metadata`` wrote; None if there is none. ModelError if it does not fit the file."""
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not texts:
        return None
    try:
        (text,) = texts
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r} is not {FORMAT}")
        known: Metadata = _read(Metadata, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        _bad(f"it cannot be read ({reason})")
    for item in known.sizes.conditions:
        if not is_readable(item.text):
            _bad(f"'{item.text[:80]}' is no condition")
    named = [*known.unread, *known.counters, *(name for fact in known.facts.values() for name in fact.names)]
    [(most, count)] = CountOf(named).most_common(1) or [("", 0)]
    if count > 1:
        _bad(f"{shown(most)} names two tensors")
    owner = owners(nodes, initializers)
    results = results_of_bodies(nodes) | {info.name for info in model.graph.output}
    others = {owner[name] for name in results if name in owner} | {
        owner[name]
        for node in nodes
        for index, name in enumerate(node.inputs)
        if name in owner and (node.op != "BatchNormalization" or index < 3) and node.op != "Identity"
    }
    for name, fact in known.facts.items():
        _check(name, fact, initializers.get(name), others)
    return known


def _bad(what: str) -> NoReturn:
    way_out = "write the file again with oocdl.from_torch"
    raise ModelError(f"the file's metadata '{KEY}' does not fit the file: {what}; {way_out}")


def _read(kind: Any, value: Any) -> Any:
    """Make parsed JSON what a field of this kind holds; raises whatever comes of bad data."""
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        made = {item.name: _read(hints[item.name], value[item.name]) for item in fields(kind)}
        if any(made[item.name] == "" != item.default for item in fields(kind)):
            raise ValueError("a text is empty")
        return kind(**made)  # type: ignore[operator]
    inner = get_args(kind)
    if get_origin(kind) in (tuple, Mapping):
        if "" in value:
            raise ValueError("a name is empty")
        if get_origin(kind) is tuple:
            return tuple(_read(inner[0], one) for one in _read(list, value))
        return {name: _read(inner[1], one) for name, one in _read(dict, value).items()}
    if inner:  # that or None
        return None if value is None else _read(inner[0], value)
    sound = math.isfinite(value) if isinstance(value, float) else not isinstance(value, int) or value >= 0
    if type(value) is not kind or not sound:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


_hints = cache(get_type_hints)


def _check(name: str, fact: Fact, item: WeightSource | None, others: Collection[str]) -> None:
    """Raise ModelError if a fact cannot be true of its initializer; ``others`` cannot be statistics."""
    if item is None:
        _bad(f"there is no initializer {shown(name)}")
    if fact.kind not in KINDS or not fact.names:
        _bad(f"{shown(name)} is said to be {shown(fact.kind)}, with {len(fact.names)} names")
    if fact.kind == "statistic" and name in others:
        _bad(f"{shown(name)} is said to be a running statistic, but is read as something else")
    if fact.kind != "buffer" and not item.is_float:
        _bad(f"{shown(name)} is said to be a {fact.kind}, but is {item.stored}")
    if fact.requires_grad and fact.kind != "parameter":
        _bad(f"{shown(name)} is said to be a {fact.kind} that is trained")
    if fact.padding_idx is not None and (not item.shape or fact.padding_idx >= item.shape[0]):
        row = f"row {fact.padding_idx} of {shown(name)}"
        _bad(f"{row} is said to be padding; its shape is {list(item.shape)}")


_KNOWN = (
    *(math.pi, math.e, math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi)),
    *(math.log(2), 1 / math.log(2), math.log(10), 1 / math.log(10)),
    *(1 / number for number in range(3, 13)),
    *(0.1**digits for digits in range(1, 7)),
)
"""Numbers that exporters put into activations, logarithms, roots and roundings."""


class ExactNumbers:
    """Finds the number of a module's code, such as 0.1, that a file rounds to float32: in float64 it counts.

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
        """Return one number of a float type as float64, as the code has it; any other array as it is."""
        # What is computed of such numbers is float64 too, as in Python.
        if array.dtype.kind != "f" or array.size != 1:
            return array
        value = float(array.reshape(()))
        return np.full(array.shape, self._exact.get(value, value))

    def node(self, node: OnnxNode) -> OnnxNode:
        attrs = {name: self._attr(value) for name, value in node.attrs.items()}
        if node.op == "Constant" and "value_float" in attrs:
            attrs = {"value": self.array(np.asarray(attrs["value_float"], np.float32))}
        return replace(node, attrs=attrs)

    def _attr(self, value: Any) -> Any:
        if isinstance(value, float):
            return self.number(value)
        if isinstance(value, tuple) and value and isinstance(value[0], float):
            return tuple(map(self.number, value))
        return self.array(value) if isinstance(value, np.ndarray) else value
