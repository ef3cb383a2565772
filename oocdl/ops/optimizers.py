"""Optimizers, each a frozen record of its settings, as ``torch.optim``; ``update_rules`` has their nodes.

Numbers that change with the step are values of role SCALAR, whose contents ``scalars`` gives. State begins as
zeros, or as the number that a user's own optimizer has named. With g the gradient, after clipping:

    SGD    b' = m b + (1 - dampening) g;  w' = w - lr (nesterov: g + m b', else b')
    Adam   e' = e + (1 - b1)(g - e);  s' = b2 s + (1 - b2) g^2
           w' = w - lr / (1 - b1^t) e' / (sqrt(s') / sqrt(1 - b2^t) + eps)
           (Kingma & Ba 2015, arXiv:1412.6980)
    AdamW  w decays by lr * weight_decay first (Loshchilov & Hutter 2019, arXiv:1711.05101);
           SGD, Adam and RMSprop add weight_decay * w to g instead
    RMSprop  s' = a s + (1 - a) g^2;  centered: also g0' = g0 + (1 - a)(g - g0), and s' - g0'^2 for s' below
             d = g / (sqrt(s') + eps);  momentum: b' = m b + d, and b' for d;  w' = w - lr d
             (Tieleman & Hinton 2012; Graves 2013, arXiv:1308.0850)
    Lion   w decays as in AdamW;  w' = w - lr sign(e + (1 - b1)(g - e));  e' = e + (1 - b2)(g - e)
           (Chen et al. 2023, arXiv:2302.06675)
    LAMB   u = Adam's step over lr, plus weight_decay * w;  w' = w - lr |w| / |u| u
           (You et al. 2020, arXiv:1904.00962)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.schedules import Rate, rate

Update = Callable[[Builder, str, str, Mapping[str, str], Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(builder, weight, gradient, state by kind, scalars by name) -> (new weight, new state by kind), all but the
builder names of values. Weight, gradient and state have one shape and dtype, scalars the shape ()."""


class _Checked:
    """An optimizer, whose fields are checked.

    ``clip_norm`` is the largest allowed norm of all gradients together, ``clip_value`` the largest absolute
    value of an element of a gradient; only one of them goes.
    """

    def __post_init__(self) -> None:
        given: Any = self
        for name in ("lr", "weight_decay", "eps"):
            number = getattr(self, name, 0.0)
            if not callable(number) and number < 0:
                raise InputError(f"{name} must not be negative, not {number}")
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise InputError(f"{name} must be positive, not {limit}")
        if given.clip_norm is not None and given.clip_value is not None:
            raise InputError("gradients are clipped by clip_norm or by clip_value, not by both; choose one")
        if hasattr(given, "betas"):
            object.__setattr__(self, "betas", tuple(given.betas))
            if len(given.betas) != 2 or not all(0 <= beta < 1 for beta in given.betas):
                raise InputError(f"betas must be two numbers in [0, 1), not {given.betas}")


@dataclass(frozen=True)
class SGD(_Checked):
    """Stochastic gradient descent."""

    lr: Rate = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum < 0:
            raise InputError(f"momentum must not be negative, not {self.momentum}")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InputError("nesterov needs a positive momentum and no dampening")


@dataclass(frozen=True)
class Adam(_Checked):
    """Adam, with L2 weight decay."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_value: float | None = None


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with decoupled weight decay."""

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class LAMB(Adam):
    """Adam whose step of each weight is as long as the weight, times the learning rate: for large batches.

    As in Apex and timm, a weight that does not decay is stepped as by Adam, unless ``always_adapt``. Neither
    clips here: timm's default is ``clip_norm=1.0``.
    """

    eps: float = 1e-6
    weight_decay: float = 1e-2
    always_adapt: bool = False


@dataclass(frozen=True)
class RMSprop(_Checked):
    """``torch.optim.RMSprop``; its ``alpha`` is the decay of the mean of squares."""

    lr: Rate = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    """Divide by the standard deviation of the gradient instead of by its root mean square."""
    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum < 0 or not 0 <= self.alpha <= 1:
            raise InputError(f"rmsprop takes momentum of at least 0 and alpha in [0, 1], not {self}")


@dataclass(frozen=True)
class Lion(_Checked):
    """Steps by the sign of a moving average, with decoupled weight decay: one state a weight."""

    lr: Rate = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    clip_norm: float | None = None
    clip_value: float | None = None


@dataclass(frozen=True)
class Known:
    """An update rule as ``register`` was given it."""

    update: Update
    digest: str
    state: tuple[tuple[str, float], ...]
    """Kind of state -> the number that all its elements start as."""


KNOWN: dict[str, Known] = {}


def known_rule(name: str) -> Known:
    """Return a registered update rule. Raises InputError if there is none of this name."""
    if name not in KNOWN:
        way_out = "import what registers it with oocdl.optim.register first"
        raise InputError(f"the optimizer '{name}' is not known here: {way_out}")
    return KNOWN[name]


