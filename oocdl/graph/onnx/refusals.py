"""Writes which nodes of a model are refused, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oocdl.errors import Refusal
from oocdl.graph.onnx.model_file import shown


def in_body(refused: Sequence[Refusal], node: str) -> list[Refusal]:
    """Return refusals of nodes in the body of the node of a name, with that in their reasons."""
    return [replace(item, reason=f"{item.reason} in the body of {shown(node)}") for item in refused]


def all_of(refused: Sequence[Refusal], unknown: bool) -> str:
    """Write that a model is refused, for all of it, and the ways out; ``unknown``: for operators, too."""
    count = "1 node is" if len(refused) == 1 else f"{len(refused)} nodes are"
    own = ", and oocdl.ops.register adds operators of your own" if unknown else ""
    return f"{count} not supported: {grouped(refused)}; docs/reference/operators.md lists what is{own}"


def grouped(refused: Sequence[Refusal]) -> str:
    """Write what is refused, by reason: how often, and the first node.

    >>> grouped([Refusal("/a/act", "PRelu", "PRelu"), Refusal("/b/act", "PRelu", "PRelu")])
    "PRelu × 2, first '/a/act'"
    """
    nodes: dict[str, list[str]] = {}
    for refusal in refused:
        nodes.setdefault(refusal.reason, []).append(refusal.node)
    return "; ".join(
        f"{shown(found[0])} ({reason})"
        if len(found) == 1
        else f"{reason} × {len(found)}, first {shown(found[0])}"
        for reason, found in nodes.items()
    )
