"""The table of all operators, assembled by hand, and ``register`` for ONNX operators made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from oocdl.errors import InputError
from oocdl.graph.ir.op_rule import OpRule
from oocdl.graph.onnx.lowering import supported
from oocdl.graph.onnx.own_operators import OWN, Compose, own_operator
from oocdl.ops import activation, ctc, einsum, gather, pointwise, recurrent, reduce, shape
from oocdl.ops.sequences import attention
from oocdl.ops.windows import conv, pool, resample

RULES: Mapping[str, OpRule] = {
    rule.op: rule
    for family in (pointwise, activation, reduce, einsum, attention, conv, pool, resample)
    + (shape, gather, recurrent, ctc)
    for rule in family.RULES
}
"""All operators of the vocabulary: one that is not here does not exist."""


def register(name: str, *, replace: bool = False) -> Callable[[Compose], Compose]:
    """Return a decorator that makes a function an ONNX operator of this name, for files that have it.

    ``name`` is the operator with its domain, such as "audio::Snake", or that of an operator of ONNX which
    oocdl does not read. The function gets a builder and the names of the node's operands, adds nodes
    (``build("Mul", x, y)``; ``docs/reference/operators.md`` lists them), and returns the name of the result,
    or a sequence of names, one for each output. Parameters behind a ``*`` are the node's attributes, as
    numbers, texts, tuples or arrays; one without a default has to be there. An operand that may be left out
    has the default None. Floating-point operands are in the run's precision, whole numbers int64; of those
    that are known before the run ``build.constants`` has the arrays. Gradients and cuts follow from the
    nodes, on every engine.

    A function in the file with this name is not read. A run notes a digest of the function: a resume and a
    prediction without it, or with another, are refused. Workers of a client need not have it.

    Raises InputError for a name of an operator that oocdl reads itself, and for one that another function
    has, unless ``replace``. For example::

        @oocdl.ops.register("audio::Snake")
        def snake(build, x, alpha, *, power=2):
            wave = build("Sin", build("Mul", x, alpha))
            return build("Add", x, build("Div", build("Pow", wave, build.like(power, x)), alpha))
    """
    name = name.removeprefix("ai.onnx::")
    if not re.fullmatch(r"([\w.-]+::)?\w+", name):
        raise InputError(f"'{name}' is no name of an ONNX operator; write it as domain::Operator")
    if name in supported(RULES):
        raise InputError(f"oocdl reads the operator '{name}' itself; give yours another name or a domain")

    def keep(function: Compose) -> Compose:
        made = own_operator(name, function)
        if not replace and name in OWN and OWN[name].digest != made.digest:
            why = f"there is an operator '{name}' of another function already"
            raise InputError(f"{why}; replace=True takes its place")
        OWN[name] = made
        return function

    return keep
