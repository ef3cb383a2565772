"""Turns an exporter's file into ours: initializers by PyTorch's names, true contents, and the metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from torch import nn

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.metadata import Counter, Fact, Metadata, write_metadata
from oocdl.graph.onnx.own_operators import DETACH
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.graph.onnx.writer import write_model
from oocdl.pytorch.module_tensors import Key, array_of, floats, key_of, named_tensors
from oocdl.pytorch.study.operator_watch import Findings

Dims = Mapping[str, tuple[int | str, ...]]
"""Input or output -> for each axis its size, or the name of the size where it is open."""


def keys_of(twin: nn.Module) -> dict[Key, str]:
    """Return contents -> first name, of every float tensor of a twin; of equal buffers, the first."""
    return {key_of(array_of(held.tensor)): held.names[0] for held in reversed([*floats(twin)])}


def annotate(
    draft: Path,
    target: Path,
    module: nn.Module,
    keys: Mapping[Key, str],
    found: Findings,
    about: Metadata,
    dims: Dims,
) -> Metadata:
    """Write the exporter's file ``draft`` as ``target``, with metadata and the contents of ``module``.

    ``keys`` tell the contents of the twin that was exported, ``about`` the metadata but for its tensors,
    which are added. Raises UnsupportedError if a tensor that is trained or updated is not in the file.
    """
    model = inspect_onnx(draft)
    known = _known(model, keys)
    trained = {name for name, p in module.named_parameters() if p.requires_grad} & found.reached
    updated = {name for name, training in found.norms.items() if training}
    if lost := sorted((trained | updated) - set(known.values())):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise UnsupportedError(f"the exporter has folded '{lost[0]}' away{more}")
    metadata, names, repeated = _described(model, module, known, found, about)
    tensors = {held.names[0]: held.tensor for held in named_tensors(module)}
    titles = {names.get(name, name): title for name, title in known.items()}

    def contents(name: str) -> Iterator[Array] | None:
        return iter((array_of(tensors[titles[name]]),)) if name in titles else None

    def edit(proto: onnx.ModelProto) -> None:
        _edit(proto, names, dims)
        write_metadata(proto, metadata)

    write_model(draft, target, contents, edit=edit, dropped=repeated)
    return metadata


def _known(model: OnnxModel, keys: Mapping[Key, str]) -> dict[str, str]:
    """Return initializer -> the name in the module of the tensor that it holds."""
    shapes, known = {key[:2] for key in keys}, {}
    for name, item in model.initializers.items():
        dtype = "float32" if item.stored.name == "bfloat16" else item.stored.name
        if item.is_float and (dtype, item.shape) in shapes:
            known[name] = keys.get(key_of(item.raw().astype(dtype, copy=False)), "")
    return {name: title for name, title in known.items() if title}


def _described(
    model: OnnxModel, module: nn.Module, known: Mapping[str, str], found: Findings, about: Metadata
) -> tuple[Metadata, dict[str, str], set[str]]:
    """Return the metadata, initializer -> its name in the new file, and the initializers that go."""
    taken = {name for node in model.nodes for name in (*node.inputs, *node.outputs)}
    taken |= {port.name for port in (*model.inputs, *model.outputs)} | {*model.initializers}
    facts, repeated = dict[str, Fact](), set[str]()
    names, first = dict[str, str](), dict[str, str]()
    held = {tensor.names[0]: tensor for tensor in named_tensors(module)}
    order = {title: place for place, title in enumerate(held)}
    for name, title in sorted(known.items(), key=lambda pair: order[pair[1]]):
        if title in first:  # a tied tensor that was written twice
            names[name] = first[title]
            repeated.add(name)
            continue
        names[name] = first[title] = title if title == name or title not in taken else name
        tensor = held[title]
        kind = "parameter" if tensor.is_parameter else "statistic" if found.norms.get(title) else "buffer"
        trained = tensor.is_parameter and tensor.tensor.requires_grad and title in found.reached
        facts[first[title]] = Fact(
            kind=kind,
            names=tensor.names,
            requires_grad=trained,
            padding_idx=found.padding.get(title) if tensor.is_parameter else None,
        )
    unread = [n for o in held.values() if o.is_parameter and o.names[0] not in first for n in o.names]
    counters = {
        name: Counter(start=int(held[name].tensor), per_pass=count) for name, count in found.counters.items()
    }
    return replace(about, facts=facts, unread=tuple(unread), counters=counters), names, repeated


def _edit(proto: onnx.ModelProto, names: Mapping[str, str], dims: Dims) -> None:
    """Rename initializers, and say which axes are open; shapes in between were those of one call."""
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for info in proto.graph.output:
        info.name = names.get(info.name, info.name)
    del proto.graph.value_info[:]
    for info in [*proto.graph.input, *proto.graph.output]:
        if info.name in dims:
            kind = info.type.tensor_type.elem_type
            info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, kind, dims[info.name]))
    # The operator that cuts gradients, where there is one, is a function for other readers.
    domain, name = DETACH.split("::")
    if any(node.domain == domain for node in proto.graph.node):
        standard = [item for item in proto.opset_import if not item.domain]
        body = [onnx.helper.make_node("Identity", ["x"], ["y"])]
        proto.functions.append(onnx.helper.make_function(domain, name, ["x"], ["y"], body, standard))
