"""Tiny networks and datasets that need no PyTorch, and training of the one of them in plain NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx import load as load_onnx
from onnx import save as save_onnx

from oocdl.graph.ir.index import whole

Array = NDArray[Any]


def save(
    path: Path,
    nodes: Sequence[NodeProto],
    weights: Mapping[str, Array],
    x: Sequence[Any],
    outputs: Mapping[str, Sequence[Any]],
    producer: str = "",
) -> Path:
    """Write a model with one input "x", as an exporter of that name does."""
    made = helper.make_graph(
        list(nodes),
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x))],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims))
            for name, dims in outputs.items()
        ],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(made, opset_imports=opsets, ir_version=8, producer_name=producer)
    save_onnx(model, str(path))
    return path


def write_lookup(path: Path, nodes: Sequence[NodeProto] = (), opset: int = 17) -> Path:
    """Ids "x" of which a table of 5 rows and one of 7 are read, after some nodes that make "i"."""
    ids = "i" if nodes else "x"
    tables = [helper.make_node("Gather", [f"w{rows}", ids], [f"e{rows}"]) for rows in (5, 7)]
    total = helper.make_node("Add", ["e5", "e7"], ["y"])
    weights = {f"w{rows}": np.ones((rows, 3), np.float32) for rows in (5, 7)}
    save(path, [*nodes, *tables, total], weights, ["b", 4], {"y": ["p", "q", 3]})
    model = load_onnx(str(path))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    model.opset_import[0].version = opset
    save_onnx(model, str(path))
    return path


def add_constants(path: Path, constants: Mapping[str, Array]) -> None:
    """Add whole numbers that are known before a run to a model on disk."""
    model = load_onnx(str(path))
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    save_onnx(model, str(path))


def mlp_weights(sizes: Sequence[int] = (6, 8, 3)) -> dict[str, Array]:
    """w1, b1, w2, b2 as in ``write_mlp``."""
    random = np.random.default_rng(0)
    inside, hidden, outside = sizes
    return {
        "w1": random.normal(0, 0.5, (hidden, inside)).astype("f4"),
        "b1": np.zeros(hidden, "f4"),
        "w2": random.normal(0, 0.5, (outside, hidden)).astype("f4"),
        "b2": np.zeros(outside, "f4"),
    }


def write_mlp(path: Path, sizes: Sequence[int] = (6, 8, 3), final: str = "") -> Path:
    """Two linear layers with a Relu between; ``final``: "Softmax" or "Sigmoid"."""
    last = "logits" if final else "y"
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["a"], "first", transB=1),
        helper.make_node("Relu", ["a"], ["h"], "relu"),
        helper.make_node("Gemm", ["h", "w2", "b2"], [last], "second", transB=1),
    ]
    if final:
        nodes.append(helper.make_node(final, ["logits"], ["y"], "final"))
    return save(path, nodes, mlp_weights(sizes), ["batch", sizes[0]], {"y": ["batch", sizes[-1]]})


def write_two_heads(path: Path) -> Path:
    """One hidden layer, two outputs: "kind" of 3 classes and "size" of one number."""
    random = np.random.default_rng(1)
    weights = {
        "w": random.normal(size=(8, 6)),
        "k": random.normal(size=(3, 8)),
        "s": random.normal(size=(1, 8)),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"], "trunk", transB=1),
        helper.make_node("Tanh", ["a"], ["h"], "tanh"),
        helper.make_node("Gemm", ["h", "k"], ["kind"], "kinds", transB=1),
        helper.make_node("Gemm", ["h", "s"], ["size"], "sizes", transB=1),
    ]
    return save(path, nodes, weights, ["batch", 6], {"kind": ["batch", 3], "size": ["batch", 1]})


def write_conv(path: Path, channels: int = 2, classes: int = 2, layers: int = 2) -> Path:
    """3D convolutions of width 3 with Relu between, and a head."""
    random = np.random.default_rng(2)
    nodes, weights, x, inside = [], {}, "x", 1
    for layer in range(layers):
        weights[f"w{layer}"] = random.normal(0, 0.3, (channels, inside, 3, 3, 3))
        nodes.append(helper.make_node("Conv", [x, f"w{layer}"], [f"c{layer}"], f"conv{layer}", pads=[1] * 6))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"], f"relu{layer}"))
        x, inside = f"r{layer}", channels
    weights["head"] = random.normal(0, 0.3, (classes, inside, 1, 1, 1))
    nodes.append(helper.make_node("Conv", [x, "head"], ["y"], "last"))
    space = ["d", "h", "w"]
    return save(path, nodes, weights, ["batch", 1, *space], {"y": ["batch", classes, *space]})


def write_conv_and_dense(folder: Path, samples: int, size: int, width: int) -> tuple[Path, Path]:
    """A network of two convolutions and two dense layers, the first of them large; and its data, random."""
    rng = np.random.default_rng(5)
    shapes = {"k0": (8, 3, 3, 3), "k1": (8, 8, 3, 3), "d0": (8 * (size // 4) ** 2, width), "d1": (width, 4)}
    weights = {name: (0.05 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "k0"], ["c0"], "conv0", **window),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "k1"], ["c1"], "conv1", strides=[4, 4], **window),
        helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
        helper.make_node("Flatten", ["r1"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "d0"], ["m0"], "dense0"),
        helper.make_node("Relu", ["m0"], ["r2"], "relu2"),
        helper.make_node("MatMul", ["r2", "d1"], ["y"], "dense1"),
    ]
    model = save(folder / "mixed.onnx", nodes, weights, ["batch", 3, size, size], {"y": ["batch", 4]})
    x = rng.standard_normal((samples, 3, size, size)).astype(np.float32)
    y = rng.integers(0, 4, samples).astype(np.int64)
    return model, write_data(folder / "mixed.zarr", {"x": x, "y": y})


def write_data(path: Path, arrays: Mapping[str, Array], chunks: int = 1) -> Path:
    """A Zarr group with ``chunks`` samples in each chunk."""
    group = zarr.open_group(str(path), mode="w")
    for name, array in arrays.items():
        group.create_array(
            name, data=array, chunks=(chunks, *array.shape[1:]), config={"write_empty_chunks": True}
        )
    return path


def write_samples(path: Path, shapes: Sequence[tuple[int, ...]], seed: int = 0, classes: int = 2) -> Path:
    """Write a dataset with a group for each sample: volumes "x" of one channel and classes "y"."""
    random, group = np.random.default_rng(seed), zarr.open_group(str(path), mode="w")
    names = [f"case_{number:03}" for number in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        x = random.normal(size=(1, *shape)).astype("float32")
        y = (x[0] > 0.3).astype("uint8") + (random.uniform(size=shape) > 0.8)
        y = np.minimum(y, classes - 1).astype("uint8")
        for key, data in (("x", x), ("y", y)):
            group.create_array(f"{name}/{key}", data=data, chunks=(4,) * data.ndim)
    group.attrs["oocdl"] = {"samples": names}
    return path


def vectors(samples: int = 10, seed: int = 3) -> dict[str, Array]:
    """Data for ``write_mlp``: "x" and labels "y" of 3 classes."""
    x = np.random.default_rng(seed).normal(size=(samples, 6)).astype("f4")
    return {"x": x, "y": np.argmax(x[:, :3], axis=1)}


def write_job(folder: Path, samples: int = 10) -> tuple[Path, Path]:
    """The perceptron of ``write_mlp`` and its data."""
    return write_mlp(folder / "net.onnx"), write_data(folder / "data.zarr", vectors(samples))


def volumes(samples: int = 3, extent: int = 8, seed: int = 4) -> dict[str, Array]:
    """Data for ``write_conv``: "x" without a channel axis, labels "y" of 2 classes."""
    x = np.random.default_rng(seed).normal(size=(samples, extent, extent, extent)).astype("f4")
    return {"x": x, "y": (x > 0.3).astype("u1")}


def softmax(logits: Array) -> Array:
    """Over axis 1."""
    power = np.exp(logits - logits.max(1, keepdims=True))
    return power / power.sum(1, keepdims=True)


def cross_entropy(logits: Array, labels: Array) -> float:
    """Mean over everything but axis 1."""
    chosen = np.take_along_axis(softmax(logits), labels.astype(int)[:, None], 1)
    return float(-np.log(chosen).mean())


def mlp_gradients(w: Mapping[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Of the mean cross entropy, by name; ``h`` and ``loss`` too."""
    h = np.maximum(x @ w["w1"].T + w["b1"], 0)
    logits = h @ w["w2"].T + w["b2"]
    delta = (softmax(logits) - np.eye(logits.shape[1])[y]) / len(x)
    back = (delta @ w["w2"]) * (h > 0)
    return {
        "w1": back.T @ x,
        "b1": back.sum(0),
        "w2": delta.T @ h,
        "b2": delta.sum(0),
        "h": h,
        "loss": np.asarray(cross_entropy(logits, y)),
    }


