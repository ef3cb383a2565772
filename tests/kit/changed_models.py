"""ONNX models to change, and random changes of them: of their structure, then of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper, parser

INTS = (0, 1, -1, 2, 3, 7, -7, 64, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 0.5, 1e30, float("nan"), float("inf"))
TEXTS = ("", "x", "NOTSET", "SAME_UPPER", "linear", "a\nb\x1b[2J", "ä" * 300, "../../etc/passwd")
KEYS = ("location", "offset", "length", "oocdl", "pkg.torch.onnx.name_scopes")
KERAS = Path(__file__).parents[1] / "graph" / "onnx" / "keras"
CODE = {
    "conv": """
        <ir_version: 8, opset_import: ["": 17]>
        net (float[n,2,8,8] x) => (float[n,3] y) <float[4,2,3,3] w, float[4] b, float[4] m, float[4] v,
            float[256,3] u> {
            a = Conv <kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1]> (x, w, b)
            l = LRN <size=3> (a)
            c = BatchNormalization <epsilon=0.001> (l, b, b, m, v)
            d = Relu (c)
            e = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1]> (d)
            f = AveragePool <kernel_shape=[2,2], strides=[1,1], auto_pad="SAME_UPPER"> (e)
            g = Flatten <axis=1> (f)
            h = Gemm <alpha=1.0, transB=0> (g, u)
            y = Identity (h)
        }""",
    "shapes": """
        <ir_version: 8, opset_import: ["": 17]>
        net (float[n,4,6] x) => (float[n,4,6] y) <float[6,6] w, float[6] s> {
            a = Shape (x)
            i = Constant <value = int64[1] {0}> ()
            b = Gather <axis=0> (a, i)
            r = Constant <value_ints=[24]> ()
            c = Concat <axis=0> (b, r)
            d = Reshape (x, c)
            e = Reshape (d, a)
            f = MatMul (e, w)
            p = Constant <value_ints=[0,0,1,0,0,1]> ()
            g = Pad <mode="constant"> (f, p)
            st = Constant <value_ints=[1]> ()
            en = Constant <value_ints=[7]> ()
            ax = Constant <value_ints=[2]> ()
            h = Slice (g, st, en, ax)
            j = Transpose <perm=[0,2,1]> (h)
            k = Transpose <perm=[0,2,1]> (j)
            o, q = Split <axis=1> (k)
            t = Concat <axis=1> (o, q)
            z = LayerNormalization <axis=-1> (t, s)
            m = ReduceMean <axes=[2], keepdims=1> (z)
            u = Sub (z, m)
            ex = Expand (u, a)
            y = Softmax <axis=-1> (ex)
        }""",
    "control": """
        <ir_version: 8, opset_import: ["": 17]>
        net (float[n,3,4] x) => (float[n,3,4] y) <float[4] w, float[1,12,4] wl, float[1,12,3] rl> {
            go = Constant <value = bool {1}> ()
            trips = Constant <value_int=3> ()
            a = Loop (trips, go, x) <body = one (int64 i, bool c, float[n,3,4] s) => (bool c2, float[n,3,4] t)
                { c2 = Identity (c) t = Mul (s, w) }>
            b = If (go) <then_branch = yes () => (float[n,3,4] p) { p = Tanh (a) },
                else_branch = no () => (float[n,3,4] q) { q = Sin (a) }>
            d = Transpose <perm=[1,0,2]> (b)
            l, lh = LSTM <hidden_size=3> (d, wl, rl)
            e = ReduceSum <keepdims=1> (l)
            y = Add (b, e)
        }""",
    "functions": """
        <ir_version: 8, opset_import: ["": 17, "own": 1]>
        net (float[n,4] x) => (float[n,4] y) <float[4,4] w> {
            a = MatMul (x, w)
            y = own.twice <k = 2.0> (a)
        }
        <domain: "own", opset_import: ["": 17, "own": 1]> twice <k> (x) => (y)
            { a = own.once <k: float = @k> (x) y = own.once <k: float = @k> (a) }
        <domain: "own", opset_import: ["": 17]> once <k> (x) => (y)
            { c = Constant <value_float: float = @k> () a = Mul (x, c) y = Tanh (a) }
        """,
    "spread": """
        <ir_version: 8, opset_import: ["": 17]>
        net (float[n,4,4,4] x) => (float[n,2,8,8] y) <float[4,2,2,2] w, float[4] s> {
            a = InstanceNormalization (x, s, s)
            b = ConvTranspose <strides=[2,2], kernel_shape=[2,2]> (a, w)
            f = Constant <value_floats=[1.0,1.0,2.0,2.0]> ()
            c = Resize <mode="linear"> (b, , f)
            d = GlobalAveragePool (c)
            g = Clip (b)
            h = DepthToSpace <blocksize=1> (g)
            q = Einsum <equation="abcd,abde->abce"> (h, h)
            y = Add (q, d)
        }""",
}


def _filled(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make an initializer with numbers of every value that the text declares."""
    for info in model.graph.value_info:
        shape = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
        numbers = np.linspace(0.1, 1, max(int(np.prod(shape)), 1)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(numbers.reshape(shape), info.name))
    del model.graph.value_info[:]
    return model


