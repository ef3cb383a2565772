"""A checked ONNX file, without the contents of its weights, and the nodes that read these."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.bodies import every_node, owners, results_of_bodies
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.metadata import ExactNumbers, Fact, Metadata
from oocdl.graph.onnx.model_file import Body, OnnxNode, Port, shown
from oocdl.graph.onnx.tensors import WeightSource

LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
"""Operators whose second input is a weight, and whose third, if there is one, a bias."""


class Reader(NamedTuple):
    """A node that reads an initializer, as which input, and by which name: another one behind an Identity."""

    node: OnnxNode
    place: int
    name: str


@dataclass(frozen=True, eq=False, kw_only=True)
class OnnxFile:
    """A checked ONNX file."""

    path: Path
    opset: int
    producer: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, WeightSource]
    kinds: Mapping[str, str]
    """Initializer -> PARAMETER, BUFFER or CONSTANT_TENSOR, where the exporter said."""
    folded: Mapping[str, tuple[str, ...]]
    """Initializer -> values from which the exporter's optimizer has computed it, where that said so."""
    metadata: Metadata | None = None
    """The record of the module that ``oocdl.from_torch`` wrote; None for other files."""
    exact: ExactNumbers | None = None

    @cached_property
    def owner(self) -> Mapping[str, str]:
        """Each name of an initializer, also behind Identity nodes -> the initializer."""
        return owners(self.nodes, self.initializers)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Reader]]:
        """The nodes that read each initializer, also behind Identity nodes, which are none of them."""
        readers: dict[str, list[Reader]] = defaultdict(list)
        for node in every_node(self.nodes):
            for place, name in enumerate(node.inputs):
                if name in self.owner and node.op != "Identity":
                    readers[self.owner[name]].append(Reader(node, place, name))
        return readers

    @cached_property
    def handed_out(self) -> Set[str]:
        """The initializers that are results of the model, or of a body of it, as they are."""
        results = {port.name for port in self.outputs} | results_of_bodies(self.nodes)
        return {self.owner[name] for name in results if name in self.owner}

    @cached_property
    def of_layers(self) -> Set[str]:
        """The names of what convolutions and products make."""
        return {name for node in every_node(self.nodes) if node.op in LAYERS for name in node.outputs}

    def fact(self, initializer: str) -> Fact | None:
        """What the metadata says of an initializer."""
        return self.metadata.facts.get(initializer) if self.metadata is not None else None

    def names_of(self, initializer: str) -> tuple[str, ...]:
        """Return the names by which ``freeze`` may mean an initializer: its own, and those in the module."""
        fact = self.fact(initializer)
        return (initializer,) if fact is None else tuple(dict.fromkeys((initializer, *fact.names)))

    def pattern_of(self, initializer: str, patterns: Collection[str]) -> str | None:
        """Return the first pattern of ``freeze`` that means an initializer; None if none does."""
        names = self.names_of(initializer)
        return next((one for one in patterns if any(fnmatchcase(name, one) for name in names)), None)

    def fingerprint(self) -> str:
        """Return a digest of the file and its external data."""
        digest = hashlib.blake2b(digest_size=16)
        others = (item.path for item in self.initializers.values() if item.path)
        for path in dict.fromkeys((self.path, *others)):
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()


def module_path(node: OnnxNode) -> str:
    """Return the path that ``named_modules`` has of the module that a node is of; empty if none is known."""
    # TorchScript writes a path as "/model/model.1/model.1.0/conv/Conv": a child of a list repeats its parent.
    if node.scopes:
        return module_of(node)
    path: list[str] = []
    for part in module_of(node).split("/") if node.name.startswith("/") else ():
        path[-1:] = [part] if path and part.startswith(f"{path[-1]}.") else [*path[-1:], part]
    return ".".join(path)


