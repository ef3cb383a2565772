"""Lowers the nodes of a model, or of a body, one after another, and notes all that cannot be read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from oocdl.errors import ModelError, Refusal, UnsupportedError
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.onnx.baked import check_baked, note_resized
from oocdl.graph.onnx.bodies import bodies, every_node, results_of_bodies
from oocdl.graph.onnx.bounds import MOST_CONSTANTS_BYTES, MOST_NODES
from oocdl.graph.onnx.constant_folding import DATA_SHAPED, FOLDS, fold
from oocdl.graph.onnx.context import LOWERINGS, Context, Entry, Lower, Sized, in_body
from oocdl.graph.onnx.lower import (  # noqa: F401 (each enters what it lowers into LOWERINGS)
    arithmetic,
    contraction,
    control,
    indexing,
    lower_layers,
    lower_reductions,
    lower_sequences,
    rearrange,
    resizing,
    structure,
)
from oocdl.graph.onnx.model_file import OnnxNode, shown, size_text
from oocdl.graph.onnx.own_operators import OWN, lower_own, not_known
from oocdl.graph.onnx.whole_numbers import with_types


def lowerings(rules: Rules) -> Mapping[str, Lower]:
    """Return the lowerings of all ONNX operators that can be read."""
    return {**arithmetic.of_rules(rules), **LOWERINGS}


def supported(rules: Rules) -> frozenset[str]:
    """Return the ONNX operators that can be read; those without a gradient only on constants."""
    return frozenset({*lowerings(rules), *FOLDS})


def lower_nodes(
    ctx: Context, table: Mapping[str, Lower], nodes: Sequence[OnnxNode], top: bool = False
) -> list[Refusal]:
    """Lower nodes, of the model if ``top``, else of a body; results are in ``ctx.env``, by name.

    Returns what is refused. A node that depends on a refused one is not lowered, but refused if its operator,
    or one in its bodies, is not known. Raises ModelError for a node that is wrong, unless one is refused.
    """
    known = {*table, *FOLDS, *OWN}
    refused: list[Refusal] = []
    broken: set[str] = set()
    for node in nodes:
        if not broken.isdisjoint(reads(node)):
            broken.update(name for name in node.outputs if name)
            refused += _unknown(node, known)
            continue
        ctx.node = node
        if top:
            ctx.build.scope = node.name.strip("/") + "/"
        try:
            outputs = _well_formed(ctx, table, node)
        except UnsupportedError as error:
            itself = Refusal(node.name, node.op, str(error))
            refused += error.refusals or [itself, *_unknown_inside(node, known)]
            broken.update(name for name in node.outputs if name)
            continue
        except ModelError:
            if refused:
                break
            raise
        for name, made in zip(node.outputs, outputs, strict=False):
            if name:
                ctx.env[name] = made
            if ctx.traced and isinstance(made, str):
                note_resized(ctx, name, ctx.build.shape(made))
    return refused


def reads(node: OnnxNode) -> set[str]:
    """Return the names that a node reads, and those that its bodies do."""
    return {name for item in every_node([node]) for name in item.inputs if name} | results_of_bodies([node])


def _unknown(node: OnnxNode, known: Collection[str]) -> list[Refusal]:
    """Return refusals of a node and of those in its bodies whose operators are not known."""
    itself = [] if node.op in known else [Refusal(node.name, node.op, not_known(node.op))]
    return [*itself, *_unknown_inside(node, known)]


def _unknown_inside(node: OnnxNode, known: Collection[str]) -> list[Refusal]:
    found = [item for body in bodies(node) for inner in body.nodes for item in _unknown(inner, known)]
    return in_body(found, node.name)


def _well_formed(ctx: Context, table: Mapping[str, Lower], node: OnnxNode) -> Sequence[Entry]:
    """Lower a node; what Python cannot do with its operands and attributes is an error of the model."""
    # ``--debug`` shows where that was. What is asserted stays a defect of ours.
    ctx.lowered += 1
    if ctx.lowered > MOST_NODES:
        raise ModelError(f"the model has more than {MOST_NODES} nodes, with those of loops in each trip")
    try:
        return _lowered(ctx, table, node)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        why = f"its operands and attributes do not fit ({type(error).__name__}: {error})"
        raise ModelError(f"node {shown(node.name)} ({node.op}): {why}") from error


def _lowered(ctx: Context, table: Mapping[str, Lower], node: OnnxNode) -> Sequence[Entry]:
    missing = [name for name in node.inputs if name and name not in ctx.env]
    if missing:
        raise ModelError(f"{shown(missing[0])}, read by {shown(node.name)}, is made nowhere")
    given = [ctx.env[name] if name else None for name in node.inputs]
    known = [entry if isinstance(entry, np.ndarray) else None for entry in given]
    check_baked(ctx)
    if node.op in FOLDS and not any(isinstance(entry, str | list) for entry in given):
        return _folded(ctx, node, known)
    if node.op in table:
        before = len(ctx.build.nodes)
        return with_types(ctx, table[node.op](ctx), ctx.build.nodes[before:])
    if node.op in OWN:
        return lower_own(ctx)
    what = f"{node.op} of values that are not constant" if node.op in FOLDS else not_known(node.op)
    raise UnsupportedError(what + ": its shape depends on data" * (node.op in DATA_SHAPED))


def _folded(ctx: Context, node: OnnxNode, known: Sequence[Array | None]) -> list[Array]:
    """Compute constants; counts the bytes of those that are no views, and refuses too many of them."""
    outputs, inputs = list(fold(node, known)), [array for array in known if array is not None]
    if node.op == "Cast" and ctx.facts and outputs[0].dtype == np.float32 and inputs[0].size == 1:
        outputs = [inputs[0].astype(np.float64)]  # a number of the code: Python computes in float64
    ctx.folded_bytes += sum(
        array.nbytes for array in outputs if not any(np.may_share_memory(array, other) for other in inputs)
    )
    if ctx.folded_bytes > MOST_CONSTANTS_BYTES:
        why = f"take more than {size_text(MOST_CONSTANTS_BYTES)}, which is the most that is made"
        raise ModelError(f"node {shown(node.name)} ({node.op}): the constants of the model {why}")
    follows = any(isinstance(array, Sized) for array in inputs)
    return [array.view(Sized) for array in outputs] if follows else outputs