@cache
def models() -> dict[str, onnx.ModelProto]:
    """All models by name, without their node tests."""
    found = {}
    for name, code in CODE.items():
        found[name] = _filled(parser.parse_model(code))
    return found | {path.stem: onnx.load(path) for path in sorted(KERAS.glob("*.onnx"))}


Random = np.random.Generator


def _one(random: Random, items: Any) -> Any:
    return items[int(random.integers(len(items)))]


def _graphs(graph: onnx.GraphProto) -> Iterator[Any]:
    """Yield a graph and those of its branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _lists_of_nodes(model: onnx.ModelProto) -> list[Any]:
    return [item.node for item in (*_graphs(model.graph), *model.functions) if item.node]


def _value(random: Random, kind: int, before: AttributeProto | None = None) -> Any:
    """Return what an attribute of a type may be."""
    kinds = AttributeProto
    if kind in (kinds.INTS, kinds.FLOATS):
        choices = INTS if kind == kinds.INTS else FLOATS
        old = list(getattr(before, "ints" if kind == kinds.INTS else "floats", ()))
        if old and random.random() < 0.7:
            old[int(random.integers(len(old)))] = _one(random, choices)
            return old
        return [_one(random, choices) for _ in range(random.integers(0, 6))]
    if kind == kinds.STRINGS:
        return [_one(random, TEXTS).encode() for _ in range(random.integers(0, 4))]
    if kind == kinds.TENSOR:
        return numpy_helper.from_array(np.asarray(_one(random, INTS), np.int64))
    return _one(random, {kinds.INT: INTS, kinds.FLOAT: FLOATS}.get(kind, TEXTS))


def _attribute(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Drop, double, retype, change or add an attribute."""
    how, names = random.random(), defs.get_schema("Conv").attributes
    if defs.has(node.op_type):
        names = defs.get_schema(node.op_type).attributes or names
    kinds = [AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING, AttributeProto.INTS]
    if not node.attribute or how < 0.2:
        name = _one(random, sorted(names))
        kind = names[name].type.value
        if kind in (AttributeProto.GRAPH, AttributeProto.SPARSE_TENSOR, AttributeProto.TYPE_PROTO):
            return
        node.attribute.append(helper.make_attribute(name, _value(random, kind), attr_type=kind))
        return
    item = _one(random, node.attribute)
    if how < 0.4:
        node.attribute.remove(item)
    elif how < 0.45:
        node.attribute.append(item)
    elif how < 0.55:
        item.type = int(random.integers(0, 15))
    elif item.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        kind = item.type if how < 0.85 else _one(random, kinds)
        if kind == AttributeProto.TENSOR:
            _tensor(random, item.t)
        elif kind in (*kinds, AttributeProto.FLOATS, AttributeProto.STRINGS):
            item.CopyFrom(helper.make_attribute(item.name, _value(random, kind, item), attr_type=kind))


