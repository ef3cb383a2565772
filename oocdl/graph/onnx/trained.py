"""Records which initializers of a file are trained, and why, with remarks on what looks wrong.

The reader makes it, before anything runs. ``fit``, ``plan`` and ``oocdl info`` show it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from math import prod

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Role, Shape
from oocdl.graph.onnx.metadata import Fact
from oocdl.graph.onnx.onnx_file import TracedFile
from oocdl.graph.onnx.own_operators import counted
from oocdl.graph.onnx.signs import Remark, remarks_of


class Part(Enum):
    """The purpose of an initializer; the value is its name in print."""

    TRAINED = "trained"
    FROZEN = "frozen"
    STATISTICS = "running statistics"
    CONSTANT = "constant"
    UNUSED = "unused"


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One initializer of a file."""

    name: str
    shape: Shape
    part: Part
    why: str
    """The reason for its part: whose word or which sign decided."""
    modules: tuple[str, ...] = ()
    """The modules that read it, or its names in the module, where these are several: it is tied."""

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The tensors of a model: trained, frozen, tied, constant or a running statistic, and why.

    >>> record = TensorRecord(name="w", shape=(2, 3), part=Part.TRAINED, why="float initializer")
    >>> Trained(tensors=(record,)).count(Part.TRAINED)
    (1, 6)
    """

    tensors: tuple[TensorRecord, ...]
    """Every initializer of the file, in its order."""
    remarks: tuple[Remark, ...] = ()
    """Things that look wrong, each with its cure."""
    own: tuple[tuple[str, int], ...] = ()
    """Operators of the user's own (``oocdl.ops.register``), and the number of nodes of each."""
    is_unsaid: bool = False
    """Whether neither the file (of ``from_torch``, or a preset's) nor ``freeze`` says what is trained."""
    notes: tuple[str, ...] = ()
    """Remarks of the file on what the user may not expect of the network."""

    def __repr__(self) -> str:
        found = ", ".join(f"{self.count(part)[0]} {part.value}" for part in Part if self.count(part)[0])
        return f"<Trained: {found or 'no tensors'}; {len(self.remarks)} remarks>"

    def of(self, part: Part) -> tuple[TensorRecord, ...]:
        """Return the initializers of one part."""
        return tuple(record for record in self.tensors if record.part is part)

    def count(self, part: Part) -> tuple[int, int]:
        """Return how many tensors and how many numbers a part has."""
        found = self.of(part)
        return len(found), sum(record.elements for record in found)

    @property
    def tied(self) -> tuple[TensorRecord, ...]:
        """The trained tensors that several modules read."""
        return tuple(record for record in self.of(Part.TRAINED) if record.modules)

    def refuse(self) -> None:
        """Raise ModelError that lists all remarks, if there are any: what ``strict=True`` asks for."""
        if self.remarks:
            count = "1 remark" if len(self.remarks) == 1 else f"{len(self.remarks)} remarks"
            listed = "; ".join(f"({n}) {item.text}: {item.cure}" for n, item in enumerate(self.remarks, 1))
            raise ModelError(f"strict=True refuses the model for {count} on what is trained: {listed}")


def record_of(file: TracedFile, patterns: Collection[str]) -> Trained:
    """Make the record of a file whose roles are decided; ``patterns`` are those of ``freeze``."""
    model, tensors = file.model, []
    for name, item in model.initializers.items():
        fact = model.fact(name)
        part, why = _part(file, name, fact, patterns)
        modules = file.modules(name) if fact is None else fact.names
        tied = modules if part is Part.TRAINED and len(modules) > 1 else ()
        tensors.append(TensorRecord(name=name, shape=item.shape, part=part, why=why, modules=tied))
    return Trained(
        tensors=tuple(tensors),
        remarks=remarks_of(file),
        own=tuple(sorted(counted(model.nodes).items())),
        is_unsaid=model.metadata is None and model.producer != "oocdl" and not patterns,
        notes=() if model.metadata is None else model.metadata.notes,
    )


def _part(file: TracedFile, name: str, fact: Fact | None, patterns: Collection[str]) -> tuple[Part, str]:
    """Return what an initializer is for, and why."""
    model, role = file.model, file.roles.get(name)
    kind = model.kinds.get(name, "").removesuffix("_TENSOR").lower()
    said = f"{kind}, as the exporter says" if kind in ("parameter", "buffer", "constant") else ""
    said = said if fact is None else f"{fact.kind}, as the file says"
    if role is None:
        return Part.UNUSED, "no output needs it"
    if role is Role.CONSTANT:
        unsaid = "number of the model's code" if model.initializers[name].is_float else "whole numbers"
        return Part.CONSTANT, said or unsaid
    pattern = model.pattern_of(name, patterns)
    if pattern is not None:
        return Part.FROZEN, f"freeze pattern '{pattern}'"
    if name in file.frozen:
        table = "table without a name of its own, too large for a constant"
        return Part.FROZEN, table if fact is None else "requires_grad=False, as the file says"
    if role is not Role.STATE:
        return Part.TRAINED, said or "float initializer"
    if any(reader.node.outputs[0] in file.evaluated for reader in model.readers.get(name, ())):
        return Part.FROZEN, "its norm is in evaluation mode in the file"
    return Part.STATISTICS, "updated by each batch"
