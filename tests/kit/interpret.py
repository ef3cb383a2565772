"""A graph evaluated node by node with PyTorch on whole tensors, independent of the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from oocdl.graph.ir.graph import Graph, Node
from tests.kit import attention_cases, recurrent_cases

Tensors = Sequence[torch.Tensor]
Oracle = Callable[[Any, Any], Any]
"""(operands, attributes) -> result, or results."""
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}


def evaluate(graph: Graph, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every value of the graph, given the declared ones."""
    found = {name: torch.as_tensor(np.array(array)) for name, array in graph.constants.items()}
    found.update({name: torch.as_tensor(array) for name, array in values.items()})
    for node in graph.nodes:
        results = run(node, [found[name] for name in node.inputs])
        for name, result in zip(node.outputs, results, strict=True):
            value = graph.values[name]
            assert tuple(result.shape) == value.shape, (node, result.shape, value.shape)
            assert result.dtype == DTYPES[value.dtype], (node, result.dtype, value.dtype)
            found[name] = result
    return found


def run(node: Node, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The outputs of one node."""
    result = OPS[node.op](inputs, node.attrs)
    return result if isinstance(result, tuple) else (result,)


def _vjp(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(function(x), x, dy.expand(x.shape) if dy.dim() == 0 else dy)[0]


def _padded(x: torch.Tensor, attrs: Mapping[str, Any], fill: float = 0.0) -> torch.Tensor:
    rank = len(attrs["pads"]) // 2
    pads = [p for axis in reversed(range(rank)) for p in (attrs["pads"][axis], attrs["pads"][rank + axis])]
    return F.pad(x, pads, value=fill)


def _conv(x: torch.Tensor, w: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    if attrs.get("grouped"):
        each = (_conv(one, part, _alone(attrs)) for one, part in zip(x.unbind(1), w, strict=True))
        return torch.stack(tuple(each), 1)
    function = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    return function(_padded(x, attrs), w, stride=attrs["strides"], dilation=attrs["dilations"])


def _alone(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a convolution of one group."""
    return {name: value for name, value in attrs.items() if name != "grouped"}


def _conv_transpose(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The whole transposed convolution, then its pads taken off; zeros where it ends too early."""
    x, w = inputs
    if attrs.get("grouped"):
        each = (_conv_transpose(pair, _alone(attrs)) for pair in zip(x.unbind(1), w, strict=True))
        return torch.stack(tuple(each), 1)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.dim() - 3]
    y = function(x, w, stride=attrs["strides"], dilation=attrs["dilations"])
    for axis, (pad, extent) in enumerate(zip(attrs["pads"], attrs["spatial"], strict=False), start=2):
        y = y.narrow(axis, pad, min(extent, y.shape[axis] - pad))
        y = _pad([y], {"axis": axis, "before": 0, "after": extent - y.shape[axis]})
    return y


def _conv_weight_grad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, dy = inputs
    if attrs.get("grouped"):
        pairs = zip(x.unbind(1), dy.unbind(1), strict=True)
        return torch.stack([_conv_weight_grad(pair, _alone(attrs)) for pair in pairs])
    w = torch.zeros(dy.shape[1], x.shape[1], *attrs["kernel_shape"], dtype=x.dtype, requires_grad=True)
    with torch.enable_grad():
        return torch.autograd.grad(_conv(x, w, attrs), w, dy)[0]


def _max_pool(x: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.dim() - 3]
    x = _padded(x, attrs, -torch.inf)
    return function(x, attrs["kernel_shape"], attrs["strides"], dilation=attrs["dilations"])


def _moments(inputs: Tensors, attrs: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    axes = tuple(attrs["axes"])
    return inputs[0].mean(axes, keepdim=True), inputs[0].var(axes, unbiased=False, keepdim=True)


def _filtered(x: torch.Tensor, at: float, scale: float, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The mean of elements by the weights of a filter around ``at``, with more than can have one."""
    stretch = max(1.0, 1 / scale) if attrs.get("antialias") else 1.0
    a, last = attrs.get("cubic_coeff_a", -0.75), x.shape[-1] - 1
    whole, total = torch.zeros_like(x[..., 0]), 0.0
    for place in range(int(at - 2 * stretch) - 2, int(at + 2 * stretch) + 3):
        d = abs(place - at) / stretch
        if attrs["mode"] == "linear":
            weight = 1 - d if d < 1 else 0.0
        elif d <= 1:
            weight = (a + 2) * d**3 - (a + 3) * d**2 + 1
        else:
            weight = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0
        if 0 <= place <= last or not attrs.get("exclude_outside"):
            whole, total = whole + weight * x[..., min(max(place, 0), last)], total + weight
    return whole / total


def _windows(x: torch.Tensor, attrs: Mapping[str, Any]) -> torch.Tensor:
    """The sum or average of each window of the last axis, element by element."""
    kernel, stride, dilation, before, after = attrs["window"]
    columns, extent = [], x.shape[-1]
    for first in range(-before, attrs["size"] * stride - before, stride):
        seen = [at for at in range(first, first + kernel * dilation, dilation) if at < extent + after]
        inside = [at for at in seen if 0 <= at < extent]
        count = len(seen if attrs.get("count_include_pad") else inside)
        columns.append(x[..., inside].sum(-1) / (count if attrs["mode"] == "average" else 1))
    return torch.stack(columns, -1)


def _resample(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """From ONNX's text, element by element, not from the rule's matrix."""
    x = inputs[0].movedim(attrs["axis"], -1)
    if attrs["transposed"]:
        forward = {**attrs, "transposed": False, "size": x.shape[-1], "axis": 0}
        eye = torch.eye(attrs["size"], dtype=x.dtype)
        matrix = _resample([eye], forward)
        return (x @ matrix).movedim(-1, attrs["axis"])
    if "window" in attrs:
        return _windows(x, attrs).movedim(-1, attrs["axis"])
    extent, size, mode = x.shape[-1], attrs["size"], attrs["coordinates"]
    scale = attrs.get("scale") or size / extent
    columns = []
    for o in range(size):
        if mode == "align_corners":
            at = o * (extent - 1) / (size - 1) if size > 1 else 0.0
        elif mode == "asymmetric":
            at = o / scale
        else:
            at = 0.0 if mode == "pytorch_half_pixel" and size == 1 else (o + 0.5) / scale - 0.5
            if mode == "half_pixel_symmetric":
                at += extent / 2 * (1 - size / (scale * extent))
        if attrs["mode"] == "cubic" or attrs.get("antialias"):
            columns.append(_filtered(x, at, scale, attrs))
            continue
        if attrs["mode"] == "nearest":
            at = round(at, 9)  # o / scale may fall just below the integer it is
            rounding = attrs.get("nearest_mode") or "round_prefer_floor"
            at = {
                "round_prefer_floor": np.ceil(at - 0.5),
                "round_prefer_ceil": np.floor(at + 0.5),
                "floor": np.floor(at),
                "ceil": np.ceil(at),
            }[rounding]
            columns.append(x[..., int(min(max(at, 0), extent - 1))])
            continue
        at = min(max(at, 0), extent - 1)
        low = int(np.floor(at))
        high = min(low + 1, extent - 1)
        columns.append(x[..., low] * (1 - (at - low)) + x[..., high] * (at - low))
    return torch.stack(columns, -1).movedim(-1, attrs["axis"])


def _slice(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    at: list[Any] = [slice(None)] * inputs[0].dim()
    at[attrs["axis"]] = slice(attrs["start"], attrs["stop"], attrs["step"])
    return inputs[0][tuple(at)]


def _pad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    after = inputs[0].dim() - 1 - attrs["axis"]
    return F.pad(inputs[0], [0, 0] * after + [attrs["before"], attrs["after"]])


def _gather_grad(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    (ids, dy), batch = inputs, attrs.get("batch", 0)
    if batch:
        return torch.stack(
            [_gather_grad(part, {**attrs, "batch": batch - 1}) for part in zip(ids, dy, strict=True)]
        )
    row = dy.shape[ids.dim() :]
    table = torch.zeros(attrs["rows"], *row, dtype=dy.dtype)
    return table.index_add(0, ids.reshape(-1) % attrs["rows"], dy.reshape(-1, *row))


def _gather(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    batch = attrs.get("batch", 0)
    if not batch:
        return inputs[0][inputs[1]]
    return torch.stack([_gather(part, {**attrs, "batch": batch - 1}) for part in zip(*inputs, strict=True)])


def _top(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    """By Python's sort, which keeps the order of equal ones."""
    lines = inputs[0].movedim(attrs["axis"], -1)
    sign, k = -1 if attrs["largest"] else 1, attrs["k"]

    def best(line: list[float]) -> list[int]:
        return sorted(range(len(line)), key=lambda place: sign * line[place])[:k]

    found = torch.tensor([best(line) for line in lines.reshape(-1, lines.shape[-1]).tolist()])
    return found.reshape(*lines.shape[:-1], k).movedim(-1, attrs["axis"])


def _last_at(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    batch = attrs.get("batch", 0)
    if batch:
        return torch.stack([_last_at([part], {**attrs, "batch": batch - 1}) for part in inputs[0]])
    found = torch.full((attrs["rows"],), -1)
    for place, row in enumerate(inputs[0].reshape(-1).tolist()):
        found[row] = place
    return found


def _dropout(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, u = inputs
    return torch.where(u >= attrs["ratio"], x / (1 - attrs["ratio"]), torch.zeros((), dtype=x.dtype))


def _ctc(inputs: Tensors, attrs: Mapping[str, Any]) -> torch.Tensor:
    x, labels, counts, frames = inputs[:4]
    chances = F.log_softmax(x, 2).transpose(0, 1)
    options = {"blank": attrs["blank"], "zero_infinity": attrs["zero_infinity"]}
    return F.ctc_loss(chances, labels.clamp(0), frames, counts, reduction="none", **options)


ACTIVATIONS: Mapping[str, tuple[Sequence[Mapping[str, Any]], Oracle]] = {
    "Relu": ([{}], lambda i, a: F.relu(i[0])),
    "LeakyRelu": ([{"alpha": 0.1}], lambda i, a: F.leaky_relu(i[0], a["alpha"])),
    "Elu": (
        [{"alpha": alpha} for alpha in (0.7, -0.7, 0.0)],
        lambda i, a: torch.where(i[0] > 0, i[0], a["alpha"] * torch.expm1(i[0].clamp(max=0))),
    ),
    "Gelu": ([{"approximate": way} for way in ("none", "tanh")], lambda i, a: F.gelu(i[0], **a)),
    "QuickGelu": ([{"alpha": 1.7}], lambda i, a: i[0] * torch.sigmoid(a["alpha"] * i[0])),
}
"""Operator of one operand -> its instances, and its oracle."""
ACTIVATION_GRADS: Mapping[str, tuple[Sequence[Mapping[str, Any]], Oracle]] = {
    "ReluGrad": ([{}], lambda i, a: torch.where(i[1] > 0, i[0], torch.zeros((), dtype=i[0].dtype))),
    "LeakyReluGrad": ([{"alpha": 0.1}], lambda i, a: torch.where(i[1] > 0, i[0], i[0] * a["alpha"])),
    "EluGrad": ([{"alpha": 0.7}], lambda i, a: torch.where(i[1] > 0, i[0], i[0] * (i[1] + a["alpha"]))),
    "GeluGrad": (
        [{"approximate": way} for way in ("none", "tanh")],
        lambda i, a: _vjp(lambda x: F.gelu(x, **a), i[1], i[0]),
    ),
    "SigmoidGrad": ([{}], lambda i, a: i[0] * i[1] * (1 - i[1])),
    "TanhGrad": ([{}], lambda i, a: i[0] * (1 - i[1] ** 2)),
}
"""The same of gradients, which take the gradient of the result and the operand, or the result."""
OPS: dict[str, Oracle] = {
    "Add": lambda i, a: i[0] + i[1],
    "Sub": lambda i, a: i[0] - i[1],
    "Mul": lambda i, a: i[0] * i[1],
    "Div": lambda i, a: torch.div(*i, rounding_mode=None if i[0].is_floating_point() else "trunc"),
    "Pow": lambda i, a: torch.pow(i[0], i[1]),
    "Max": lambda i, a: torch.maximum(i[0], i[1]),
    "Min": lambda i, a: torch.minimum(i[0], i[1]),
    "Neg": lambda i, a: -i[0],
    "Sqrt": lambda i, a: i[0].sqrt(),
    "Exp": lambda i, a: i[0].exp(),
    "Log": lambda i, a: i[0].log(),
    "Abs": lambda i, a: i[0].abs(),
    "Erf": lambda i, a: i[0].erf(),
    "Reciprocal": lambda i, a: 1 / i[0],
    **{
        op: (lambda i, a, op=op: getattr(torch, op.lower())(i[0]))
        for op in ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
    },
    "Floor": lambda i, a: i[0].floor(),
    "Round": lambda i, a: i[0].round(),
    "Mod": lambda i, a: (torch.fmod if a.get("fmod", 0) else torch.remainder)(*i),
    "Identity": lambda i, a: i[0],
    "Cast": lambda i, a: i[0].to(DTYPES[a["to"]]),
    "Greater": lambda i, a: i[0] > i[1],
    "Less": lambda i, a: i[0] < i[1],
    "Equal": lambda i, a: i[0] == i[1],
    "Not": lambda i, a: ~i[0],
    "And": lambda i, a: i[0] & i[1],
    "Or": lambda i, a: i[0] | i[1],
    "Where": lambda i, a: torch.where(*i),
    "Sigmoid": lambda i, a: i[0].sigmoid(),
    "Tanh": lambda i, a: i[0].tanh(),
    "Softplus": lambda i, a: i[0].clamp(min=0) + torch.log1p(torch.exp(-i[0].abs())),
    "Dropout": _dropout,
    "Moments": _moments,
    "Normalize": lambda i, a: (i[0] - i[1]) / torch.sqrt(i[2] + a["eps"]),
    "Transpose": lambda i, a: i[0].permute(a["perm"]),
    "Reshape": lambda i, a: i[0].reshape(a["shape"]),
    "Expand": lambda i, a: i[0].expand(a["shape"]),
    "Concat": lambda i, a: torch.cat(tuple(i), a["axis"]),
    "Split": lambda i, a: torch.split(i[0], list(a["sizes"]), a["axis"]),
    "Slice": _slice,
    "Reverse": lambda i, a: i[0].flip(a["axis"]),
    "Pad": _pad,
    "Gather": _gather,
    "LastAt": _last_at,
    "Top": _top,
    "GatherGrad": _gather_grad,
    "ReduceSum": lambda i, a: i[0].sum(tuple(a["axes"]), keepdim=True),
    "ReduceMax": lambda i, a: i[0].amax(tuple(a["axes"]), keepdim=True),
    "LogSumExp": lambda i, a: torch.logsumexp(i[0], tuple(a["axes"]), keepdim=True),
    "Softmax": lambda i, a: F.softmax(i[0], a["axis"]),
    "LogSoftmax": lambda i, a: F.log_softmax(i[0], a["axis"]),
    "Einsum": lambda i, a: torch.einsum(a["equation"], *i),
    "Conv": lambda i, a: _conv(i[0], i[1], a),
    "ConvTranspose": _conv_transpose,
    "ConvWeightGrad": _conv_weight_grad,
    "MaxPool": lambda i, a: _max_pool(i[0], a),
    "MaxPoolGrad": lambda i, a: _vjp(lambda x: _max_pool(x, a), i[0], i[1]),
    "Resample": _resample,
    **{op: oracle for op, (_, oracle) in {**ACTIVATIONS, **ACTIVATION_GRADS}.items()},
    **recurrent_cases.ORACLES,
    **attention_cases.ORACLES,
    "Ctc": _ctc,
    "CtcGrad": lambda i, a: _vjp(lambda x: _ctc([x, *i[1:4]], a), i[0], i[4]),
}
