"""Reverse accumulation: appends gradient nodes over whole tensors to the graph.

Every operator's gradient rule returns nodes (as in JAX and tinygrad). This transform decides which
nodes are visited, checks the gradients they return, and sums the gradients of a value that several
nodes read, in a fixed order: that of its readers, last first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from oocdl.errors import ModelError
from oocdl.graph.ir.graph import Node, Role, is_float, renamed
from oocdl.graph.ir.op_rule import Builder


def differentiate(build: Builder, loss: str, wrt: Sequence[str]) -> dict[str, str]:
    """Add the gradients of the scalar ``loss`` with respect to the values ``wrt``; returns name -> name.

    The gradient of a value ``x`` is named ``grad/x`` where it is a value of its own (it may be
    another value's gradient too, as behind an Add). What the loss does not depend on has none.
    Raises ModelError if the loss is no floating-point scalar, or a value is not floating-point.
    """
    if build.shape(loss) != () or not is_float(build.dtype(loss)):
        raise ModelError(
            f"loss '{loss}' must be one floating-point number, not {build.dtype(loss)} "
            f"of shape {list(build.shape(loss))}"
        )
    forward, count = tuple(build.nodes), len(build.nodes)
    role, scope = build.role, build.scope
    build.role, build.scope = Role.GRADIENT, "grad/"
    try:
        reached = _reached(build, forward, wrt)
        parts: dict[str, list[str]] = {}
        if loss in reached:
            parts[loss] = [build.constant(1.0, build.dtype(loss), stem="seed")]
        total: dict[str, str] = {}
        for node in reversed(forward):
            grads = [_total(build, name, parts, total) for name in node.outputs]
            if any(grads) and any(name in reached for name in node.inputs):
                for name, grad in _visit(build, node, grads):
                    if name in reached:
                        parts.setdefault(name, []).append(grad)
        gradients = {name: _total(build, name, parts, total) for name in wrt}
        answer = {name: grad for name, grad in gradients.items() if grad is not None}
    finally:
        build.role, build.scope = role, scope
    names = _rename(build, count, {**answer, **total})
    return {name: names.get(grad, grad) for name, grad in answer.items()}


def _reached(build: Builder, nodes: Iterable[Node], wrt: Sequence[str]) -> set[str]:
    """Return the floating-point values that depend on ``wrt``."""
    for name in wrt:
        if name not in build.values or not is_float(build.dtype(name)):
            raise ModelError(f"'{name}' can have no gradient: it is not a floating-point value")
    reached = set(wrt)
    for node in nodes:
        if any(name in reached for name in node.inputs):
            reached.update(name for name in node.outputs if is_float(build.dtype(name)))
    return reached


def _total(build: Builder, name: str, found: dict[str, list[str]], total: dict[str, str]) -> str | None:
    """Return the sum of the gradients found for ``name``, which is made once; None if there are none."""
    if name not in total and name in found:
        first, *others = found[name]
        for other in others:
            first = build("Add", first, other)
        total[name] = first
    return total.get(name)


def _visit(build: Builder, node: Node, grads: Sequence[str | None]) -> list[tuple[str, str]]:
    """Return (input, gradient), checked, for each input of ``node`` that gets a gradient."""
    gradients = build.rules[node.op].gradient(build, node, *grads)
    if len(gradients) != len(node.inputs):
        raise ModelError(
            f"node '{node.name}' ({node.op}): its gradient rule returns {len(gradients)} gradients "
            f"for {len(node.inputs)} inputs"
        )
    pairs = []
    for name, grad in zip(node.inputs, gradients, strict=True):
        if grad is None or not is_float(build.dtype(name)):
            continue
        value, other = build.values[name], build.values[grad]
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            raise ModelError(
                f"node '{node.name}' ({node.op}): the gradient of '{name}' is {other.dtype} "
                f"{list(other.shape)}, the value is {value.dtype} {list(value.shape)}"
            )
        pairs.append((name, grad))
    return pairs


def _rename(build: Builder, start: int, total: dict[str, str]) -> dict[str, str]:
    """Name the gradient of ``x`` ``grad/x`` in the nodes from ``start`` on; returns old -> new name."""
    computed = {name for node in build.nodes[start:] for name in node.outputs}
    taken = set(build.values) - computed
    names: dict[str, str] = {}
    for name, grad in total.items():
        wanted = f"grad/{name}"
        if grad in computed and grad not in names and wanted not in taken:
            names[grad] = wanted
            taken.add(wanted)
    for old in computed - names.keys():
        # A working name that is now the name of another value's gradient.
        if old in taken:
            names[old] = _free(f"{old}.", taken, computed)
            taken.add(names[old])
    build.nodes[start:] = [renamed(node, names) for node in build.nodes[start:]]
    build.makers |= {name: node for node in build.nodes[start:] for name in node.outputs}
    build.values = {
        names.get(name, name): replace(value, name=names[name]) if name in names else value
        for name, value in build.values.items()
    }
    return names


def _free(stem: str, *taken: set[str]) -> str:
    count = 1
    while any(f"{stem}{count}" in names for names in taken):
        count += 1
    return f"{stem}{count}"
