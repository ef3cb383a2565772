"""What is measured of a machine: small programs, one operator each, of sizes as units have them.

Which probes an operator has its rule says (``OpRule.speed``). A probe is a graph of one operator, cut by
nothing. One that is bound by memory is measured before a Neg, and the time of the Neg alone is taken off:
what only changes how an array is seen (Transpose, Slice, ..) costs its time when the next operator reads
it, and onnxruntime spends twice as long on an array that leaves the program as on one that another
operator reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from oocdl.graph.ir.graph import Graph, Role, Shape, Value
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.speed import Computing, Heavy, Probe, Scale, Streaming
from oocdl.graph.transforms.bfloat16 import STORED
from oocdl.graph.transforms.channels_last import channels_last
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES
from oocdl.planning.cost_model import BFLOAT16_SUFFIX
from oocdl.planning.pass_plan import plan_pass
from oocdl.planning.tile_search import Layering, Limits

BEHIND = "Neg"
"""The operator that is put behind others."""


def probe_program(probe: Probe, last: Collection[int] = ()) -> Program:
    """The operator alone, or before a Neg; of a convolution what has a rank in ``last`` lies so."""
    build, made = _built(probe)
    if probe.chained:
        made = (build(BEHIND, made[0]),)
    return _planned(build, *made, last=last)


def rest_program(probe: Probe) -> Program | None:
    """The Neg alone, where it is part of ``probe_program``."""
    if not probe.chained:
        return None
    build, made = _built(probe)
    return probe_program(Probe(BEHIND, ((build.shape(made[0]), build.dtype(made[0])),)))


def _built(probe: Probe) -> tuple[Builder, tuple[str, ...]]:
    """A graph of the operator, and its results."""
    build = Builder(RULES)
    inputs = [build.value(f"x{i}", *given, Role.INPUT) for i, given in enumerate(probe.inputs)]
    return build, build.node(probe.op, inputs, dict(probe.attrs))


def _planned(build: Builder, *outputs: str, last: Collection[int] = ()) -> Program:
    """All of a graph as one program."""
    build.outputs = list(outputs)
    factored = factorize(_with_wide_sums(build.graph()), RULES)
    layering = Layering(channels_last(factored, RULES, last), RULES)
    plan = plan_pass(layering, Limits(1 << 50))
    [unit] = [unit for layer in plan.layers for unit in layer.units]
    return unit.program


def _with_wide_sums(graph: Graph) -> Graph:
    """Products of bfloat16 have results of float32 unless those are data, as ``use_bfloat16`` makes them."""
    wide: dict[str, Value] = {}
    for node in graph.nodes:
        product = RULES[node.op].product
        for value in (graph.values[name] for name in node.outputs):
            if product is not None and not product.makes_data and value.dtype == STORED:
                wide[value.name] = replace(value, dtype="float32")
    return replace(graph, values={**graph.values, **wide})


def heavy(scale: Scale) -> Iterator[Heavy]:
    """Every kind of heavy operator in several sizes; a ``scale`` of 1 is for measuring, less is for tests."""
    for rule in RULES.values():
        if isinstance(rule.speed, Computing):
            yield from rule.speed.probes(scale)


def in_bfloat16(scale: Scale) -> Iterator[Heavy]:
    """The products again, on operands of bfloat16; fewer sizes."""
    for kind, size, probe in heavy(replace(scale, few=True)):
        if RULES[probe.op].product is not None:
            inputs = tuple((shape, STORED) for shape, _ in probe.inputs)
            yield kind + BFLOAT16_SUFFIX, size, replace(probe, inputs=inputs)


def streams(share: float, bfloat16: bool = False) -> Iterator[Probe]:
    """A probe of every operator that is bound by memory; several of one operator are averaged.

    ``share``: of the elements that are measured. ``bfloat16``: arrays of bfloat16, too.
    """
    edge = max(int(96 * share**0.5), 4)
    shape: Shape = (1, 16, 16, edge, edge)
    for rule in RULES.values():
        if isinstance(rule.speed, Streaming):
            for probe in rule.speed.probes(shape):
                build, made = _built(probe)
                if bfloat16 or STORED not in {value.dtype for value in build.values.values()}:
                    alone = probe.op == BEHIND or build.dtype(made[0]) == "bool"
                    yield replace(probe, chained=not alone)


def overhead(count: int) -> Program:
    """``count`` operators, one after the other, on next to nothing."""
    build = Builder(RULES)
    value = build.value("x", (1,), "float32", Role.INPUT)
    for number in range(count):
        value = build(BEHIND if number % 2 else "Abs", value)
    return _planned(build, value)
