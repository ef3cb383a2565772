"""ONNX operators that a user writes of nodes, known by name and by their text, and their lowering."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oocdl.errors import InputError, ModelError, OocdlError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.onnx.bodies import every_node
from oocdl.graph.onnx.context import Context, Operand
from oocdl.graph.onnx.model_file import Body, OnnxNode, shown

Compose = Callable[..., str | Sequence[str]]
"""(builder, operands, attributes by keyword) -> results, all but builder and attributes names of values."""
_SLOTS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class OwnOperator:
    """An operator that ``register`` has been given. A run of a model with it needs it again, and the same."""

    function: Compose
    digest: str
    """Digest of the function's text (``digest_of``)."""
    operands: tuple[inspect.Parameter, ...]
    attributes: tuple[inspect.Parameter, ...]
    more_operands: bool
    """Whether it takes any number of further operands (``*operands``)."""
    more_attributes: bool
    """Whether it takes attributes of any name (``**attributes``)."""


OWN: dict[str, OwnOperator] = {}
"""All operators that were registered, by name, with the domain (``audio::Snake``) where it is not ONNX's."""


def own_operator(name: str, function: Compose) -> OwnOperator:
    """Read the parameters of a function; InputError if they cannot be a builder, operands and attributes."""
    digest, parameters = digest_of(function), inspect.signature(function).parameters.values()
    kinds, slots = {p.kind for p in parameters}, [p for p in parameters if p.kind in _SLOTS]
    if not slots:
        raise InputError(f"the function of operator '{name}' takes no builder")
    wrong = [p.name for p in slots if p.default is not p.empty and p.default is not None]
    if wrong:
        raise InputError(
            f"the operator '{name}' has an operand '{wrong[0]}' with a default that is not None; attributes "
            "stand behind a *, as in def f(build, x, *, alpha=1.0)"
        )
    return OwnOperator(
        function,
        digest,
        tuple(slots[1:]),
        tuple(p for p in parameters if p.kind is p.KEYWORD_ONLY),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


_QUANTIZED = re.compile(r"\w*[Qq]uantizeLinear|QLinear\w+|(Conv|MatMul)Integer")
_WHY_QUANTIZED = (
    "of a quantized network: rounded weights have no gradient to be trained by; "
    "train the network as it was before, and quantize what run.export writes"
)


def not_known(op: str) -> str:
    """Return an operator that is not known, with why, or which one of its name is registered elsewhere."""
    if _QUANTIZED.fullmatch(op):
        return f"{op} {_WHY_QUANTIZED}"
    near = [name for name in OWN if name.rpartition("::")[2] == op.rpartition("::")[2] and name != op]
    return f"{op}, not {near[0]}, which is registered" if near else op


def counted(nodes: Iterable[OnnxNode]) -> Mapping[str, int]:
    """Return registered operator -> how many nodes have it, those of branches and loops too."""
    return Counter(node.op for node in every_node(nodes) if node.op in OWN)


def digests(nodes: Iterable[OnnxNode]) -> dict[str, str]:
    """Return registered operator -> digest of its function, of those that nodes have."""
    return {name: OWN[name].digest for name in sorted(counted(nodes))}


def lower_own(ctx: Context) -> Sequence[Operand]:
    """Let the function that was registered add the nodes of the context's node; returns its outputs.

    Raises ModelError if operands, attributes or outputs are not those that the function takes or gives.
    """
    own, node = OWN[ctx.node.op], ctx.node
    for name, value in node.attrs.items():
        if value is None or isinstance(value, Body):
            ctx.refuse(f"attribute {shown(name)}, which is of a kind that is not read")
    given = [ctx.value(index) if ctx.has(index) else None for index in range(len(node.inputs))]
    given += [None] * (len(own.operands) - len(given))
    _check(own, given, node)
    try:
        made = own.function(ctx.build, *given, **node.attrs)
    except OocdlError:
        raise
    except Exception as error:
        raise ModelError(f"its function failed: {type(error).__name__}: {error}") from error
    results = [made] if isinstance(made, str) else made
    if not isinstance(results, tuple | list) or not all(
        isinstance(value, str) and value in ctx.build.values for value in results
    ):
        raise ModelError(f"its function gave {made!r}, which are not names of values")
    wanted = max((index + 1 for index, name in enumerate(node.outputs) if name), default=0)
    if len(results) < wanted:
        raise ModelError(f"its function gave {len(results)} results, but the node has {wanted} outputs")
    return list(results)


def _check(own: OwnOperator, given: Sequence[str | None], node: OnnxNode) -> None:
    """Raise ModelError if a function does not take what a node has."""
    if len(given) > len(own.operands) and not own.more_operands:
        raise ModelError(f"it has {len(given)} inputs, but its function takes {len(own.operands)}")
    for index, slot in enumerate(own.operands):
        if given[index] is None and slot.default is slot.empty:
            raise ModelError(f"input {index} is missing, which its function takes as '{slot.name}'")
    names = {p.name for p in own.attributes}
    missing = [p.name for p in own.attributes if p.default is p.empty and p.name not in node.attrs]
    if missing:
        raise ModelError(f"the attribute '{missing[0]}' is missing, which its function takes")
    others = [name for name in node.attrs if name not in names]
    if others and not own.more_attributes:
        raise ModelError(f"it has the attribute {shown(others[0])}, which its function does not take")
