"""Formulas of elementwise operators: expressions over primitive operators, from which all else is derived.

A formula is a function of attributes and operands, written as mathematics is::

    lambda attrs, x: where(x > 0.0, x, attrs["alpha"] * expm1(x))

It is called once with terms, which record what is computed, as ``steps``. Engines, the builder of graphs and
the writer of loops then compute the steps each with primitives of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Term:
    """The result of a primitive operator; an operand of the formula where ``op`` is empty."""

    op: str
    args: tuple[Term | float, ...] = ()

    def __add__(self, other: Term | float) -> Term:
        return Term("Add", (self, other))

    def __sub__(self, other: Term | float) -> Term:
        return Term("Sub", (self, other))

    def __rsub__(self, other: float) -> Term:
        return Term("Sub", (other, self))

    def __mul__(self, other: Term | float) -> Term:
        return Term("Mul", (self, other))

    def __neg__(self) -> Term:
        return Term("Neg", (self,))

    def __gt__(self, other: float) -> Term:
        return Term("Greater", (self, other))

    def __lt__(self, other: float) -> Term:
        return Term("Less", (self, other))

    def __le__(self, other: float) -> Term:
        return Term("LessOrEqual", (self, other))


Formula = Callable[..., Term]
"""(attributes, operands) -> result."""


def _primitive(op: str) -> Callable[..., Term]:
    return lambda *args: Term(op, args)


where, minimum = _primitive("Where"), _primitive("Min")
exp, expm1, erf = _primitive("Exp"), _primitive("Expm1"), _primitive("Erf")
tanh, sigmoid = _primitive("Tanh"), _primitive("Sigmoid")

AUXILIARY = {"Expm1": "Exp", "LessOrEqual": "Less"}
"""Primitives that are no operators -> the operators that they cost as much as. The gradient of a formula with
one is given, not derived."""


@dataclass(frozen=True)
class Step:
    """A primitive operator on numbers, and on values: first the operands, then the results of the steps."""

    op: str
    args: tuple[int | float, ...]
    """A value by its place, an ``int``; a number is a ``float``."""
    dying: tuple[int, ...]
    """Values that no later step reads."""


Steps = tuple[Step, ...]


def steps_of(formula: Formula, attrs: Mapping[str, Any], arity: int) -> Steps:
    """Return the steps of a formula, each once, in the order in which they are written.

    >>> steps_of(lambda attrs, dy, y: dy * (y * (1.0 - y)), {}, 2)[0]
    Step(op='Sub', args=(1.0, 1), dying=())
    """
    operands = [Term("") for _ in range(arity)]
    places: dict[Term, int] = {operand: place for place, operand in enumerate(operands)}
    steps: list[tuple[str, tuple[int | float, ...]]] = []

    def visit(term: Term | float) -> int | float:
        if not isinstance(term, Term):
            return float(term)
        if term not in places:
            steps.append((term.op, tuple(visit(arg) for arg in term.args)))
            places[term] = len(places)
        return places[term]

    visit(formula(attrs, *operands))
    last = {arg: at for at, (_, args) in enumerate(steps) for arg in args if isinstance(arg, int)}
    return tuple(
        Step(op, args, tuple(value for value, end in last.items() if end == at))
        for at, (op, args) in enumerate(steps)
    )


def compute(steps: Steps, operands: Sequence[T], apply: Callable[[str, list[T | float]], T]) -> T:
    """Return the result of the steps, each computed by ``apply(op, arguments)``; values go when they end."""
    values = dict(enumerate(operands))
    for place, step in enumerate(steps, len(operands)):
        values[place] = apply(step.op, [values[a] if isinstance(a, int) else a for a in step.args])
        for dead in step.dying:
            del values[dead]
    return values[len(operands) + len(steps) - 1]


def most_alive(steps: Steps, arity: int) -> int:
    """Return how many results of steps exist at once, at most.

    >>> most_alive(steps_of(lambda attrs, dy, y: dy * (y * (1.0 - y)), {}, 2), 2)
    2
    """
    alive = most = 0
    for step in steps:
        alive += 1
        most = max(most, alive)
        alive -= sum(value >= arity for value in step.dying)
    return most
