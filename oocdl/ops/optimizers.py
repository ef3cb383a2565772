"""Optimizers as nodes: elementwise updates of weights and state, exactly as ``torch.optim``.

Each is a frozen record of its settings. ``add_updates`` appends the nodes; numbers that change with
the step are values of role SCALAR, whose contents ``scalars`` gives. State begins as zeros, or as the number
that a user's own optimizer has named.

    SGD    b' = m b + (1 - dampening) g;  w' = w - lr (nesterov: g + m b', else b')
    Adam   e' = e + (1 - b1)(g - e);  s' = b2 s + (1 - b2) g^2
           w' = w - lr / (1 - b1^t) e' / (sqrt(s') / sqrt(1 - b2^t) + eps)
           (Kingma & Ba 2015, arXiv:1412.6980)
    AdamW  w decays by lr * weight_decay first (Loshchilov & Hutter 2019, arXiv:1711.05101);
           SGD and Adam add weight_decay * w to g instead
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt

from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.own_loss import in_dtype_of, sum_of, total_of
from oocdl.ops.schedules import Rate, rate

Update = Callable[[Builder, str, str, Mapping[str, str], Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(builder, weight, gradient, state by kind, scalars by name) -> (new weight, new state by kind), all but the
builder names of values. Weight, gradient and state have one shape and dtype, scalars the shape ()."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent."""

    lr: Rate = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    clip_norm: float | None = None
    """Largest allowed norm of all gradients together."""

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.clip_norm)
        if self.momentum < 0:
            raise InputError(f"momentum must not be negative, not {self.momentum}")
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise InputError("nesterov needs a positive momentum and no dampening")


@dataclass(frozen=True)
class Adam:
    """Adam, with L2 weight decay."""

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    """Largest allowed norm of all gradients together."""

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay, self.clip_norm)
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must be two numbers in [0, 1), not {self.betas}")
        if self.eps < 0:
            raise InputError(f"eps must not be negative, not {self.eps}")


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with decoupled weight decay."""

    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Known:
    """An update rule as ``register`` was given it."""

    update: Update
    digest: str
    """Digest of the update's text."""
    state: tuple[tuple[str, float], ...]
    """Kind of state -> the number that all its elements start as."""


KNOWN: dict[str, Known] = {}
"""Name -> registered update rule."""


def _known(name: str) -> Known:
    if name not in KNOWN:
        raise InputError(
            f"the optimizer '{name}' is not known here: import what registers it with "
            "oocdl.optim.register first"
        )
    return KNOWN[name]


@dataclass(frozen=True)
class Own:
    """An optimizer that was registered under a name (``oocdl.optim.register``)."""

    name: str
    lr: Rate = 1e-3
    clip_norm: float | None = None
    """Largest allowed norm of all gradients together."""
    state: tuple[tuple[str, float], ...] = field(init=False)
    """Kind of state -> the number that it starts as, as registered."""
    digest: str = field(init=False)
    """Digest of the function's text, as registered."""

    def __post_init__(self) -> None:
        _check(self.lr, 0.0, self.clip_norm)
        registered = _known(self.name)
        object.__setattr__(self, "state", registered.state)
        object.__setattr__(self, "digest", registered.digest)


Optimizer = SGD | Adam | Own
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
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
        starts = tuple((kind, float(number)) for kind, number in sorted((state or {}).items()))
        KNOWN[name] = Known(update, digest_of(update), starts)
        OPTIMIZERS[name] = partial(Own, name)
        return update

    return decorate


STEP = "own/step"
"""The SCALAR of a user's own optimizer that counts updates from 1."""


def start_of(optimizer: Optimizer, name: str) -> float:
    """Return the number that all elements of a state of this name start as."""
    kinds = dict(optimizer.state) if isinstance(optimizer, Own) else {}
    return kinds.get(name.rpartition("/")[2], 0.0)


def _check(lr: Rate, weight_decay: float, clip_norm: float | None) -> None:
    if not callable(lr) and lr < 0:
        raise InputError(f"lr must not be negative, not {lr}")
    if weight_decay < 0:
        raise InputError(f"weight_decay must not be negative, not {weight_decay}")
    if clip_norm is not None and clip_norm <= 0:
        raise InputError(f"clip_norm must be positive, not {clip_norm}")


