"""ONNX models to change, and random changes of them: of their structure, then of their bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, defs, numpy_helper, parser

INTS = (0, 1, -1, 2, 3, 7, -7, 64, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
FLOATS = (0.0, -1.0, 0.5, 1e30, float("nan"), float("inf"))
TEXTS = ("", "x", "NOTSET", "SAME_UPPER", "linear", "a\nb\x1b[2J", "ä" * 300, "../../etc/passwd")
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
    found = {name: _filled(parser.parse_model(code)) for name, code in CODE.items()}
    return found | {path.stem: onnx.load(path) for path in sorted(KERAS.glob("*.onnx"))}


Random = np.random.Generator
WEIGHTS = {onnx.NodeProto: 8, AttributeProto: 5, TensorProto: 3, onnx.ValueInfoProto: 2}
"""How often a part is changed; others once."""


def one(random: Random, items: Any) -> Any:
    """One of some."""
    return items[int(random.integers(len(items)))]


def _messages(message: Any) -> Iterator[Any]:
    """Yield all that a model consists of, itself first."""
    yield message
    for field, found in message.ListFields():
        if field.message_type is not None:
            for inner in found if hasattr(found, "insert") else [found]:
                yield from _messages(inner)


@cache
def _operators() -> list[str]:
    from oocdl.graph.onnx.reader import supported
    from oocdl.ops import RULES

    return sorted(supported(RULES))


@cache
def _attributes() -> list[str]:
    known = filter(defs.has, _operators())
    return sorted({name for op in known for name in defs.get_schema(op).attributes})


def _odd(random: Random, message: Any, field: Any, names: list[str]) -> Any:
    """Return what a field may hold instead; ``names`` are those of values."""
    kind, name = field.cpp_type, field.name
    if kind == field.CPPTYPE_ENUM:
        return one(random, field.enum_type.values).number
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return one(random, FLOATS)
    if kind != field.CPPTYPE_STRING:
        small = name in ("data_type", "elem_type", "version") and random.random() < 0.8
        return int(random.integers(0, 27)) if small else one(random, INTS)
    if name == "raw_data":
        held, number = bytearray(message.raw_data), one(random, (*INTS, *FLOATS))
        new = np.array([number], np.float32 if isinstance(number, float) else np.int64).tobytes()
        at = int(random.integers(len(held) // len(new) + 1)) * len(new)
        return bytes(held[:at] + new + held[at + len(new) :]) if random.random() < 0.8 else bytes(held[:at])
    if name == "op_type" and random.random() < 0.9:
        return one(random, _operators())
    text = one(random, names if name in ("input", "output") and random.random() < 0.9 else TEXTS)
    if isinstance(message, AttributeProto) and name == "name":
        text = one(random, _attributes())
    return text.encode() if field.type == field.TYPE_BYTES else text


def _change(random: Random, model: onnx.ModelProto) -> None:
    """Drop, double, move, add or replace what a field holds, of nodes and their attributes most often."""
    found: dict[type, list[Any]] = {}
    for message in _messages(model):
        found.setdefault(type(message), []).append(message)
    names = [name for node in found.get(onnx.NodeProto, ()) for name in (*node.input, *node.output)] or ["x"]
    kinds = [kind for kind in found for _ in range(WEIGHTS.get(kind, 1))]
    message = one(random, found[one(random, kinds)])
    held = [field for field, _ in message.ListFields()]
    field = one(random, held if held and random.random() < 0.8 else message.DESCRIPTOR.fields)
    value, how = getattr(message, field.name), random.random()
    if not hasattr(value, "insert"):
        if how < 0.2 or field.message_type is not None:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, _odd(random, message, field, names))
        return
    is_part = field.message_type is not None
    at = int(random.integers(len(value) + (how < 0.2)))  # value may be empty: a ValueError
    if how < 0.2 and is_part:
        new = value.add()
        new.CopyFrom(one(random, found.get(type(new), [new])))
    elif how < 0.2:
        value.insert(at, _odd(random, message, field, names))
    elif how < 0.45:
        del value[at]
    elif how < 0.6 or is_part:  # moved, or doubled
        item = copy.deepcopy(value[at])
        if how < 0.55:
            del value[at]
        value.insert(int(random.integers(len(value) + 1)), item)
    else:
        value[at] = _odd(random, message, field, names)


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
    name = one(random, list(CODE) if random.random() < 0.85 else list(models()))
    model = onnx.ModelProto()
    model.CopyFrom(models()[name])
    if random.random() < 0.15:
        return name, _bytes(random, model.SerializeToString())
    for _ in range(random.integers(1, 4)):
        with suppress(ValueError):  # the format has no place for it
            _change(random, model)
    data = model.SerializeToString()
    return name, _bytes(random, data) if random.random() < 0.05 else data
