"""The nodes of optimizers: what replaces each weight and its state at the end of a step.

``optimizers`` has the formulas, ``param_groups`` what differs from weight to weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops.optimizers import (
    AVERAGE,
    LAMB,
    SGD,
    STEP,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    Own,
    RMSprop,
    known_rule,
)
from oocdl.ops.own_loss import in_dtype_of, sum_of, total_of
from oocdl.ops.param_groups import AVERAGE_KEPT, Group


def add_updates(
    build: Builder,
    optimizer: Optimizer,
    gradients: Mapping[str, str],
    idle: Collection[str] = (),
    *,
    groups: Mapping[str, Group] | None = None,
    averages: bool = False,
) -> None:
    """Append the update of every weight: ``gradients`` maps weight -> gradient.

    ``idle`` weights, whose gradients are zeros because the loss does not depend on them, keep their values:
    they are not decayed either. PyTorch's optimizers skip a parameter whose ``grad`` is None. ``groups`` has
    weights that are updated otherwise than by ``optimizer`` itself. With ``averages`` each weight that a step
    changes gets a moving average, which ends the step as ``kept average + (1 - kept) weight``.
    """
    if isinstance(optimizer, Own) and known_rule(optimizer.name).digest != optimizer.digest:
        raise InputError(f"the optimizer '{optimizer.name}' is another than the run's; register that one")
    role, build.role = build.role, Role.GRADIENT
    try:
        for weight, grad in _clipped(build, gradients, optimizer).items():
            group = (groups or {}).get(weight) or Group(optimizer)
            _add_update(build, group, weight, grad, weight in idle)
            if averages and weight in build.updates and weight not in idle:
                _add_average(build, weight)
    finally:
        build.role = role


def _add_update(build: Builder, group: Group, weight: str, grad: str, idle: bool) -> None:
    if isinstance(group.optimizer, Own):
        if not idle:
            _own(build, group, group.optimizer, weight, grad)
        return
    rule = replace(group.optimizer, weight_decay=0.0) if idle else group.optimizer
    match rule:
        case Adam():
            build.updates[weight] = _adam(build, group, rule, weight, grad)
        case SGD():
            build.updates[weight] = _sgd(build, group, rule, weight, grad)
        case RMSprop():
            build.updates[weight] = _rmsprop(build, group, rule, weight, grad)
        case Lion():
            build.updates[weight] = _lion(build, group, rule, weight, grad)


def _add_average(build: Builder, weight: str) -> None:
    before, new = _state(build, weight, AVERAGE), build.updates[weight]
    kept = build("Mul", build("Sub", before, new), _scalar(build, AVERAGE_KEPT, weight))
    build.updates[before] = _named(build, f"{before}/next", "Add", new, kept)


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


def _clipped(build: Builder, gradients: Mapping[str, str], optimizer: Optimizer) -> dict[str, str]:
    """``clip_grad_norm_``: all times ``min(1, limit / (norm + 1e-6))``, or ``clip_grad_value_``."""
    grads, limit = dict(gradients), optimizer.clip_value
    if limit is not None:
        above = {weight: build("Min", grad, build.like(limit, grad)) for weight, grad in grads.items()}
        return {weight: build("Max", grad, build.like(-limit, grad)) for weight, grad in above.items()}
    if optimizer.clip_norm is None or not grads:
        return grads
    squares = (total_of(build, build("Mul", grad, grad)) for grad in grads.values())
    norm = _named(build, "grad/norm", "Sqrt", sum_of(build, squares))
    ratio = build("Div", build.like(optimizer.clip_norm, norm), build("Add", norm, build.like(1e-6, norm)))
    factor = build("Min", ratio, build.like(1.0, norm))
    return {w: build("Mul", grad, in_dtype_of(build, grad, factor)) for w, grad in grads.items()}


def _decayed(build: Builder, weight: str, lr: str, decay: float) -> str:
    """Add the weight times ``1 - lr decay``."""
    if not decay:
        return weight
    return build("Mul", weight, build("Sub", build.like(1.0, lr), _scaled(build, lr, decay)))


def _moved(build: Builder, mean: str, to: str, beta: float) -> str:
    """Add the next value of a moving average: ``mean + (1 - beta) (to - mean)``."""
    step = _scaled(build, build("Sub", to, mean), 1 - beta)
    return _named(build, f"{mean}/next", "Add", mean, step)


def _mean_square(build: Builder, square: str, grad: str, beta: float) -> str:
    """Add the next mean of squares: ``beta square + (1 - beta) grad^2``."""
    fresh = _scaled(build, build("Mul", grad, grad), 1 - beta)
    return _named(build, f"{square}/next", "Add", _scaled(build, square, beta), fresh)


def _sgd(build: Builder, group: Group, optimizer: SGD, weight: str, grad: str) -> str:
    if optimizer.weight_decay:
        grad = build("Add", grad, _scaled(build, weight, optimizer.weight_decay))
    if optimizer.momentum:
        buffer = _state(build, weight, "momentum")
        part = grad
        if optimizer.dampening:
            part = build("Mul", grad, _scalar(build, group.scalar("sgd/undamped"), weight))
        kept = _scaled(build, buffer, optimizer.momentum)
        build.updates[buffer] = _named(build, f"{buffer}/next", "Add", kept, part)
        if optimizer.nesterov:
            ahead = _scaled(build, build.updates[buffer], optimizer.momentum)
            grad = build("Add", grad, ahead)
        else:
            grad = build.updates[buffer]
    move = build("Mul", grad, _scalar(build, group.scalar("lr"), weight))
    return _named(build, f"{weight}/next", "Sub", weight, move)


def _adam(build: Builder, group: Group, optimizer: Adam, weight: str, grad: str) -> str:
    """Adam, AdamW and LAMB."""
    lr = _scalar(build, group.scalar("lr"), weight)
    value = weight
    if isinstance(optimizer, AdamW):
        value = _decayed(build, weight, lr, optimizer.weight_decay)
    elif optimizer.weight_decay and not isinstance(optimizer, LAMB):
        grad = build("Add", grad, _scaled(build, weight, optimizer.weight_decay))
    first, second = optimizer.betas
    mean, square = _state(build, weight, "exp_avg"), _state(build, weight, "exp_avg_sq")
    new_mean, new_square = _moved(build, mean, grad, first), _mean_square(build, square, grad, second)
    build.updates[mean], build.updates[square] = new_mean, new_square
    root = build("Div", build("Sqrt", new_square), _scalar(build, group.scalar("adam/bias2"), weight))
    below = build("Add", root, build.like(optimizer.eps, weight))
    bias = _scalar(build, group.scalar("adam/bias1"), weight)
    if isinstance(optimizer, LAMB):
        step = build("Div", build("Div", new_mean, bias), below)
        step = build("Add", step, _scaled(build, weight, optimizer.weight_decay))
        move = build("Mul", step, _trusted(build, optimizer, weight, step, lr))
    else:
        move = build("Div", build("Mul", new_mean, build("Div", lr, bias)), below)
    return _named(build, f"{weight}/next", "Sub", value, move)


def _trusted(build: Builder, optimizer: LAMB, weight: str, step: str, lr: str) -> str:
    """Add the learning rate times the norm of the weight over that of its step, where both are positive."""
    if not (optimizer.weight_decay or optimizer.always_adapt):
        return lr
    zero = build.like(0.0, weight)
    long, far = (build("Sqrt", total_of(build, build("Mul", value, value))) for value in (weight, step))
    both = build("And", build("Less", zero, long), build("Less", zero, far))
    return build("Mul", lr, build("Where", both, build("Div", long, far), build.like(1.0, weight)))


def _rmsprop(build: Builder, group: Group, optimizer: RMSprop, weight: str, grad: str) -> str:
    if optimizer.weight_decay:
        grad = build("Add", grad, _scaled(build, weight, optimizer.weight_decay))
    square = _state(build, weight, "square_avg")
    mean_square = build.updates[square] = _mean_square(build, square, grad, optimizer.alpha)
    if optimizer.centered:
        mean = _state(build, weight, "grad_avg")
        build.updates[mean] = _moved(build, mean, grad, optimizer.alpha)
        mean_square = build("Sub", mean_square, build("Mul", build.updates[mean], build.updates[mean]))
    root = build("Add", build("Sqrt", mean_square), build.like(optimizer.eps, weight))
    step = build("Div", grad, root)
    if optimizer.momentum:
        buffer = _state(build, weight, "momentum")
        kept = _scaled(build, buffer, optimizer.momentum)
        step = build.updates[buffer] = _named(build, f"{buffer}/next", "Add", kept, step)
    move = build("Mul", step, _scalar(build, group.scalar("lr"), weight))
    return _named(build, f"{weight}/next", "Sub", weight, move)


def _lion(build: Builder, group: Group, optimizer: Lion, weight: str, grad: str) -> str:
    lr = _scalar(build, group.scalar("lr"), weight)
    value = _decayed(build, weight, lr, optimizer.weight_decay)
    first, second = optimizer.betas
    mean = _state(build, weight, "exp_avg")
    ahead = build("Add", mean, _scaled(build, build("Sub", grad, mean), 1 - first))
    build.updates[mean] = _moved(build, mean, grad, second)
    zero = build.like(0.0, weight)
    sign = build("Where", build("Less", ahead, zero), build.like(-1.0, weight), ahead)
    sign = build("Where", build("Less", zero, ahead), build.like(1.0, weight), sign)
    move = build("Mul", sign, lr)
    return _named(build, f"{weight}/next", "Sub", value, move)


def _own(build: Builder, group: Group, optimizer: Own, weight: str, grad: str) -> None:
    """Append the update of one weight; what stays as it is is left out.

    InputError if the function gives other state than was registered, or values of other shapes.
    """
    state = {kind: _state(build, weight, kind) for kind, _ in optimizer.state}
    numbers = {
        name: _scalar(build, group.scalar(value), weight) for name, value in (("lr", "lr"), ("step", STEP))
    }
    made = known_rule(optimizer.name).update(build, weight, grad, state, numbers)
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
