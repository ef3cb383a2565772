"""From an exporter's file to ours: initializers by PyTorch's names, true contents, and the metadata.

What the file has is compared with what the module does: a parameter, a norm, an embedding or a dropout that
the exporter has folded or left out makes the file another network, and is refused by name.
"""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from torch import nn

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.lower.random import RANDOM
from oocdl.graph.onnx.metadata import Counter, Fact, Metadata, write_metadata
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.graph.onnx.writer import write_model
from oocdl.pytorch.probe import Findings
from oocdl.pytorch.tensors import Key, array_of, floats, key_of, named_tensors


def keys_of(twin: nn.Module) -> dict[Key, str]:
    """Return contents -> first name, of every float tensor of a twin."""
    return {key_of(array_of(held.tensor)): held.names[0] for held in floats(twin)}


def annotate(
    draft: Path, target: Path, module: nn.Module, keys: Mapping[Key, str], found: Findings, exporter: str
) -> Metadata:
    """Write the exporter's file ``draft`` as ``target``, with metadata and the contents of ``module``.

    ``keys`` tell the contents of the twin that was exported. Raises UnsupportedError if the file is not what
    the module is.
    """
    model = inspect_onnx(draft)
    shapes = {key[:2] for key in keys}
    known: dict[str, str] = {}
    for name, item in model.initializers.items():
        dtype = "float32" if item.stored.name == "bfloat16" else item.stored.name
        if item.is_float and (dtype, item.shape) in shapes:
            key = key_of(item.raw().astype(dtype, copy=False))
            if key in keys:
                known[name] = keys[key]
    _compare(model, module, known, found)
    metadata, names, repeated = _described(model, module, known, found, exporter)
    tensors = {held.names[0]: held.tensor for held in named_tensors(module)}
    titles = {names.get(name, name): title for name, title in known.items()}

    def contents(name: str) -> Iterator[Array] | None:
        return iter((array_of(tensors[titles[name]]),)) if name in titles else None

    def edit(proto: onnx.ModelProto) -> None:
        _rename(proto, names)
        write_metadata(proto, metadata)

    write_model(draft, target, contents, edit=edit, dropped=repeated)
    return metadata


def _described(
    model: OnnxModel, module: nn.Module, known: Mapping[str, str], found: Findings, exporter: str
) -> tuple[Metadata, dict[str, str], set[str]]:
    """Return the metadata, initializer -> its name in the new file, and the initializers that go."""
    taken = {name for node in model.nodes for name in (*node.inputs, *node.outputs)}
    taken |= {port.name for port in (*model.inputs, *model.outputs)} | {*model.initializers}
    facts: dict[str, Fact] = {}
    names: dict[str, str] = {}
    repeated: set[str] = set()
    first: dict[str, str] = {}
    held = {one.names[0]: one for one in named_tensors(module)}
    for name, title in known.items():
        if title in first:  # a tied tensor that was written twice
            names[name] = first[title]
            repeated.add(name)
            continue
        names[name] = first[title] = title if title == name or title not in taken else name
        one = held[title]
        kind = "parameter" if one.is_parameter else "statistic" if found.norms.get(title) else "buffer"
        trained = one.is_parameter and one.tensor.requires_grad and title in found.reached
        padding = found.padding.get(title)
        facts[first[title]] = Fact(
            kind=kind,
            names=one.names,
            requires_grad=trained,
            padding_idx=padding if one.is_parameter else None,
        )
    unread = [n for o in held.values() if o.is_parameter and o.names[0] not in first for n in o.names]
    counters = {
        name: Counter(start=int(held[name].tensor), per_pass=count) for name, count in found.counters.items()
    }
    metadata = Metadata(
        module=type(module).__name__, exporter=exporter, facts=facts, unread=tuple(unread), counters=counters
    )
    return metadata, names, repeated


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename initializers, wherever they are named."""
    for tensor in proto.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for info in [*proto.graph.value_info, *proto.graph.output]:
        info.name = names.get(info.name, info.name)


def _compare(model: OnnxModel, module: nn.Module, known: Mapping[str, str], found: Findings) -> None:
    """Raise UnsupportedError if a part of the module is missing in the file, or is there in another form."""
    there = set(known.values())
    trained = {name for name, p in module.named_parameters() if p.requires_grad} & found.reached
    updated = {name for name, training in found.norms.items() if training}
    lost = sorted((trained | updated) - there)
    if lost:
        raise UnsupportedError(f"the exporter has folded '{lost[0]}' away" + _more(lost))
    norms: CountOf[str] = CountOf()
    lookups: CountOf[str] = CountOf()
    for node in model.nodes:
        for index, name in enumerate(node.inputs):
            title = known.get(name, "")
            if node.op == "BatchNormalization" and index in (3, 4):
                norms[title] += 1
            elif title in updated:
                raise UnsupportedError(f"the exporter reads '{title}' by {node.op}, not by a norm")
            if node.op == "Gather" and index == 0:
                lookups[title] += 1
    padded = [name for name, row in found.padding.items() if row is not None]
    for name in (*updated.difference(norms), *(n for n in padded if lookups[n] != found.lookups[n])):
        raise UnsupportedError(f"the exporter has written '{name}' in a form that hides what it is")
    active = _draws(model)
    if active != len(found.random):
        drawn = "; ".join(dict.fromkeys(found.random)) or "nowhere"
        raise UnsupportedError(
            f"the module draws random numbers {len(found.random)} times ({drawn}), the file {active} times: "
            "what is random cannot be carried"
        )


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _draws(model: OnnxModel) -> int:
    """Count the nodes of a file that draw random numbers: of Dropouts those that drop anything."""
    numbers: dict[str, Array] = {
        node.outputs[0]: np.asarray(node.attrs["value"])
        for node in model.nodes
        if node.op == "Constant" and node.attrs.get("value") is not None
    }
    numbers |= {name: item.raw() for name, item in model.initializers.items() if not item.shape}
    ratios = [
        numbers.get(node.inputs[1], np.ones(()))
        if len(node.inputs) > 1 and node.inputs[1]
        else np.full((), 0.5)
        for node in model.nodes
        if node.op == "Dropout"
    ]
    active = sum(float(ratio.reshape(-1)[0]) > 0 for ratio in ratios)
    return active + sum(node.op in RANDOM for node in model.nodes)