def module_of(node: OnnxNode) -> str:
    """Return the module that a node is of, calls of one module being one."""
    if node.scopes:
        return re.sub(r"@\d+", "", ("", *node.scopes)[-2])
    if node.name.startswith("/"):
        return "/".join(re.sub(r"_\d+$", "", part) for part in node.name.split("/")[1:-1])
    return node.name


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedFile:
    """A file with decided roles."""

    model: OnnxFile
    roles: Mapping[str, Role]
    frozen: Collection[str]
    evaluated: Collection[str]
    """First outputs of the norms that use their running statistics in training, too."""

    @cached_property
    def into(self) -> Mapping[str, Sequence[OnnxNode]]:
        """The nodes that read each name."""
        into: dict[str, list[OnnxNode]] = defaultdict(list)
        for node in self.model.nodes:
            for name in node.inputs:
                into[name].append(node)
        return into

    @cached_property
    def is_dynamo(self) -> bool:
        """Whether PyTorch's dynamo exporter wrote the file: it says of what each node was made."""
        return bool(self.model.kinds) or any(node.origin for node in self.model.nodes)

    @property
    def is_torchscript(self) -> bool:
        """Whether PyTorch's older exporter wrote the file."""
        return self.model.producer == "pytorch" and not self.is_dynamo

    @cached_property
    def trained(self) -> list[str]:
        return [name for name, role in self.roles.items() if role is Role.WEIGHT and name not in self.frozen]

    def is_uniform(self, name: str) -> bool:
        """Whether all its numbers are equal, as those of fresh norms and biases are."""
        item = self.model.initializers[name]
        if item.nbytes > MOST_CONSTANT_BYTES:
            return False
        data = item.raw()
        return data.size > 0 and bool((data == data.flat[0]).all())

    def modules(self, name: str) -> tuple[str, ...]:
        """The modules whose nodes read an initializer; the nodes, where the file knows no modules."""
        return tuple(dict.fromkeys(module_of(reader.node) for reader in self.model.readers.get(name, ())))


def network_differences(old: OnnxFile, new: OnnxFile) -> str:
    """Return the first difference in words; empty if there is none.

    Parameters and running statistics may hold other numbers. Buffers and constants belong to the network.
    """
    return next(_differences(old, new), "")


def _differences(old: OnnxFile, new: OnnxFile) -> Iterator[str]:
    if old.metadata is None or new.metadata is None:
        yield "it is of a file that no module was written to"
        return
    if old.metadata.module != new.metadata.module:
        yield f"it is a {old.metadata.module}, now a {new.metadata.module}"
    for name in dict.fromkeys((*old.metadata.facts, *old.initializers)):
        if name not in new.initializers:
            yield f"{shown(name)} is missing"
            continue
        for before, after in zip(_facts(old, name), _facts(new, name), strict=True):
            if before != after:
                yield f"{shown(name)} is {before}, now {after}"
        fact, item = old.metadata.facts.get(name), old.initializers[name]
        is_fixed = fact is None or fact.kind == "buffer"
        if is_fixed and not np.array_equal(item.raw(), new.initializers[name].raw(), equal_nan=item.is_float):
            yield f"the buffer {shown(name)} holds other numbers"
    yield from (f"{shown(name)} is new" for name in new.initializers if name not in old.initializers)
    for one, other in zip_longest(old.nodes, new.nodes):
        if one is None or other is None or _node(one) != _node(other):
            gone, come = ("its end" if node is None else shown(node.name) for node in (one, other))
            yield f"the node {gone} is now {come}, or does something else"
    if (old.inputs, old.outputs) != (new.inputs, new.outputs):
        yield "its inputs or outputs have other names or sizes"


def _facts(model: OnnxFile, name: str) -> tuple[str, str, str]:
    """Say what an initializer is: its form, its part in the module, and its names there."""
    item, fact = model.initializers[name], model.fact(name)
    form = f"{list(item.shape)} of {item.stored}"
    if fact is None:
        return form, "a constant", ""
    frozen = " that is frozen" if fact.kind == "parameter" and not fact.requires_grad else ""
    padding = "" if fact.padding_idx is None else f", padding_idx {fact.padding_idx}"
    return form, f"a {fact.kind}{frozen}", f"named {', '.join(map(shown, fact.names))}{padding}"


def _plain(held: Any) -> Any:
    if isinstance(held, np.ndarray):
        return held.dtype, held.shape, held.tobytes()
    if isinstance(held, Mapping):
        return {name: _plain(value) for name, value in held.items()}
    if isinstance(held, Body):
        return held.inputs, held.outputs, [_node(node) for node in held.nodes], _plain(held.constants)
    return held


def _node(node: OnnxNode) -> tuple[Any, ...]:
    return node.op, node.inputs, node.outputs, _plain(node.attrs)
