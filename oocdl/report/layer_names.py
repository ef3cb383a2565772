"""What layers are called in a picture: by names of the model, not of nodes that losses and gradients add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from oocdl.graph.ir.graph import Role
from oocdl.graph.partition.storage_cut import Layer
from oocdl.planning.compiler import CompiledPass
from oocdl.report.figure import phase_of

LOSS, UPDATE = "loss", "weights"
"""What layers are called that compute nothing of the model."""


def picture_names(compiled: CompiledPass) -> dict[str, str]:
    """Return layer -> its name in a picture, where forward, backward and update are told apart by colour."""
    model = compiled.imported.graph
    known = {_root(node.name) for node in model.nodes}
    weights = {name for name, value in model.values.items() if value.role in (Role.WEIGHT, Role.STATE)}
    layers = [one.layer for one in compiled.plan.layers]
    names = [_name(layer, known, weights) for layer in layers]
    counted = _counted(names, (phase_of(layer.name) for layer in layers))
    return dict(zip((layer.name for layer in layers), counted, strict=True))


def _name(layer: Layer, known: Set[str], weights: Set[str]) -> str:
    phase, slash, rest = layer.name.partition("/")
    if phase == "update" and slash:
        return rest if rest in weights else UPDATE
    name = rest if phase == "grad" and slash else layer.name
    if _root(name) in known or name in weights:
        return name
    nodes = [cell.node.name for cell in layer.cells]
    own = [_root(node) for node in nodes if _root(node) in known]
    return f"{own[-1]}, {LOSS}" if own else LOSS


def _root(name: str) -> str:
    """The node of the model that a node belongs to, which is written as several."""
    return name.partition("/")[0]


def _counted(names: Iterable[str], phases: Iterable[str]) -> list[str]:
    """Number those of the same name in the same part of a pass, from the second on."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for place in zip(names, phases, strict=True):
        seen[place] += 1
        found.append(place[0] if seen[place] == 1 else f"{place[0]} {seen[place]}")
    return found