def files_of(run: Any) -> dict[str, bytes]:
    """The bytes of every committed weight and state, by name."""
    found = {}
    for tensor in run._store.current().tensors.values():
        region = whole(tensor.spec.shape)
        found[tensor.spec.name] = run._store.read(tensor.spec.name, region).tobytes()
    return found


ODD_NAMES = (
    "a = b > c",
    "x @ y | z",
    "stored/w",
    'it\'s "quoted", (twice)',
    "größe ü 名前",
    "two\nlines",
    "0123456789abcdef0123456789abcdef",
    "abcdefabcdefabcdefabcdefabcdefab",
    "<lambda>",
    "w as stored",
    "conv-1-2",
    "007 b = sum",
)
"""Names of nodes and values that a parser of keys would stumble over."""


def write_with_odd_names(model: Path, path: Path) -> dict[str, str]:
    """The same model with other names of nodes, weights and inner values: some odd, and one node without.

    Returns plain name -> odd name, of the weights.
    """
    loaded = load_onnx(str(model))
    graph = loaded.graph
    kept = {port.name for port in (*graph.input, *graph.output)}
    inner = [item.name for item in graph.initializer]
    inner += [name for node in graph.node for name in node.output if name not in kept]
    known = {name: f"{ODD_NAMES[n % len(ODD_NAMES)]}{n or ''}" for n, name in enumerate(dict.fromkeys(inner))}
    for number, node in enumerate(graph.node):
        odd = ODD_NAMES[number % len(ODD_NAMES)]
        node.name = "" if number == 1 else odd if number < len(ODD_NAMES) else f"{odd} {number}"
        node.input[:] = [known.get(name, name) for name in node.input]
        node.output[:] = [known.get(name, name) for name in node.output]
    for item in graph.initializer:
        item.name = known[item.name]
    del graph.value_info[:]
    save_onnx(loaded, str(path))
    return {name: odd for name, odd in known.items() if odd in {item.name for item in graph.initializer}}