def scalars(optimizer: Optimizer, step: int) -> dict[str, float]:
    """Return the contents of the SCALAR values at a step, counted from 0."""
    found = {"lr": rate(optimizer.lr, step)}
    if isinstance(optimizer, Adam):
        first, second = (1 - beta ** (step + 1) for beta in optimizer.betas)
        found.update({"adam/bias1": first, "adam/bias2": sqrt(second)})
    elif isinstance(optimizer, Own):
        found[STEP] = step + 1.0
    elif optimizer.momentum and optimizer.dampening:
        # PyTorch starts the buffer as the whole first gradient.
        found["sgd/undamped"] = 1 - optimizer.dampening if step else 1.0
    return found


def add_updates(
    build: Builder, optimizer: Optimizer, gradients: Mapping[str, str], idle: Collection[str] = ()
) -> None:
    """Append the update of every weight: ``gradients`` maps weight -> gradient.

    ``idle`` weights, whose gradients are zeros because the loss does not depend on them, keep their values:
    they are not decayed either. PyTorch's optimizers skip a parameter whose ``grad`` is None.
    """
    if isinstance(optimizer, Own) and _known(optimizer.name).digest != optimizer.digest:
        raise InputError(f"the optimizer '{optimizer.name}' is another than the run's; register that one")
    role, build.role = build.role, Role.GRADIENT
    try:
        grads = dict(gradients)
        if optimizer.clip_norm is not None and grads:
            grads = _clipped(build, grads, optimizer.clip_norm)
        for weight, grad in grads.items():
            if isinstance(optimizer, Own):
                if weight not in idle:
                    _own(build, optimizer, weight, grad)
                continue
            rule = replace(optimizer, weight_decay=0.0) if weight in idle else optimizer
            if isinstance(rule, Adam):
                build.updates[weight] = _adam(build, rule, weight, grad)
            else:
                build.updates[weight] = _sgd(build, rule, weight, grad)
    finally:
        build.role = role


SHARE = "accumulate/share"
"""The SCALAR by which the loss of a pass counts in its step: one over the number of passes."""


def shared_loss(build: Builder, loss: str) -> str:
    """Add the loss times its share, which is differentiated where a step is several passes."""
    return build("Mul", loss, _scalar(build, SHARE, loss))


def add_sums(build: Builder, gradients: Mapping[str, str]) -> dict[str, str]:
    """Append the sum of each gradient with those of the passes before; returns weight -> sum.

    The sum so far is a value of role SUM, ``<weight>/accumulated``.
    """
    role, build.role = build.role, Role.GRADIENT
    found = {}
    for weight, grad in gradients.items():
        before = build.value(f"{weight}/accumulated", build.shape(weight), build.dtype(weight), Role.SUM)
        found[weight] = _named(build, f"{before}/next", "Add", before, grad)
    build.role = role
    return found


def _scalar(build: Builder, name: str, like: str) -> str:
    """Return the SCALAR value ``name``, which is declared on first use, in the dtype of ``like``."""
    if name not in build.values:
        build.value(name, (), build.dtype(like), Role.SCALAR)
    return in_dtype_of(build, like, name)


def _state(build: Builder, weight: str, kind: str) -> str:
    """Declare a value of the weight's shape that is kept between steps."""
    return build.value(f"{weight}/{kind}", build.shape(weight), build.dtype(weight), Role.STATE)


def _named(build: Builder, name: str, op: str, *inputs: str) -> str:
    return build.node(op, inputs, names=[name], label=name)[0]


def _scaled(build: Builder, value: str, factor: float) -> str:
    return value if factor == 1 else build("Mul", value, build.like(factor, value))


