"""What layers are called wherever one is told of: by modules of the network, or nodes of its file.

In a plan, a report, a trace and on the page a layer has one name: "encoder.0.conv" forward,
"grad/encoder.0.conv" backward, "update/encoder.0.conv.weight" where a weight is updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from oocdl.graph.ir.graph import Role
from oocdl.graph.partition.storage_cut import Layer
from oocdl.planning.compiler import CompiledPass

LOSS, WEIGHTS = "loss", "weights"
"""What layers are called that compute nothing of the model."""


def layer_names(compiled: CompiledPass) -> dict[str, str]:
    """Return layer -> its name, which no two have; from the second of a name on they are numbered."""
    model = compiled.imported.graph
    known = {_root(node.name) for node in model.nodes} | compiled.imported.modules.keys()
    weights = {name for name, value in model.values.items() if value.role in (Role.WEIGHT, Role.STATE)}
    seen: Counter[str] = Counter()
    found = {}
    for planned in compiled.plan.layers:
        name = _name(planned.layer, known, weights, compiled.imported.modules)
        seen[name] += 1
        found[planned.layer.name] = name if seen[name] == 1 else f"{name} {seen[name]}"
    return found


def _name(layer: Layer, known: Set[str], weights: Set[str], modules: Mapping[str, str]) -> str:
    phase, slash, rest = layer.name.partition("/")
    if phase == "update" and slash:
        return f"update/{rest if rest in weights else WEIGHTS}"
    part, name = ("grad/", rest) if phase == "grad" and slash else ("", layer.name)
    if name in weights:
        return f"{part}{name}"
    node = _node(name, known)
    if node is not None:
        return f"{part}{modules.get(node) or (name if node == _root(name) else node)}"
    own = [node for cell in layer.cells if (node := _node(cell.node.name, known)) is not None]
    return f"{part}{modules.get(own[-1], own[-1])}, {LOSS}" if own else f"{part}{LOSS}"


def _node(name: str, known: Set[str]) -> str | None:
    """The node of the file that a node is of, which may be lowered to several; None if it is of none."""
    while name:
        if name in known:
            return name
        name = name.rpartition("/")[0]
    return None


def _root(name: str) -> str:
    return name.partition("/")[0]
