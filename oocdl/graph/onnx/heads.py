"""Moves a model's final activation behind the Transpose that follows it: its logits can then be told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

from oocdl.graph.onnx.model_file import OnnxNode

FINAL = ("Softmax", "LogSoftmax", "Sigmoid")


def activations_last(nodes: Sequence[OnnxNode], outputs: Set[str], opset: int) -> tuple[OnnxNode, ...]:
    """Let an output that is a Transpose of an activation be the activation of a Transpose.

    Files of channels-last networks end so. ``outputs``: those of the graph.
    """
    makers = {name: node for node in nodes for name in node.outputs}
    readers = Counter(name for node in nodes for name in node.inputs)
    pairs: dict[str, tuple[OnnxNode, OnnxNode]] = {}
    moved: set[str] = set()
    for last in nodes:
        first = makers.get(last.inputs[0]) if last.op == "Transpose" and outputs & set(last.outputs) else None
        if first is None or first.op not in FINAL or first.outputs[0] in outputs:
            continue
        if readers[first.outputs[0]] > 1 or "perm" not in last.attrs:
            continue
        attrs = dict(first.attrs)
        if first.op != "Sigmoid":
            if opset < 13:  # over all axes from one on
                continue
            perm = [int(axis) for axis in last.attrs["perm"]]
            if not perm or sorted(perm) != list(range(len(perm))):
                continue  # it is refused where it is lowered
            attrs["axis"] = perm.index(first.attrs.get("axis", -1) % len(perm))
        moved.add(first.outputs[0])
        pairs[last.outputs[0]] = (
            replace(last, inputs=first.inputs, outputs=first.outputs),
            replace(first, inputs=first.outputs, outputs=last.outputs, attrs=attrs),
        )
    return tuple(
        one
        for node in nodes
        if not moved.intersection(node.outputs)
        for one in pairs.get(node.outputs[0] if node.outputs else "", (node,))
    )
