"""An ONNX file without its weights: parsed, checked, and none of its big tensors in memory.

Most of a file is the raw bytes of initializers. We walk the wire format of its message, note where those
bytes lie, and parse what is left; weights are read later, by region, straight from the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import numpy_helper

from oocdl.errors import ModelError, UnsupportedError

KEPT_BYTES = 1024
"""Raw tensors up to this size stay in the parsed message."""

GRAPH, INITIALIZER, RAW = 7, 5, 9  # field numbers in ModelProto, GraphProto, TensorProto
_HEADS = {
    b"PK\x03\x04": "a PyTorch or zip archive",
    b"\x80": "a pickle",
    b"\x89HDF": "an HDF5 file",
    b"\x1f\x8b": "a gzip file",
    b"\x93NUMPY": "a NumPy array",
    b"version https://git-lfs": "a git-lfs pointer",
}


@dataclass(frozen=True, eq=False)
class OnnxNode:
    """A node in plain Python."""

    name: str
    op: str
    """The operator, with its domain (``com.microsoft::Gelu``) where that is not the standard one."""
    inputs: tuple[str, ...]
    """Names; an empty one is an input left out."""
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scopes: tuple[str, ...] = ()
    """Names of the modules that it is of, outermost first, and its own; empty where the file has none."""
    origin: str = ""
    """Classes of modules and the operator that PyTorch's dynamo exporter made it of."""
    rule: str = ""
    """Rewrite rules of an exporter's optimizer that made it."""


@dataclass(frozen=True, eq=False)
class Body:
    """A graph that is an attribute of a node: a branch, or what a loop repeats."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]
    """Initializers of the body: numbers of the model, never trained."""


@dataclass(frozen=True)
class Port:
    """An input or an output of a model."""

    name: str
    dims: tuple[int | str, ...]
    """Extents; a name where the file leaves one open."""
    dtype: str


def shown(name: str) -> str:
    """Return a name from a file made harmless for a message: one line, no markup, at most 80 characters."""
    text = name.encode("unicode_escape").decode("ascii").replace("<", "\\x3c")
    return f"'{text if len(text) <= 80 else text[:77] + '...'}'"


def load(path: Path) -> tuple[onnx.ModelProto, dict[int, range]]:
    """Parse the model without the raw bytes of its big initializers; returns where those lie, too."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder; give the .onnx file")
    if not path.exists():
        others = " or ".join(sorted(other.name for other in path.parent.glob("*.onnx"))[:3])
        raise ModelError(f"there is no file {path}" + (f"; did you mean {others}?" if others else ""))
    if not path.is_file():
        raise ModelError(f"{path} is not a regular file")
    if path.stat().st_size == 0:
        raise ModelError(f"{path} is empty (0 bytes)")
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    with opened as file:
        head = _read(file.fileno(), 0, 32)
        for magic, kind in _HEADS.items():
            if head.startswith(magic):
                raise ModelError(
                    f"{path} is not an ONNX file (it looks like {kind}); in Python, with its module: "
                    "oocdl.from_torch(module, example, 'net.onnx') writes it, oocdl.fit(module, ..) trains"
                )
        try:
            text, spans = _strip(file.fileno(), path.stat().st_size)
            model = onnx.ModelProto.FromString(text)
        except (DecodeError, ValueError, RecursionError):
            why = "it cannot be parsed; was the download cut?"
            raise ModelError(f"{path} is not a complete ONNX file: {why}") from None
    for name in _texts(model):
        if isinstance(name, bytes):  # as protobuf gives what it cannot decode
            raise ModelError(f"{path} has a name that is no UTF-8 text: {name[:80]!r}")
    if not model.HasField("graph"):
        raise ModelError(f"{path} is not an ONNX file: there is no graph in it")
    return model, spans


def _texts(message: Message) -> Iterator[str | bytes]:
    for field_, held in message.ListFields():
        if field_.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            for item in held if field_.is_repeated else (held,):
                yield from _texts(item) if field_.type == FieldDescriptor.TYPE_MESSAGE else (item,)


def _read(handle: int, start: int, stop: int) -> bytes:
    """Read a file by position: the pages of a memory map would count as our memory."""
    return os.pread(handle, stop - start, start)


def _varint(handle: int, at: int, end: int) -> tuple[int, int]:
    number = 0
    for index, byte in enumerate(_read(handle, at, min(at + 10, end))):
        number |= (byte & 127) << 7 * index
        if byte < 128:
            return number, at + index + 1
    raise ValueError("cut in a number")