@dataclass(frozen=True)
class Own(_Checked):
    """An optimizer that was registered under a name (``oocdl.optim.register``)."""

    name: str
    lr: Rate = 1e-3
    clip_norm: float | None = None
    clip_value: float | None = None
    state: tuple[tuple[str, float], ...] = field(init=False)
    """Kind of state -> the number that it starts as, as registered."""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        registered = known_rule(self.name)
        object.__setattr__(self, "state", registered.state)
        object.__setattr__(self, "digest", registered.digest)


Optimizer = SGD | Adam | RMSprop | Lion | Own
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD, "adam": Adam, "adamw": AdamW, "rmsprop": RMSprop, "lion": Lion, "lamb": LAMB,
}  # fmt: skip
"""All optimizers that there are, by the names that ``fit(optimizer=...)`` takes; called with ``lr``."""


def register(name: str, state: Mapping[str, float] | None = None) -> Callable[[Update], Update]:
    """Return a decorator that makes a function an optimizer of this name, for ``fit(optimizer=name)``.

    The function is called for each weight that has a gradient, with a builder and names of values: the
    weight, its gradient, a mapping of its state and one of scalars. State is what ``state`` names, each of
    the weight's shape, with the number that it starts as. Scalars, of shape (), are ``lr``, the learning
    rate, and ``step``, the number of this update from 1. All are in the weight's dtype. The function adds
    nodes (``build("Mul", x, y)``; ``docs/reference/operators.md`` lists them) and returns the new weight and
    a mapping of the new state. A weight that the loss does not depend on stays as it is, as PyTorch skips
    one without a gradient. ``Own(name, lr=Cosine(0.1, 90), clip_norm=1.0)`` has a schedule and clipping.

    A run notes a digest of the function: a resume without it, or with another, is refused. Workers of a
    client need not have it. Raises InputError for a name that is taken. For example::

        @oocdl.optim.register("momentum", state={"speed": 0.0})
        def momentum(build, weight, gradient, state, scalars):
            kept = build("Mul", state["speed"], build.like(0.9, weight))
            speed = build("Add", kept, gradient)
            return build("Sub", weight, build("Mul", speed, scalars["lr"])), {"speed": speed}
    """

    def decorate(update: Update) -> Update:
        if isinstance(OPTIMIZERS.get(name.lower()), type):  # those of oocdl are classes
            raise InputError(f"there is an optimizer '{name}' already; give yours another name")
        for kind in state or {}:
            if not kind.isidentifier():
                why = "name it as a variable of Python"
                raise InputError(f"the optimizer '{name}' has a state '{kind}'; {why}")
            if kind == AVERAGE:
                raise InputError(f"the optimizer '{name}' has a state '{kind}', which ema= keeps; rename it")
        starts = tuple((kind, float(number)) for kind, number in sorted((state or {}).items()))
        KNOWN[name] = Known(update, digest_of(update), starts)
        OPTIMIZERS[name] = partial(Own, name)
        return update

    return decorate


STEP = "own/step"
"""The SCALAR of a user's own optimizer that counts updates from 1."""


PRIME = "'"
"""Ends the name of a SCALAR where it would be that of a tensor of the file."""


AVERAGE = "ema"
"""Kind of the state that is the moving average of a weight."""


def average_of(weight: str) -> str:
    """Return the name of the state that holds the exponential moving average of a weight (``ema=``).

    A run has it for each weight that its steps change. The average of any other weight is the weight itself.

    >>> average_of("encoder.0.weight")
    'encoder.0.weight/ema'
    """
    return f"{weight}/{AVERAGE}"


def start_of(optimizer: Optimizer, name: str) -> float | str:
    """Return the number that all elements of a state start as; of an average, the weight it starts as."""
    weight, _, kind = name.rpartition("/")
    if kind == AVERAGE:
        return weight
    kinds = dict(optimizer.state) if isinstance(optimizer, Own) else {}
    return kinds.get(kind, 0.0)


def scalars(optimizer: Optimizer, step: int) -> dict[str, float]:
    """Return the contents of the SCALAR values at a step, counted from 0."""
    found = {"lr": rate(optimizer.lr, step)}
    if isinstance(optimizer, Adam):
        first, second = (1 - beta ** (step + 1) for beta in optimizer.betas)
        found.update({"adam/bias1": first, "adam/bias2": sqrt(second)})
    elif isinstance(optimizer, Own):
        found[STEP] = step + 1.0
    elif isinstance(optimizer, SGD) and optimizer.momentum and optimizer.dampening:
        # PyTorch starts the buffer as the whole first gradient.
        found["sgd/undamped"] = 1 - optimizer.dampening if step else 1.0
    return found
