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


DETACH = "oocdl::Detach"
"""The operator of ``from_torch`` that passes on what it reads, and no gradient; a function elsewhere."""
OWN: dict[str, OwnOperator] = {}
"""All operators that were registered, by name, with the domain (``audio::Snake``) where it is not ONNX's."""


def own_operator(name: str, function: Compose) -> OwnOperator:
    """Read the parameters of a function; InputError if they cannot be a builder, operands and attributes."""
    digest, slots = digest_of(function), _slots(function)
    if not slots:
        raise InputError(f"the function of operator '{name}' takes no builder")
    for slot in slots:
        if slot.default is not slot.empty and slot.default is not None:
            raise InputError(
                f"the operator '{name}' has an operand '{slot.name}' with a default that is not None; "
                "attributes stand behind a *, as in def f(build, x, *, alpha=1.0)"
            )
    return OwnOperator(function, digest)


def _slots(function: Compose) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind in _SLOTS]


_QUANTIZED = re.compile(r"(com\.microsoft::)?(\w*[Qq]uantizeLinear|QLinear\w+|QGemm|(Conv|MatMul)Integer)")
_WHY_QUANTIZED = (
    "of a quantized network: rounded weights have no gradient to be trained by; "
    "train the network as it was before, and quantize what run.export writes"
)
_WHY_FUSED = "of ONNX Runtime, whose optimizer fuses nodes: give the file that it was made of"


def not_known(op: str) -> str:
    """Return an operator that is not known, with why, or which one of its name is registered elsewhere."""
    if _QUANTIZED.fullmatch(op):
        return f"{op} {_WHY_QUANTIZED}"
    near = [name for name in OWN if name.rpartition("::")[2] == op.rpartition("::")[2] and name != op]
    fused = f"{op} {_WHY_FUSED}" if op.startswith("com.microsoft") else op
    return f"{op}, not {near[0]}, which is registered" if near else fused


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
    _check(own.function, given, node)
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


def _check(function: Compose, given: Sequence[str | None], node: OnnxNode) -> None:
    try:
        bound = inspect.signature(function).bind(None, *given, **node.attrs).arguments
    except TypeError as error:
        raise ModelError(f"its function does not take what it has: {error}") from None
    for slot in _slots(function)[1:]:
        if slot.name in node.attrs:
            raise ModelError(f"it has an attribute '{slot.name}', which its function takes as an operand")
        if slot.default is slot.empty and bound[slot.name] is None:
            raise ModelError(f"its operand '{slot.name}' is left out, which its function takes")
