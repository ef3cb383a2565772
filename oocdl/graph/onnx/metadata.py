"""What ONNX cannot say of a network, kept in a file's ``metadata_props``: which tensors are trained, and how.

ONNX knows initializers. Whether one is a parameter, a frozen one, a buffer, or a statistic that a norm in
training mode updates, which row of an embedding is padding, and what a tensor is called in PyTorch is written
here by ``oocdl.from_torch``, as one JSON text. A file may come from anywhere, so all of it is checked.
"""

from __future__ import annotations

import json
import math
from collections import Counter as CountOf
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import onnx

from oocdl.errors import ModelError
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.sizes.open_axes import Condition, OpenAxes, is_readable
from oocdl.graph.onnx.tensors import WeightSource

KEY = "oocdl.module"
FORMAT = 2
KINDS = ("parameter", "buffer", "statistic")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What is known of one initializer."""

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
    """What it was when the file was written."""
    per_pass: int
    """How often its norm is called in one pass."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a file says of the module that it was made of."""

    module: str
    """The class of the module."""
    exporter: str
    """Which exporter wrote the graph."""
    facts: Mapping[str, Fact]
    """By initializer. What is not named here is a constant of the module's code."""
    unread: tuple[str, ...] = ()
    """Parameters that the forward pass does not read: they are not in the file, and never change."""
    counters: Mapping[str, Counter] = field(default_factory=dict)
    """By name in the module."""
    sizes: OpenAxes = field(default_factory=OpenAxes)
    """Under which sizes of its inputs the file is the module."""
    compared: bool = True
    """Whether file and module were compared by numbers."""
    predicts: str = ""
    """In what its predictions are others than those of the module in evaluation mode."""
    notes: tuple[str, ...] = ()
    """What the user may not expect of it."""
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
    kept = [entry for entry in model.metadata_props if entry.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    model.metadata_props.add(key=KEY, value=metadata.text())


def read_metadata(
    model: onnx.ModelProto, initializers: Mapping[str, WeightSource], nodes: tuple[OnnxNode, ...]
) -> Metadata | None:
    """Read what ``write_metadata`` wrote; None if there is none. ModelError if it does not fit the file."""
    texts = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not texts:
        return None
    try:
        (text,) = texts
        known = _metadata(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        _bad(f"it cannot be read ({reason})")
    named = [*known.unread, *known.counters, *(name for fact in known.facts.values() for name in fact.names)]
    twice = next((name for name, count in CountOf(named).items() if count > 1), None)
    if twice is not None:
        _bad(f"{shown(twice)} names two tensors")
    for name, fact in known.facts.items():
        _check(name, fact, initializers.get(name), nodes)
    return known


def _bad(what: str) -> NoReturn:
    way_out = "write the file again with oocdl.from_torch"
    raise ModelError(f"the file's metadata '{KEY}' does not fit the file: {what}; {way_out}")


def _metadata(data: Any) -> Metadata:
    """Make ``Metadata`` of parsed JSON; raises whatever comes of bad data."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r} is not {FORMAT}")
    facts = {
        _text(name): Fact(
            kind=_text(fact["kind"]),
            names=tuple(_text(one) for one in fact["names"]),
            requires_grad=_flag(fact["requires_grad"]),
            padding_idx=None if fact["padding_idx"] is None else _count(fact["padding_idx"]),
        )
        for name, fact in data["facts"].items()
    }
    counters = {
        _text(name): Counter(start=_count(one["start"]), per_pass=_count(one["per_pass"]))
        for name, one in data["counters"].items()
    }
    return Metadata(
        module=_text(data["module"]),
        exporter=_text(data["exporter"]),
        facts=facts,
        unread=tuple(_text(name) for name in data["unread"]),
        counters=counters,
        sizes=_sizes(data["sizes"]),
        compared=_flag(data["compared"]),
        predicts=str(data["predicts"]),
        notes=tuple(_text(note) for note in data["notes"]),
        numbers=tuple(_number(value) for value in data["numbers"]),
    )


def _sizes(data: Any) -> OpenAxes:
    conditions = tuple(Condition(_text(one["text"]), str(one["place"])) for one in data["conditions"])
    unreadable = [item for item in conditions if not is_readable(item.text)]
    if unreadable:
        raise ValueError(f"'{unreadable[0].text[:80]}' is no condition")
    return OpenAxes(
        conditions=conditions,
        fixed={_text(axis): str(why) for axis, why in data["fixed"].items()},
        least_batch=_count(data["least_batch"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is no name")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value


def _check(name: str, fact: Fact, item: WeightSource | None, nodes: tuple[OnnxNode, ...]) -> None:
    """Raise ModelError if a fact cannot be true of its initializer."""
    if item is None:
        _bad(f"there is no initializer {shown(name)}")
    if fact.kind not in KINDS or not fact.names:
        _bad(f"{shown(name)} is said to be {shown(fact.kind)}, with {len(fact.names)} names")
    if fact.kind == "statistic":
        uses = [(node, index) for node in nodes for index, read in enumerate(node.inputs) if read == name]
        if not all(node.op == "BatchNormalization" and index in (3, 4) for node, index in uses):
            _bad(f"{shown(name)} is said to be a running statistic, but is read as something else")
    if fact.kind != "buffer" and not item.is_float:
        _bad(f"{shown(name)} is said to be a {fact.kind}, but is {item.stored}")
    if fact.requires_grad and fact.kind != "parameter":
        _bad(f"{shown(name)} is said to be a {fact.kind} that is trained")
    if fact.padding_idx is not None and (not item.shape or fact.padding_idx >= item.shape[0]):
        _bad(
            f"row {fact.padding_idx} of {shown(name)} is said to be padding; its shape is {list(item.shape)}"
        )
