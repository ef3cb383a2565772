"""Optimizers that a user writes of nodes, known by name and by their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.op_rule import Builder

Update = Callable[[Builder, str, str, Mapping[str, str], Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(builder, weight, gradient, state by kind, scalars by name) -> (new weight, new state by kind), all but the
builder names of values. Weight, gradient and state have one shape and dtype, scalars the shape ()."""


@dataclass(frozen=True)
class Known:
    """What ``register`` was given."""

    update: Update
    digest: str
    """Digest of the update's text."""
    state: tuple[tuple[str, float], ...]
    """Kind of state -> the number that all its elements start as."""


KNOWN: dict[str, Known] = {}
"""What was registered, by name."""


def keep(name: str, update: Update, state: Mapping[str, float]) -> None:
    """Keep an update under a name, in the place of one that was registered before."""
    for kind in state:
        if not kind.isidentifier():
            raise InputError(f"the optimizer '{name}' has a state '{kind}'; name it as a variable of Python")
    starts = tuple((kind, float(number)) for kind, number in sorted(state.items()))
    KNOWN[name] = Known(update, digest_of(update), starts)


def known(name: str) -> Known:
    """Return what was registered under a name; InputError if nothing was."""
    if name not in KNOWN:
        raise InputError(
            f"the optimizer '{name}' is not known here: import what registers it with "
            "oocdl.optim.register first"
        )
    return KNOWN[name]


def own_updates(
    build: Builder, name: str, weight: str, grad: str, state: Mapping[str, str], scalars: Mapping[str, str]
) -> dict[str, str]:
    """Append the update of one weight; returns what replaces it and its state, what stays left out.

    InputError if the function gives other state than was registered, or values of other shapes.
    """
    made = known(name).update(build, weight, grad, state, scalars)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
        raise InputError(
            f"the optimizer '{name}' has to return (new weight, new state by kind), not {made!r}"
        )
    new, after = made
    if set(after) != set(state):
        raise InputError(
            f"the optimizer '{name}' returned state {sorted(after)}, but was registered with {sorted(state)}"
        )
    found = {weight: new} | {state[kind]: value for kind, value in after.items()}
    return {
        old: _made(build, name, old, value, f"{weight}/next" if old == weight else f"{old}/next")
        for old, value in found.items()
        if value != old
    }


def _made(build: Builder, name: str, old: str, new: str, label: str) -> str:
    """Return a value of a node that may replace another; InputError for another shape or dtype."""
    if new not in build.values:
        raise InputError(f"the optimizer '{name}' gave {new!r} for '{old}', which is no value")
    specs = [(build.shape(value), build.dtype(value)) for value in (new, old)]
    if specs[0] != specs[1]:
        shown = [f"{dtype} {list(shape)}" for shape, dtype in specs]
        raise InputError(f"the optimizer '{name}' gave {shown[0]} for '{old}', which is {shown[1]}")
    # Less zero is the same to the last bit, and is a node, also where the value turns out to be a copy.
    return build.node("Sub", (new, build.like(0.0, new)), names=[label], label=label)[0]
