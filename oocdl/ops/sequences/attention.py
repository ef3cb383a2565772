"""Attention: ``softmax(scale q k^T + mask) v``, without the scores ever being stored.

    Attend    (q, k, v, *masks, [u])                    {scale, band, unseen, blind, ratio} -> y, stats
    AttendGrad(q, k, v, stats, delta, dy, *masks, [u])  {the same, mask_gradient}   -> dq, dk, dv, *dmasks

q [B, G, R, Q, H] are the queries of R heads that share the keys k [B, G, K, H] and values v [B, G, K, V] of
a group; y is [B, G, R, Q, V]. A mask has rank 5 and broadcasts to the scores [B, G, R, Q, K]: a number is
added to the score, a bool says where the score counts; where it is false the score is ``unseen``, whatever
is added. With ``band`` (low, high) query i sees the keys from i + low up to i + high, either of which may be
None: ``(None, 0)`` is causal. It counts from the first query of the whole value, wherever that is cut. A
query that sees no key has the result ``blind``: 0, or NaN as of a plain softmax. ``mask_gradient`` says
of each mask whether it has a gradient, or is False if none has. With a ``ratio`` above 0 weights are dropped,
as by Dropout, where the uniform numbers ``u`` [B, G, R, Q, K] are below it.

stats [B, G, R, Q, 2] are the largest score of each query, and 1 over the sum of the exponentials of what all
are below it (0 and ``blind`` for a query that sees nothing). From these the gradient computes the softmax P
again, tile by tile; a log-sum-exp would not do where all scores are the least number of their dtype. With
``delta`` = sum(dy y), and D = 1, or 0 where a weight is dropped, else 1 / (1 - ratio):

    dv = (D P)^T dy,  dS = P (D (dy v^T) - delta),  dq = scale dS k,  dk = scale dS^T q,  dmask = dS

(Dao et al. 2022, arXiv:2205.14135.) Batch, groups, heads and queries are cut; keys are whole. Over cut
queries and heads dk, dv and dmask are partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import Any

from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule, Region
from oocdl.graph.ir.op_rule import Builder, Gradient, OpRule, Product, Spec
from oocdl.graph.ir.program import Instruction
from oocdl.graph.ir.score_tiles import (
    MOST_MASKS,
    NO_BAND,
    TILE_ELEMENTS,
    computed_tiles,
    drops,
    seen_scores,
    tiling,
)
from oocdl.graph.ir.speed import Computing, Heavy, Scale
from oocdl.ops._broadcast import (
    extents_by,
    fail,
    no_second_derivative,
    plain_by,
    same_float,
    size,
    summed_dtype,
)
from oocdl.ops._speed import READING, probe

SIZES, FEW_SIZES = (4, 16, 64, 256), (16, 64)
"""The smallest extents of products that are measured, in float32 and in bfloat16."""
SCORE_FLOPS = 20
"""Operations of the exponential and the sums of a score."""
TILE_SECONDS: Mapping[str, float] = {"Attend": 1.45e-4, "AttendGrad": 2.5e-4}
"""Seconds of a tile beside its arithmetic with the torch engine, measured: 90 to 220 and 180 to 410 us, of
256 to 2,048 queries of sizes 32 to 128. Attention that is short or causal took 1.4 to 3.5 times its rate."""
ELEMENT_FLOPS = 100
"""Operations for an element of an operand beside the products: it is put in a tile's order. They are so
many that attention is never computed twice, however short its sequences are."""
DEFAULTS: Mapping[str, Any] = {"band": NO_BAND, "unseen": -inf, "blind": 0.0}

Q, K, V, SCORES, STATS, ROW = "bgrqh", "bgkh", "bgkv", "bgrqk", "bgrqs", "bgrq1"
"""The axes of operands and results; 1 is an axis of extent one."""
OPERANDS: Mapping[str, tuple[str, ...]] = {"Attend": (Q, K, V), "AttendGrad": (Q, K, V, STATS, ROW, "bgrqv")}
"""Operator -> the axes of its operands before the masks."""
EXACT: Mapping[str, tuple[int, ...]] = {"Attend": (3, 4, 5, 6), "AttendGrad": (3, 4, 6, 7, 8, 9)}
"""Operator -> the numbers of operands that are never rounded to bfloat16: masks, statistics of rows."""
RESULTS: Mapping[str, tuple[str, ...]] = {"Attend": ("bgrqv", STATS), "AttendGrad": (Q, K, V)}


def _terms(node: Node, count: int) -> tuple[str, ...]:
    first = OPERANDS[node.op]
    least = len(first) + drops(node.attrs)
    if not least <= count <= len(first) + MOST_MASKS:
        fail(node, f"it takes {least} operands and at most {MOST_MASKS} masks, not {count}")
    return (*first, *(SCORES,) * (count - len(first)))


def _extents(node: Node, inputs: Sequence[Shape]) -> dict[str, int]:
    """Return letter -> extent, checked; only masks broadcast."""
    masks = range(len(OPERANDS[node.op]), len(inputs) - drops(node.attrs))
    return extents_by(node, _terms(node, len(inputs)), inputs, {"1": 1, "s": 2}, masks)


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    extents = _extents(node, [value.shape for value in inputs])
    count = len(OPERANDS[node.op])
    dtype = same_float(node, [v for n, v in enumerate(inputs[:count]) if n not in EXACT[node.op]])
    masks = inputs[count:]
    for mask in masks:
        if mask.dtype != "bool" and not is_float(mask.dtype):
            fail(node, f"its mask must be bool or floating point, not {mask.dtype}")
    made = [tuple(extents[letter] for letter in term) for term in RESULTS[node.op]]
    wanted = node.attrs.get("mask_gradient") or ()
    if len(wanted) > len(masks):
        fail(node, f"it has {len(masks)} masks, and is to make gradients of {len(wanted)}")
    made += [mask.shape for mask, one in zip(masks, wanted, strict=False) if one]
    return [(shape, summed_dtype(dtype)) for shape in made]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    extents = _extents(node, inputs)
    return AxisRule(
        inputs=plain_by(_terms(node, len(inputs)), inputs),
        outputs=plain_by(chain(RESULTS[node.op], repeat(SCORES)), outputs),
        extents={letter: extent for letter, extent in extents.items() if letter != "1"},
        uncut=frozenset("khvs"),
        unsplit=frozenset() if node.attrs["band"] == NO_BAND else frozenset("q"),
        combine="sum" if node.op == "AttendGrad" else None,
    )


def _localize(node: Node, out: Region, inputs: Sequence[Region], shapes: Sequence[Shape]) -> dict[str, Any]:
    """Count the band from the first query of the shard."""
    return {"band": tuple(None if edge is None else edge + out[3][0] for edge in node.attrs["band"])}


# Gradient ------------------------------------------------------------------------------------


def _gradient(build: Builder, node: Node, dy: str, of_stats: str | None) -> Sequence[str | None]:
    if of_stats is not None:
        raise UnsupportedError(f"node '{node.name}' ({node.op}): what it keeps for its gradient has none")
    (q, k, v, *masks), (y, stats) = node.inputs, node.outputs
    delta = build("ReduceSum", build("Mul", dy, y), axes=(4,))
    trained = tuple(build.may_be_trained(mask) for mask in masks[: len(masks) - drops(node.attrs)])
    attrs = {**node.attrs, "mask_gradient": any(trained) and trained}
    dq, dk, dv, *rest = build.node("AttendGrad", [q, k, v, stats, delta, dy, *masks], attrs)
    dmasks = iter(rest)
    of_masks = [next(dmasks) if one else None for one in trained]
    return [dq, dk, dv, *of_masks, *([None] * drops(node.attrs))]


# Cost ----------------------------------------------------------------------------------------


def _flops(products: tuple[int, int], node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count ``products`` with q or k, and with v or dy, for each score that is in the band, and the rest."""
    q, k, v = inputs[:3]
    seen = size(q[:3]) * seen_scores(node.attrs["band"], q[3], k[2])
    rest = SCORE_FLOPS * seen + ELEMENT_FLOPS * (size(q) + size(k) + size(v) + size(outputs[0]))
    return seen * 2 * (products[0] * q[4] + products[1] * v[3]) + rest