def _ends(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Drop, double, empty, exchange or add an input or an output."""
    names = [name for other in _one(random, _lists_of_nodes(model)) for name in (*other.input, *other.output)]
    ends = node.input if random.random() < 0.7 else node.output
    how = random.random()
    if not ends or how < 0.2:
        ends.append(_one(random, names) if names else "x")
        return
    index = int(random.integers(len(ends)))
    if how < 0.5:
        del ends[index]
    elif how < 0.6:
        ends[index] = ""
    elif how < 0.7:
        ends.append(ends[index])
    else:
        ends[index] = _one(random, names)


@cache
def _operators() -> list[str]:
    from oocdl.graph.onnx.reader import supported
    from oocdl.ops import RULES

    return sorted(supported(RULES))


def _operator(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Make it another operator, or one of another domain."""
    if random.random() < 0.8:
        node.op_type = _one(random, _operators())
    else:
        node.domain = _one(random, ("own", "com.microsoft", "ai.onnx", "ai.onnx.ml", ""))


def _of_nodes(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Drop, double or move a node."""
    nodes = _one(random, _lists_of_nodes(model))
    index, how = int(random.integers(len(nodes))), random.random()
    held = onnx.NodeProto()
    held.CopyFrom(nodes[index])
    if how < 0.6:
        del nodes[index]
    if how > 0.4:
        nodes.insert(int(random.integers(len(nodes) + 1)), held)


def _tensor(random: Random, tensor: TensorProto) -> None:
    """Change extents, type or numbers of a tensor."""
    how = random.random()
    if how < 0.35:
        if tensor.dims and random.random() < 0.7:
            tensor.dims[int(random.integers(len(tensor.dims)))] = _one(random, INTS)
        else:
            tensor.dims.append(_one(random, INTS))
    elif how < 0.45:
        tensor.dims[:] = tensor.dims[::-1]
    elif how < 0.6:
        tensor.data_type = int(random.integers(0, 27))
    elif how < 0.7:
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    elif how < 0.9 and tensor.data_type in (TensorProto.INT64, TensorProto.FLOAT):
        with suppress(ValueError):  # it may have been changed before
            array = np.array(numpy_helper.to_array(tensor))
            choices = INTS if array.dtype.kind == "i" else FLOATS
            array.reshape(-1)[int(random.integers(array.size))] = _one(random, choices)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    else:
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key=_one(random, KEYS), value=_one(random, (*TEXTS, "1099511627776")))


def _initializer(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Change, drop or double an initializer."""
    tensors, how = model.graph.initializer, random.random()
    if not tensors:
        return
    index = int(random.integers(len(tensors)))
    if how < 0.1:
        del tensors[index]
    elif how < 0.15:
        tensors.append(tensors[index])
    elif how < 0.2:
        model.graph.sparse_initializer.add().values.CopyFrom(tensors[index])
    else:
        _tensor(random, tensors[index])


def _port(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Drop, double, rename, retype or reshape an input or an output of a graph."""
    graph = _one(random, list(_graphs(model.graph)))
    ports, how = (graph.input if random.random() < 0.6 else graph.output), random.random()
    if not ports:
        return
    port = _one(random, ports)
    tensor = port.type.tensor_type
    if how < 0.15:
        ports.remove(port)
    elif how < 0.2:
        ports.append(port)
    elif how < 0.25:
        port.name = _one(random, TEXTS)
    elif how < 0.35:
        tensor.elem_type = int(random.integers(0, 27))
    elif how < 0.4:
        port.ClearField("type")
    elif how < 0.45:
        tensor.ClearField("shape")
    elif how < 0.55:
        tensor.shape.dim.add().dim_value = _one(random, INTS)
    elif how < 0.65 and tensor.shape.dim:
        tensor.shape.dim[int(random.integers(len(tensor.shape.dim)))].dim_param = _one(random, TEXTS)
    elif tensor.shape.dim:
        tensor.shape.dim[int(random.integers(len(tensor.shape.dim)))].dim_value = _one(random, INTS)


def _whole(random: Random, model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Change opsets, metadata, functions, or what the graph is called."""
    how = random.random()
    if how < 0.4 and model.opset_import:
        entry = _one(random, model.opset_import)
        entry.version = _one(random, (*range(1, 27), 1 << 40))
    elif how < 0.5 and model.opset_import:
        del model.opset_import[0]
    elif how < 0.6:
        model.metadata_props.add(key=_one(random, KEYS), value=_one(random, TEXTS))
    elif how < 0.7:
        model.ir_version = _one(random, INTS)
    elif how < 0.8:
        del model.graph.output[:]
    elif how < 0.9:
        node.name = _one(random, TEXTS)
    elif model.functions:
        caller = _one(random, model.functions)
        caller.node.add().CopyFrom(helper.make_node("twice", ["x"], ["z"], domain="own"))


Change = Callable[[Random, onnx.ModelProto, onnx.NodeProto], None]
CHANGES: tuple[tuple[Change, int], ...] = (
    (_attribute, 5),
    (_ends, 4),
    (_operator, 3),
    (_of_nodes, 2),
    (_initializer, 3),
    (_port, 3),
    (_whole, 1),
)


def _bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, double or insert bytes."""
    held, how = bytearray(data), random.random()
    at = int(random.integers(len(held)))
    if how < 0.7:
        for _ in range(random.integers(1, 4)):
            held[int(random.integers(len(held)))] ^= 1 << int(random.integers(8))
    elif how < 0.8:
        del held[at:]
    elif how < 0.9:
        del held[at : at + int(random.integers(1, 20))]
    else:
        held[at:at] = held[at : at + 50]
    return bytes(held)


def changed(seed: int) -> tuple[str, bytes]:
    """Return which model was changed, and the file."""
    random = np.random.default_rng(seed)
    name = _one(random, list(CODE) if random.random() < 0.85 else list(models()))
    model = onnx.ModelProto()
    model.CopyFrom(models()[name])
    if random.random() < 0.15:
        return name, _bytes(random, model.SerializeToString())
    choices = [change for change, weight in CHANGES for _ in range(weight)]
    for _ in range(random.integers(1, 4)):
        lists = _lists_of_nodes(model)
        if not lists:
            break
        try:
            _one(random, choices)(random, model, _one(random, _one(random, lists)))
        except (TypeError, ValueError, onnx.checker.ValidationError):
            break  # an earlier change left what onnx itself cannot read
    data = model.SerializeToString()
    return name, _bytes(random, data) if random.random() < 0.05 else data
