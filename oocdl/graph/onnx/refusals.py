"""Writes which nodes of a model are refused, and why."""

from __future__ import annotations

from collections.abc import Sequence

from oocdl.errors import Refusal
from oocdl.graph.onnx.model_file import shown


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
