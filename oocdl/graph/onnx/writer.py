"""Writes a trained model: the file it came from, with other weights, which stream from where they are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import onnx

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Array
from oocdl.graph.onnx.checks import check
from oocdl.graph.onnx.model_file import GRAPH, INITIALIZER, RAW, field_header, load, shown
from oocdl.graph.onnx.tensors import WeightSource, source

Weights = Callable[[str], "Iterable[Array] | None"]
"""Initializer name -> its new contents as blocks in C order; ``None``: it stays as it is."""

EXTERNAL_FROM_BYTES = 2**30
"""Tensors of so many bytes together are put into a file beside the model, ``<target>.data``."""
BLOCK_BYTES = 2**22
_ALIGN_BYTES = 4096
_NO_NUMBERS = (onnx.TensorProto.STRING, onnx.TensorProto.UINT4, onnx.TensorProto.INT4)
"""Element types of tensors that stay as they are."""


def export_onnx(source_path: str | Path, target_path: str | Path, weights: Weights) -> Path:
    """Write the model at ``source_path`` to ``target_path``, with new weights and statistics.

    BatchNorm and Dropout act as in inference in the new file, even where the old one was exported in
    training mode.
    """
    return write_model(source_path, target_path, weights, edit=_infer_only)


def write_model(
    source_path: str | Path,
    target_path: str | Path,
    weights: Weights,
    *,
    edit: Callable[[onnx.ModelProto], None],
    dropped: Collection[str] = (),
) -> Path:
    """Write the model at ``source_path`` to ``target_path``, changed by ``edit``, with new contents.

    ``edit`` may rename initializers; ``weights`` goes by their new names. Those whose old names are in
    ``dropped`` are left out.
    """
    origin, target = Path(source_path).absolute(), Path(target_path).absolute()
    _spare_source(origin, target)
    model, spans = load(origin)
    check(model)
    tensors = list(model.graph.initializer)
    kept = [index for index, tensor in enumerate(tensors) if tensor.name not in dropped]
    edit(model)
    del model.graph.initializer[:]
    items = []
    for index in kept:
        as_it_is = tensors[index].data_type in _NO_NUMBERS
        stored = None if as_it_is else source(tensors[index], origin, spans.get(index))
        items.append(_Item(tensors[index], stored, weights))
    data = target.with_name(target.name + ".data")
    external = sum(item.nbytes for item in items) > EXTERNAL_FROM_BYTES
    placed = dict(_placed(items, data.name)) if external else {}
    if external:
        _spare_source(origin, data)
        if any(item.stored is not None and item.stored.path == data for item in items):
            raise ModelError(f"{data} belongs to the original model; choose another name for the new one")
        with _replacing(data) as file:
            for item, place in placed.items():
                file.seek(int(place["offset"]))
                file.writelines(item.blocks())
    with _replacing(target) as file:
        _write_model(file, model, items, placed)
    return target


def _spare_source(origin: Path, target: Path) -> None:
    if target.exists() and origin.exists() and target.samefile(origin):
        raise ModelError(f"{target} is the original model; choose another name for the new one")
    if not target.parent.is_dir():
        raise ModelError(f"there is no folder {target.parent}")


@dataclass(frozen=True, eq=False)
class _Item:
    tensor: onnx.TensorProto
    stored: WeightSource | None
    weights: Weights

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes if self.stored is not None else 0

    def head(self, placed: Mapping[str, str] | None = None) -> bytes:
        old = self.tensor
        tensor = onnx.TensorProto(name=old.name, data_type=old.data_type, dims=old.dims)
        for key, value in (placed or {}).items():
            tensor.external_data.add(key=key, value=value)
            tensor.data_location = onnx.TensorProto.EXTERNAL
        return bytes(tensor.SerializeToString())

    def blocks(self) -> Iterator[bytes]:
        assert self.stored is not None
        count, size, new = 0, prod(self.stored.shape), f"the new contents of {shown(self.stored.name)}"
        found = self.weights(self.stored.name)
        for block in _unchanged(self.stored) if found is None else found:
            array = np.ascontiguousarray(block, self.stored.stored)
            count += array.size
            if count > size:
                raise ModelError(f"{new} are larger than {list(self.stored.shape)}")
            yield array.tobytes()
        if count != size:
            raise ModelError(f"{new} are {count} numbers, not {size}")


def _unchanged(stored: WeightSource) -> Iterator[Array]:
    """Yield a tensor in C order as it is stored, in blocks of at most ``BLOCK_BYTES``."""
    count = prod(stored.shape)
    data = None if stored.data is None else stored.data.reshape(-1)
    flat, step = replace(stored, shape=(count,), data=data), BLOCK_BYTES // stored.stored.itemsize
    for start in range(0, count, step):
        yield flat.raw(((start, min(start + step, count)),))


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when it is complete."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(file.fileno(), 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _placed(items: Sequence[_Item], location: str) -> Iterator[tuple[_Item, dict[str, str]]]:
    at = 0
    for item in items:
        if item.stored is None or not item.nbytes:
            continue
        at = -(-at // _ALIGN_BYTES) * _ALIGN_BYTES if item.nbytes >= _ALIGN_BYTES else at
        yield item, {"location": location, "offset": str(at), "length": str(item.nbytes)}
        at += item.nbytes


def _write_model(
    file: IO[bytes],
    model: onnx.ModelProto,
    items: Sequence[_Item],
    placed: Mapping[_Item, Mapping[str, str]],
) -> None:
    """Write the message, its initializers last; ``location``: the file of their data, if external."""
    graph = model.graph.SerializeToString()
    heads: list[tuple[_Item, bytes, int]] = []
    for item in items:
        head = item.head(placed.get(item)) if item.nbytes else item.tensor.SerializeToString()
        inside = 0 if item in placed else item.nbytes
        head += field_header(RAW, inside) if inside else b""
        heads.append((item, head, len(head) + inside))
    total = len(graph) + sum(len(field_header(INITIALIZER, size)) + size for _, _, size in heads)
    model.ClearField("graph")
    file.write(model.SerializeToString())
    file.write(field_header(GRAPH, total))
    file.write(graph)
    for item, head, size in heads:
        file.write(field_header(INITIALIZER, size))
        file.write(head)
        if size > len(head):
            file.writelines(item.blocks())


def _infer_only(model: onnx.ModelProto) -> None:
    """Switch BatchNorm to its running statistics, where it has any, and Dropout off."""
    stored = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Identity" and node.input[0] in stored:
            stored.update(node.output)
        elif node.op_type == "BatchNormalization" and stored.issuperset(node.input[3:5]):
            kept = [item for item in node.attribute if item.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)
            del node.output[1:]
        elif node.op_type == "Dropout" and len(node.input) > 2:
            del node.input[2:]
