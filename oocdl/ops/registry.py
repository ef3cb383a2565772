"""The table of all operators, assembled by hand: an operator that is not here does not exist."""

from __future__ import annotations

from collections.abc import Mapping

from oocdl.graph.ir.op_rule import OpRule
from oocdl.ops import (
    activation,
    ctc,
    einsum,
    functions,
    gather,
    norm,
    pointwise,
    recurrent,
    reduce,
    shape,
    softmax,
)
from oocdl.ops.windows import conv, pool, resample

RULES: Mapping[str, OpRule] = {
    rule.op: rule
    for rules in (
        pointwise.RULES,
        activation.RULES,
        functions.RULES,
        norm.RULES,
        reduce.RULES,
        softmax.RULES,
        einsum.RULES,
        conv.RULES,
        pool.RULES,
        resample.RULES,
        shape.RULES,
        gather.RULES,
        recurrent.RULES,
        ctc.RULES,
    )
    for rule in rules
}
