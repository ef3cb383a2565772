"""Facts of each layer of a pass, for tables, reports, pictures and pages.

In a plan, a report, a trace and on the page a layer has one name, by modules of the network or nodes of its
file: "encoder.0.conv" forward, "grad/encoder.0.conv" backward, "update/encoder.0.conv.weight" where a weight
is updated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from oocdl.graph.ir.graph import Role
from oocdl.graph.partition.storage_cut import Layer, phase_of
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.simulation.timeline import Simulated

LOSS, WEIGHTS = "loss", "weights"
"""Names of layers that compute nothing of the model."""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One layer of a pass: bytes, FLOPs and seconds are of all its units together."""

    name: str
    phase: str
    """"forward", "backward" or "update"."""
    units: int
    cuts: str
    """Cuts, such as "batch:2 space0:4"; empty where it is whole."""
    shape: str
    """Shape of the first value that it makes."""
    operators: str
    unit_bytes: int
    """Memory of its largest unit."""
    read_bytes: int
    written_bytes: int
    flops: int
    predicted_seconds: float
    sources: Sequence[int]
    """Indexes of the layers that it reads from."""


def layer_facts(compiled: CompiledPass, simulated: Iterable[Simulated]) -> tuple[LayerFacts, ...]:
    """Gather the facts of a pass's layers, in order; ``simulated``: the pass, if a step has one of it."""
    plan, names, seconds = compiled.plan, layer_names(compiled), computing_seconds(simulated)
    maker: dict[str, int] = {}
    layers = []
    for index, planned in enumerate(plan.layers):
        layer = planned.layer
        made = (*layer.stores, *layer.partials)
        sources = dict.fromkeys(maker[name] for name in layer.reads if name in maker)
        maker |= dict.fromkeys(made, index)
        layers.append(
            LayerFacts(
                name=names[layer.name],
                phase=phase_of(layer.name),
                units=len(planned.units),
                cuts=" ".join(f"{plan.classes.names[c]}:{n}" for c, n in planned.grid.items() if n > 1),
                shape=" × ".join(map(str, plan.factored.shapes[made[0]])) if made else "",
                operators=", ".join(dict.fromkeys(cell.node.op for cell in layer.cells)),
                unit_bytes=planned.peak_bytes,
                read_bytes=planned.read_bytes,
                written_bytes=planned.written_bytes,
                flops=planned.flops,
                predicted_seconds=seconds.get(layer.name, 0.0),
                sources=tuple(sources),
            )
        )
    return tuple(layers)


def computing_seconds(simulated: Iterable[Simulated]) -> dict[str, float]:
    """Return the predicted seconds of all tasks of each layer, in the order in which layers begin."""
    seconds: dict[str, float] = {}
    for one in simulated:
        for ran in sorted(one.units, key=lambda ran: ran.position):
            layer = ran.key.layer
            seconds[layer] = seconds.get(layer, 0.0) + ran.done - ran.computing
    return seconds


def layer_names(compiled: CompiledPass) -> dict[str, str]:
    """Return layer -> its name, which no two have; from the second of a name on they are numbered."""
    model = compiled.imported.graph
    known = {_root(node.name) for node in model.nodes} | compiled.imported.modules.keys()
    weights = {name for name, value in model.values.items() if value.role in (Role.WEIGHT, Role.STATE)}
    seen: Counter[str] = Counter()
    names = {}
    for planned in compiled.plan.layers:
        layer = planned.layer
        first, *_, last = layer.members or (layer.name, layer.name)
        ends = [_name(end, layer, known, weights, compiled.imported.modules) for end in (first, last)]
        name = " … ".join(dict.fromkeys(ends))
        seen[name] += 1
        names[layer.name] = name if seen[name] == 1 else f"{name} {seen[name]}"
    return names


def _name(title: str, layer: Layer, known: Set[str], weights: Set[str], modules: Mapping[str, str]) -> str:
    phase, slash, rest = title.partition("/")
    if phase == "update" and slash:
        return f"update/{rest if rest in weights else WEIGHTS}"
    part, name = ("grad/", rest) if phase == "grad" and slash else ("", title)
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