def _scratch(tiles: int, node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count ``tiles`` times the scores of a tile, parts of operands and results in a tile's order, and sums.

    An engine may take a tile of all keys at once, of one query at least.
    """
    q, k, v = inputs[:3]
    band = node.attrs["band"]
    found, wide = tiling(q, k[2], band=band), tiling(q, k[2], k[2], band)
    pairs = max(found.batch * found.groups, wide.batch * wide.groups)
    scores = max(size((t.batch, t.groups, q[2], t.queries, t.keys)) for t in (found, wide))
    rows = pairs * q[2] * max(found.queries, wide.queries)
    tiles += 2 * drops(node.attrs) + (band != NO_BAND)
    # What a band hides is kept for each place that a tile may have beside an end of it, and for each head.
    hidden = sum(end is not None for end in band) * found.keys * (found.keys + 2 * found.queries) * q[2]
    return hidden + tiles * scores + pairs * 4 * k[2] * (q[4] + v[3]) + 4 * rows * (q[4] + v[3] + 4)


def _small_tiles(step: Instruction, shapes: Sequence[Shape]) -> float:
    """Return how many more tiles there are than the scores would be in tiles as those of a probe."""
    tiles, scores = computed_tiles(shapes[0], shapes[1][2], step.attrs["band"])
    return max(tiles - scores / TILE_ELEMENTS, 0.0)


def _speed(op: str) -> Computing:
    def kind(step: Instruction, shapes: Sequence[Shape], thin_slab_elements: int) -> tuple[str, int]:
        """Return the kind, and the smallest extent of the products."""
        q, k = shapes[:2]
        return op, min(q[2] * q[3], k[2], q[4])

    def probes(scale: Scale) -> Iterator[Heavy]:
        for small in FEW_SIZES if scale.few else SIZES:
            long = max(int(1024 * scale.share), 4)
            extents = {"b": 1, "g": 2, "r": 1, "q": long, "k": long, "h": small, "v": small, "s": 2, "1": 1}
            shapes = [tuple(extents[letter] for letter in term) for term in OPERANDS[op]]
            yield op, small, probe(op, *shapes, **DEFAULTS, scale=small**-0.5)

    return Computing(
        like=READING, kind=kind, probes=probes, small_tiles=_small_tiles, tile_seconds=TILE_SECONDS[op]
    )


def _rule(op: str, gradient: Gradient, products: tuple[int, int], tiles: int) -> OpRule:
    return OpRule(
        op=op, infer=_infer, gradient=gradient, axes=_axes, localize=_localize, speed=_speed(op),
        flops=partial(_flops, products), scratch_elements=partial(_scratch, tiles),
        product=Product(exact=EXACT[op]), keeps_axes=False,
    )  # fmt: skip


RULES: tuple[OpRule, ...] = (
    _rule("Attend", _gradient, products=(1, 1), tiles=3),
    _rule("AttendGrad", no_second_derivative, products=(3, 2), tiles=5),
)