def _fields(handle: int, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the fields of the message between two places: number (0: no length), start, body, stop."""
    while at < end:
        start = at
        tag, at = _varint(handle, at, end)
        number, kind, body = tag >> 3, tag & 7, at
        if kind == 0:
            _, at = _varint(handle, at, end)
        elif kind == 2:
            length, body = _varint(handle, at, end)
            at = body + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("unknown wire type")
        if at > end or not number:
            raise ValueError("cut in a field")
        yield number if kind == 2 else 0, start, body, at


def field_header(number: int, length: int) -> bytes:
    """Return the bytes that precede a field of ``length`` bytes."""
    head = bytearray()
    for value in (number << 3 | 2, length):
        while value > 127:
            head.append(value & 127 | 128)
            value >>= 7
        head.append(value)
    return bytes(head)


def _strip(handle: int, size: int) -> tuple[bytes, dict[int, range]]:
    """Return the message without big raw tensors, and initializer number -> where its bytes are."""
    pieces: list[bytes] = []
    spans: dict[int, range] = {}
    count = 0
    for number, start, body, stop in _fields(handle, 0, size):
        if number != GRAPH:
            pieces.append(_read(handle, start, stop))
            continue
        inner: list[bytes] = []
        for part, first, content, last in _fields(handle, body, stop):
            if part != INITIALIZER:
                inner.append(_read(handle, first, last))
                continue
            tensor = b""
            for kind, a, b, c in _fields(handle, content, last):
                if kind == RAW and c - b > KEPT_BYTES:
                    spans[count] = range(b, c)
                else:
                    tensor += _read(handle, a, c)
            inner += [field_header(INITIALIZER, len(tensor)), tensor]
            count += 1
        graph = b"".join(inner)
        pieces += [field_header(GRAPH, len(graph)), graph]
    return b"".join(pieces), spans


def label(node: onnx.NodeProto, index: int) -> str:
    """Return the name of a node, or one made from its first output."""
    return node.name or next((name for name in node.output if name), f"{node.op_type}.{index}")


def nodes_of(graph: onnx.GraphProto) -> tuple[OnnxNode, ...]:
    """Return the nodes of a graph, in plain Python."""
    return tuple(_node(node, label(node, index)) for index, node in enumerate(graph.node))


def _node(node: onnx.NodeProto, name: str) -> OnnxNode:
    op = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"
    attrs = {item.name: _attribute(item, name) for item in node.attribute}
    said = {entry.key.rpartition(".")[2]: entry.value for entry in node.metadata_props}
    scopes, origin = words(said.get("name_scopes", "")), said.get("class_hierarchy", "")
    ends = tuple(node.input), tuple(node.output)
    return OnnxNode(name, op, *ends, attrs, scopes, origin, said.get("rule_name", ""))


def words(text: str) -> tuple[str, ...]:
    """Return the texts of a list that an exporter has written as Python does.

    >>> words("['', 'blocks.0']")
    ('', 'blocks.0')
    """
    return tuple(re.findall(r"'([^']*)'", text))


def _attribute(item: onnx.AttributeProto, node: str) -> Any:
    kinds = onnx.AttributeProto
    if item.type == kinds.FLOAT:
        return shortest(item.f)
    if item.type == kinds.INT:
        return int(item.i)
    if item.type == kinds.STRING:
        return item.s.decode("utf-8", "replace")
    if item.type == kinds.FLOATS:
        return tuple(shortest(number) for number in item.floats)
    if item.type == kinds.INTS:
        return tuple(item.ints)
    if item.type == kinds.STRINGS:
        return tuple(text.decode("utf-8", "replace") for text in item.strings)
    if item.type == kinds.TENSOR:
        return inside(item.t, f"the constant of node {shown(node)}")
    if item.type == kinds.GRAPH:
        graph, what = item.g, f"a constant in the body of node {shown(node)}"
        constants = {tensor.name: inside(tensor, what) for tensor in graph.initializer}
        inputs, outputs = (tuple(port.name for port in ports) for ports in (graph.input, graph.output))
        return Body(inputs, outputs, nodes_of(graph), constants)
    return None  # strings, types: no supported operator has one


def shortest(number: float) -> float:
    """Return the shortest number of equal float32: attributes are float32, and 1e-5 reads 9.999999747e-06.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(number)))


def element_type(code: int, what: str) -> np.dtype[Any]:
    """Return the NumPy dtype of an ONNX element type; refuses strings and unknown types."""
    if code == onnx.TensorProto.STRING:
        raise UnsupportedError(f"{what} holds strings; these are not supported")
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, ValueError, TypeError):
        raise ModelError(f"{what} has the unknown element type {code}") from None


def inside(tensor: onnx.TensorProto, what: str) -> np.ndarray[Any, Any]:
    """Return the array of a tensor whose data is in the message itself."""
    dtype = element_type(tensor.data_type, what)
    shape = dimensions(tensor, what)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise UnsupportedError(f"{what} lies in an external file; only initializers may")
    try:
        array = np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError):
        declared = f"{what} declares the shape {list(shape)} of {dtype}"
        raise ModelError(f"{declared}, but its data is not of that size") from None
    return array.copy() if not array.flags.writeable else array


def dimensions(tensor: onnx.TensorProto, what: str) -> tuple[int, ...]:
    """Return the shape of a tensor; refuses negative extents."""
    for extent in tensor.dims:
        if extent < 0:
            raise ModelError(f"{what} has dimension {extent}")
    return tuple(int(extent) for extent in tensor.dims)


def size_text(count: int) -> str:
    """Format a size for people.

    >>> size_text(4 * 2**40)
    '4 TiB'
    """
    units = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = next((power for power in range(5) if count < 1024 ** (power + 1)), 5)
    return f"{count / 1024**power:.4g} {units[power]}"


def port_of(info: onnx.ValueInfoProto, output: bool = False) -> Port:
    """Return an input or an output as the file declares it."""
    if info.type.WhichOneof("value") not in (None, "tensor_type"):
        cure = "onnx.utils.extract_model writes a file of the others"
        raise UnsupportedError(f"{shown(info.name)} is no tensor; inputs and outputs have to be: {cure}")
    tensor = info.type.tensor_type
    dims: tuple[int | str, ...] = tuple(
        dim.dim_value if dim.dim_value > 0 else dim.dim_param or f"{info.name}.{index}"
        for index, dim in enumerate(tensor.shape.dim)
    )
    if output and tensor.elem_type == onnx.TensorProto.UNDEFINED:
        return Port(info.name, dims, "float32")  # its graph decides
    dtype = element_type(tensor.elem_type, shown(info.name))
    if dtype.kind not in "fiub" and dtype.name != "bfloat16":
        raise UnsupportedError(f"{shown(info.name)} is {dtype}; this type is not supported")
    return Port(info.name, dims, dtype.name)