def _clipped(build: Builder, grads: Mapping[str, str], limit: float) -> dict[str, str]:
    """``torch.nn.utils.clip_grad_norm_``: all times ``min(1, limit / (norm + 1e-6))``."""
    squares = (total_of(build, build("Mul", grad, grad)) for grad in grads.values())
    norm = _named(build, "grad/norm", "Sqrt", sum_of(build, squares))
    ratio = build("Div", build.like(limit, norm), build("Add", norm, build.like(1e-6, norm)))
    factor = build("Min", ratio, build.like(1.0, norm))
    return {w: build("Mul", grad, in_dtype_of(build, grad, factor)) for w, grad in grads.items()}


def _sgd(build: Builder, optimizer: SGD, weight: str, grad: str) -> str:
    if optimizer.weight_decay:
        grad = build("Add", grad, _scaled(build, weight, optimizer.weight_decay))
    if optimizer.momentum:
        buffer = _state(build, weight, "momentum")
        part = grad
        if optimizer.dampening:
            part = build("Mul", grad, _scalar(build, "sgd/undamped", weight))
        kept = _scaled(build, buffer, optimizer.momentum)
        build.updates[buffer] = _named(build, f"{buffer}/next", "Add", kept, part)
        if optimizer.nesterov:
            ahead = _scaled(build, build.updates[buffer], optimizer.momentum)
            grad = build("Add", grad, ahead)
        else:
            grad = build.updates[buffer]
    move = build("Mul", grad, _scalar(build, "lr", weight))
    return _named(build, f"{weight}/next", "Sub", weight, move)


def _adam(build: Builder, optimizer: Adam, weight: str, grad: str) -> str:
    lr = _scalar(build, "lr", weight)
    value = weight
    if optimizer.weight_decay and isinstance(optimizer, AdamW):
        keep = build("Sub", build.like(1.0, lr), _scaled(build, lr, optimizer.weight_decay))
        value = build("Mul", weight, keep)
    elif optimizer.weight_decay:
        grad = build("Add", grad, _scaled(build, weight, optimizer.weight_decay))
    first, second = optimizer.betas
    mean, square = _state(build, weight, "exp_avg"), _state(build, weight, "exp_avg_sq")
    step = _scaled(build, build("Sub", grad, mean), 1 - first)
    new_mean = _named(build, f"{mean}/next", "Add", mean, step)
    fresh = _scaled(build, build("Mul", grad, grad), 1 - second)
    new_square = _named(build, f"{square}/next", "Add", _scaled(build, square, second), fresh)
    build.updates[mean], build.updates[square] = new_mean, new_square
    root = build("Div", build("Sqrt", new_square), _scalar(build, "adam/bias2", weight))
    below = build("Add", root, build.like(optimizer.eps, weight))
    size = build("Div", lr, _scalar(build, "adam/bias1", weight))
    move = build("Div", build("Mul", new_mean, size), below)
    return _named(build, f"{weight}/next", "Sub", value, move)


def _own(build: Builder, optimizer: Own, weight: str, grad: str) -> None:
    """Append the update of one weight; what stays as it is is left out.

    InputError if the function gives other state than was registered, or values of other shapes.
    """
    state = {kind: _state(build, weight, kind) for kind, _ in optimizer.state}
    numbers = {name: _scalar(build, value, weight) for name, value in (("lr", "lr"), ("step", STEP))}
    made = KNOWN[optimizer.name].update(build, weight, grad, state, numbers)
    said = f"the optimizer '{optimizer.name}'"
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
        raise InputError(f"{said} has to return (new weight, new state by kind), not {made!r}")
    new, after = made
    if set(after) != set(state):
        raise InputError(f"{said} returned state {sorted(after)}, but was registered with {sorted(state)}")
    for old, value in {weight: new, **{state[kind]: value for kind, value in after.items()}}.items():
        if value not in build.values:
            raise InputError(f"{said} gave {value!r} for '{old}', which is no value")
        gave, wanted = ((build.shape(name), build.dtype(name)) for name in (value, old))
        if gave != wanted:
            shown = [f"{dtype} {list(shape)}" for shape, dtype in (gave, wanted)]
            raise InputError(f"{said} gave {shown[0]} for '{old}', which is {shown[1]}")
        if value != old:
            # Less zero is the same to the last bit, and is a node, also where the value is a copy.
            zero = build.like(0.0, value)
            build.updates[old] = _named(build, f"{old}/next", "Sub", value, zero)
