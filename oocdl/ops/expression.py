"""Formulas of elementwise operators: expressions over primitive operators, from which all else is derived.

A formula is a function of attributes and operands, written as mathematics is::

    lambda attrs, x: where(x > 0.0, x, attrs["alpha"] * expm1(x))

It is called with terms, which record what is computed, as ``steps``: engines and the writer of loops then
compute these, each with primitives of their own. Called with values of a graph (``lift``) it adds nodes, as
gradients, losses and updates do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol, Self, TypeVar

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.op_rule import Builder

T = TypeVar("T")
X = TypeVar("X", bound="Term")


def _binary(op: str) -> Callable[[X, X | float], X]:
    return lambda term, other: apply(op, term, other)


@dataclass(eq=False, slots=True)
class Term:
    """The result of a primitive operator; an operand of the formula where ``op`` is empty."""

    op: str = ""
    args: tuple[Any, ...] = ()

    def made(self, op: str, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Return the result of an operator, of whose arguments this is one."""
        return Term(op, args)

    __add__, __sub__, __mul__, __truediv__ = _binary("Add"), _binary("Sub"), _binary("Mul"), _binary("Div")
    __gt__, __lt__, __le__ = _binary("Greater"), _binary("Less"), _binary("LessOrEqual")

    def __rsub__(self, other: float) -> Self:
        return apply("Sub", other, self)

    def __neg__(self) -> Self:
        return apply("Neg", self)


def apply(op: str, *args: X | float, **attrs: Any) -> X:
    """Return the result of an operator on operands and numbers."""
    result: X = next(arg for arg in args if isinstance(arg, Term)).made(op, args, attrs)
    return result


class Primitive(Protocol):
    """A primitive operator, as a function of operands and numbers."""

    def __call__(self, *args: X | float) -> X: ...


def _primitive(op: str) -> Primitive:
    return partial(apply, op)


Formula = Callable[..., Term]
"""(attributes, operands) -> result."""
Cell = Callable[..., tuple[Term, ...]]
"""The same of several results, which are computed together."""
where, minimum, equal = _primitive("Where"), _primitive("Min"), _primitive("Equal")
exp, expm1, log, sqrt = _primitive("Exp"), _primitive("Expm1"), _primitive("Log"), _primitive("Sqrt")
erf, tanh, sigmoid, softplus = map(_primitive, ("Erf", "Tanh", "Sigmoid", "Softplus"))


@dataclass(eq=False, slots=True)
class Lifted(Term):
    """A value of a graph, to which operators add nodes."""

    build: Builder = field(kw_only=True)
    name: str = field(kw_only=True)
    like: str = field(default="", kw_only=True)
    """The value whose dtype numbers take; none: the value itself."""
    numbers: dict[float, str] | None = field(default=None, kw_only=True)
    """Number -> its constant; None: a number is a new constant wherever it occurs."""

    @property
    def dtype(self) -> str:
        return self.build.dtype(self.name)

    @property
    def shape(self) -> Shape:
        return self.build.shape(self.name)

    def made(self, op: str, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Lifted:
        names = [arg.name if isinstance(arg, Lifted) else self.number(arg).name for arg in args]
        return self.to(self.build(op, *names, **attrs))

    def number(self, number: Any) -> Lifted:
        if self.numbers is None:
            return self.to(self.build.like(number, self.like or self.name))
        if number not in self.numbers:
            self.numbers[number] = self.build.like(number, self.like)
        return self.to(self.numbers[number])

    def to(self, name: str) -> Lifted:
        """Return another value of the graph."""
        return Lifted(build=self.build, name=name, like=self.like, numbers=self.numbers)

    def cast(self, dtype: str) -> Lifted:
        """Return the value in a dtype, with a Cast where it has another."""
        return self if self.dtype == dtype else self.to(self.build("Cast", self.name, to=dtype))

    def summed(self, axes: tuple[int, ...]) -> Lifted:
        """Return the sum over some axes, which stay with extent one; the value itself if there are none."""
        return apply("ReduceSum", self, axes=axes) if axes else self

    def total(self) -> Lifted:
        """Add the sum of all elements, of shape ()."""
        axes = tuple(range(len(self.shape)))
        return apply("Reshape", self.summed(axes), shape=()) if axes else self

    def mean(self) -> Lifted:
        """Add the mean of all elements, of shape ()."""
        return self.total() / float(prod(self.shape))


def lift(build: Builder, name: str) -> Lifted:
    """Return a value of a graph, for expressions."""
    return Lifted(build=build, name=name)


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
    return steps_of_cell(lambda attrs, *operands: (formula(attrs, *operands),), attrs, arity)[0]


def steps_of_cell(cell: Cell, attrs: Mapping[str, Any], arity: int) -> tuple[Steps, tuple[int, ...]]:
    """Return the steps of a cell, and the values that are its results.

    >>> steps_of_cell(lambda attrs, x, y: (x + y, x * y), {}, 2)[1]
    (2, 3)
    """
    operands = [Term() for _ in range(arity)]
    places: dict[Term, int] = {operand: place for place, operand in enumerate(operands)}
    steps: list[tuple[str, tuple[int | float, ...]]] = []

    def visit(term: Term | float) -> int | float:
        if not isinstance(term, Term):
            return float(term)
        if term not in places:
            steps.append((term.op, tuple(visit(arg) for arg in term.args)))
            places[term] = len(places)
        return places[term]

    results = tuple(int(visit(term)) for term in cell(attrs, *operands))
    last = {arg: at for at, (_, args) in enumerate(steps) for arg in args if isinstance(arg, int)}
    ended = [(value, at) for value, at in last.items() if value not in results]
    dying = [tuple(value for value, end in ended if end == at) for at in range(len(steps))]
    return tuple(Step(*step, dead) for step, dead in zip(steps, dying, strict=True)), results


def compute(steps: Steps, operands: Sequence[T], apply: Callable[[str, list[T | float]], T]) -> T:
    """Return the result of the steps, each computed by ``apply(op, arguments)``; values go when they end."""
    return values_of(steps, operands, apply)[len(operands) + len(steps) - 1]


def values_of(
    steps: Steps, operands: Sequence[T], apply: Callable[[str, list[T | float]], T]
) -> dict[int, T]:
    """Return the values that are left after the steps."""
    values = dict(enumerate(operands))
    for place, step in enumerate(steps, len(operands)):
        values[place] = apply(step.op, [values[a] if isinstance(a, int) else a for a in step.args])
        for dead in step.dying:
            del values[dead]
    return values


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
