"""The probes that measure a machine: small programs, one operator each, of sizes as units have them.

The rule of an operator says which probes it has (``OpRule.speed``). A probe is a graph of one operator that
is not cut. One that is bound by memory is measured before a Neg, and the time of the Neg alone is taken off:
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

FOLLOWING_OP = "Neg"
"""The operator that reads the results of others in their probes."""


def probe_program(probe: Probe, channels_last_ranks: Collection[int] = ()) -> Program:
    """The operator alone, or before a Neg if the probe is chained.

    Arrays of a convolution whose rank is in ``channels_last_ranks`` lie channels last.
    """
    build, made = _built(probe)
    if probe.chained:
        made = (build(FOLLOWING_OP, made[0]),)
    return _one_program(build, *made, channels_last_ranks=channels_last_ranks)


def rest_program(probe: Probe) -> Program | None:
    """The Neg alone, if it is part of ``probe_program``."""
    if not probe.chained:
        return None
    build, made = _built(probe)
    return probe_program(Probe(FOLLOWING_OP, ((build.shape(made[0]), build.dtype(made[0])),)))


def _built(probe: Probe) -> tuple[Builder, tuple[str, ...]]:
    """A graph of the operator alone, and the names of its results."""
    build = Builder(RULES)
    inputs = [build.value(f"x{i}", *given, Role.INPUT) for i, given in enumerate(probe.inputs)]
    return build, build.node(probe.op, inputs, dict(probe.attrs))


def _one_program(build: Builder, *outputs: str, channels_last_ranks: Collection[int] = ()) -> Program:
    """The whole graph as one program."""
    build.outputs = list(outputs)
    factored = factorize(_with_float32_sums(build.graph()), RULES)
    layering = Layering(channels_last(factored, RULES, channels_last_ranks), RULES)
    plan = plan_pass(layering, Limits(1 << 50))
    [unit] = [unit for layer in plan.layers for unit in layer.units]
    return unit.program


def _with_float32_sums(graph: Graph) -> Graph:
    """Give products of bfloat16 float32 results unless those are data, as the transform ``bfloat16`` does."""
    float32: dict[str, Value] = {}
    for node in graph.nodes:
        product = RULES[node.op].product
        for value in (graph.values[name] for name in node.outputs):
            if product is not None and not product.makes_data and value.dtype == STORED:
                float32[value.name] = replace(value, dtype="float32")
    return replace(graph, values={**graph.values, **float32})


def computing_probes(scale: Scale) -> Iterator[Heavy]:
    """Probes of every kind of heavy operator in several sizes.

    A ``scale`` of 1 is for measuring, less is for tests.
    """
    for rule in RULES.values():
        if isinstance(rule.speed, Computing):
            yield from rule.speed.probes(scale)


def bfloat16_probes(scale: Scale) -> Iterator[Heavy]:
    """Probes of the products on operands of bfloat16, in fewer sizes."""
    for kind, size, probe in computing_probes(replace(scale, few=True)):
        if RULES[probe.op].product is not None:
            inputs = tuple((shape, STORED) for shape, _ in probe.inputs)
            yield kind + BFLOAT16_SUFFIX, size, replace(probe, inputs=inputs)


def streaming_probes(share: float, bfloat16: bool = False) -> Iterator[Probe]:
    """Probes of every operator that is bound by memory; several of one operator are averaged.

    ``share`` of the elements are taken: 1 is for measuring. ``bfloat16``: arrays of bfloat16, too.
    """
    edge = max(int(96 * share**0.5), 4)
    shape: Shape = (1, 16, 16, edge, edge)
    for rule in RULES.values():
        if isinstance(rule.speed, Streaming):
            for probe in rule.speed.probes(shape):
                build, made = _built(probe)
                if bfloat16 or STORED not in {value.dtype for value in build.values.values()}:
                    chained = probe.op != FOLLOWING_OP and build.dtype(made[0]) != "bool"
                    yield replace(probe, chained=chained)


def overhead_program(count: int) -> Program:
    """``count`` operators, one after the other, on an array of one element."""
    build = Builder(RULES)
    value = build.value("x", (1,), "float32", Role.INPUT)
    for number in range(count):
        value = build(FOLLOWING_OP if number % 2 else "Abs", value)
    return _one_program(build, value)
