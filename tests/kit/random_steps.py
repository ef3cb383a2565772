"""What random graphs are made of: elementwise operators, reductions, norms, products, moves."""

from __future__ import annotations

from string import ascii_lowercase

from tests.kit.interpret import ACTIVATIONS
from tests.kit.random_graphs import Maker


def pointwise(m: Maker, x: str) -> str:
    """A function of any number."""
    op = m.one("Neg", "Sigmoid", "Tanh", "Softplus", "Identity", "Abs", *ACTIVATIONS)
    return m.build(op, x, **m.one(*ACTIVATIONS[op][0]) if op in ACTIVATIONS else {})


def function(m: Maker, x: str) -> str:
    """A function that has a domain, of what lies in it."""
    b, kind = m.build, m.one("any", "any", "small", "part", "positive")
    if kind == "any":
        return b(m.one("Sin", "Cos", "Atan", "Asinh", "Erf"), x)
    if kind == "small":
        return b(m.one("Exp", "Sinh", "Cosh", "Tan"), b("Tanh", x))
    if kind == "part":
        return b(m.one("Asin", "Acos", "Atanh"), b("Mul", b("Tanh", x), b.like(0.9, x)))
    return b(m.one("Sqrt", "Log", "Reciprocal", "Acosh"), m.positive(x, 1.5))


def binary(m: Maker, x: str) -> str:
    """Two of equal shape, or a weight that is broadcast."""
    others = m.same(x)
    if m.flip() and len(others) > 1:
        return m.build(m.one("Add", "Sub", "Mul"), x, m.one(*others))
    op = m.one("Add", "Sub", "Mul", "Max", "Min", "Div", "Pow")
    other = m.thin(x)
    if op == "Div":
        return m.build(op, x, m.positive(other, 0.5))
    if op == "Pow":
        return m.build(op, m.positive(m.build("Tanh", x), 0.5), other)
    first, second = (x, other) if m.flip() else (other, x)
    return m.build(op, first, second)


def jump(m: Maker, x: str) -> str:
    """What jumps, at places that rounding does not reach."""
    op, apart = m.one("Floor", "Round", "Mod"), m.apart(x)
    if op != "Mod":
        return m.build("Mul", x, m.build(op, apart))
    return m.build(op, apart, m.positive(m.thin(x), 0.7), fmod=m.one(0, 1))


def choice(m: Maker, x: str) -> str:
    """A Where, or a factor of 0 and 1, by comparisons."""
    b = m.build
    flags = b(m.one("Greater", "Less"), m.apart(x), m.thin(x))
    if m.flip():
        same = b("Equal", b("Floor", m.apart(x)), b("Round", m.apart(m.one(*m.same(x)))))
        flags = b(m.one("And", "Or"), b("Not", flags), same)
    if m.flip():
        return b("Where", flags, x, m.thin(x)) if m.flip() else b("Where", flags, m.thin(x), x)
    return b("Mul", x, b("Cast", flags, to="float64"))


def dropout(m: Maker, x: str) -> str:
    """By given uniform numbers."""
    return m.build("Dropout", x, m.given(m.random.uniform(size=m.shape(x))), ratio=0.4)


def softmax(m: Maker, x: str) -> str:
    """Softmax, or its logarithm."""
    return m.build(m.one("Softmax", "LogSoftmax"), x, axis=m.axis(x))


def reduce(m: Maker, x: str) -> str:
    """A reduction, which may come back to what it is of."""
    op = m.one("ReduceSum", "LogSumExp", "ReduceMax")
    y = m.build(op, m.apart(x) if op == "ReduceMax" else x, axes=m.axes(x))
    return m.build(m.one("Add", "Mul"), x, y) if m.flip() else y


def norm(m: Maker, x: str) -> str:
    """A norm over any axes; or one moment."""
    axes = m.axes(x)
    mean, var = m.build.node("Moments", (x,), {"axes": axes})
    if not m.integer(0, 3):
        return m.build("Add", x, m.one(mean, var))
    return m.build("Normalize", x, mean, var, axes=axes, eps=1e-2)


def einsum(m: Maker, x: str) -> str:
    """Contract an axis with a matrix, or two values of equal shape with each other."""
    shape = m.shape(x)
    mine = ascii_lowercase[: len(shape)]
    axis = m.axis(x)
    if m.integer(0, 2):
        other, theirs = m.weight(shape[axis], m.integer(1, 4)), mine[axis] + "z"
        out = mine.replace(mine[axis], "z")
    else:
        other, theirs = m.one(*m.same(x)), mine.replace(mine[axis], "z")
        out = mine.replace(m.one(*mine), "") + "z"
    if m.flip():
        out = "".join(m.order(out))
    return m.build("Einsum", x, other, equation=f"{mine},{theirs}->{out}")


def concat(m: Maker, x: str) -> str:
    """With others that fit, or with itself."""
    mine, axis = m.shape(x), m.axis(x)

    def fits(name: str) -> bool:
        shape = m.shape(name)
        return len(shape) == len(mine) and (*shape[:axis], *shape[axis + 1 :]) == (
            *mine[:axis],
            *mine[axis + 1 :],
        )

    parts = [m.one(*filter(fits, m.pool)) for _ in range(m.integer(0, 2))]
    parts.insert(m.integer(0, len(parts)), x)
    return m.build("Concat", *parts, axis=axis)


def move(m: Maker, x: str) -> str | None:
    """What only moves elements."""
    shape, axis = m.shape(x), m.axis(x)
    kind = m.one("Transpose", "Slice", "Pad", "Split", "Expand", "Reverse")
    if kind == "Transpose":
        return m.build(kind, x, perm=m.order(range(len(shape))))
    if kind == "Reverse":
        return m.build(kind, x, axis=axis)
    if kind == "Slice":
        start = m.integer(0, shape[axis] - 1)
        stop, step = m.integer(start + 1, shape[axis]), m.integer(1, 3)
        return m.build(kind, x, axis=axis, start=start, stop=stop, step=step)
    if kind == "Pad":
        return m.build(kind, x, axis=axis, before=m.integer(0, 3), after=m.integer(0, 3))
    if kind == "Expand":
        wide = tuple(m.integer(1, 4) if extent == 1 else extent for extent in shape)
        return m.build(kind, x, shape=(*(2,) * m.integer(0, 1), *wide))
    if shape[axis] < 2:
        return None
    first = m.integer(1, shape[axis] - 1)
    parts = m.build.node(kind, (x,), {"axis": axis, "sizes": (first, shape[axis] - first)})
    m.pool.append(parts[0])
    return parts[1]


def reshape(m: Maker, x: str) -> str:
    """Merge two neighbours, or split an axis, or add one of extent one."""
    shape = list(m.shape(x))
    axis, kind = m.axis(x), m.one("merge", "split", "one", "other")
    if kind == "merge" and len(shape) > 1:
        axis = min(axis, len(shape) - 2)
        shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    elif kind == "split":
        inner = m.one(*(d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0))
        shape[axis : axis + 1] = [shape[axis] // inner, inner]
    elif kind == "other":
        shape = list(m.order(shape))
    else:
        shape.insert(axis, 1)
    return m.build("Reshape", x, shape=tuple(shape))


STEPS = (
    *(pointwise, function, binary, jump, choice, dropout, softmax, reduce),
    *(norm, einsum, concat, move, reshape),
)
"""Steps on values of any shape."""
