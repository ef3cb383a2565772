"""The nodes of optimizers: what replaces each weight and its state at the end of a step.

``optimizers`` has the formulas, ``param_groups`` what differs from weight to weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.ops import optimizers as optim
from oocdl.ops.expression import Lifted, apply, lift, minimum, sqrt, where
from oocdl.ops.own_loss import sum_of
from oocdl.ops.param_groups import AVERAGE_KEPT, Group


def add_updates(
    build: Builder,
    optimizer: optim.Optimizer,
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
    if isinstance(optimizer, optim.Own) and optim.known_rule(optimizer.name).digest != optimizer.digest:
        raise InputError(f"the optimizer '{optimizer.name}' is another than the run's; register that one")
    role, build.role = build.role, Role.GRADIENT
    try:
        for weight, grad in _clipped(build, gradients, optimizer).items():
            group = (groups or {}).get(weight) or Group(optimizer)
            rule, w = group.optimizer, lift(build, weight)
            if not isinstance(rule, optim.Own):
                rule = replace(rule, weight_decay=0.0) if weight in idle else rule
                _UPDATES[type(rule)](w, lift(build, grad), rule, group)
            elif weight not in idle:
                _own(w, grad, rule, group)
            if averages and weight in build.updates and weight not in idle:
                average, new = _state(w, optim.AVERAGE), w.to(build.updates[weight])
                _put(average, "Add", new, (average - new) * _scalar(w, AVERAGE_KEPT))
    finally:
        build.role = role


SHARE = "accumulate/share"
"""The SCALAR by which the loss of a pass counts in its step: one over the number of passes."""


def shared_loss(build: Builder, loss: str) -> str:
    """Add the loss times its share, which is differentiated where a step is several passes."""
    whole = lift(build, loss)
    return (whole * _scalar(whole, SHARE)).name


def add_sums(build: Builder, gradients: Mapping[str, str]) -> dict[str, str]:
    """Append the sum of each gradient with those of the passes before; returns weight -> sum.

    The sum so far is a value of role SUM, ``<weight>/accumulated``.
    """
    role, build.role = build.role, Role.GRADIENT
    sums = {}
    for weight, grad in gradients.items():
        before = build.value(f"{weight}/accumulated", build.shape(weight), build.dtype(weight), Role.SUM)
        sums[weight] = _named(lift(build, before), f"{before}/next", "Add", lift(build, grad)).name
    build.role = role
    return sums


def _scalar(like: Lifted, name: str) -> Lifted:
    """Return the SCALAR value ``name``, which is declared on first use, in the dtype of ``like``.

    Where the file has a tensor of that name, the value's ends in ``optimizers.PRIME``.
    """
    values = like.build.values
    while name in values and values[name].role is not Role.SCALAR:
        name += optim.PRIME
    if name not in values:
        like.build.value(name, (), like.dtype, Role.SCALAR)
    return like.to(name).cast(like.dtype)


def _state(w: Lifted, kind: str) -> Lifted:
    return w.to(w.build.value(f"{w.name}/{kind}", w.shape, w.dtype, Role.STATE))


def _named(first: Lifted, name: str, op: str, *others: Lifted) -> Lifted:
    """Add a node of this name, or of one with a number where the file has a tensor of it."""
    inputs = [value.name for value in (first, *others)]
    return first.to(first.build.node(op, inputs, label=name)[0])


def _put(old: Lifted, op: str, *inputs: Lifted) -> Lifted:
    """Add the node whose result takes the place of ``old``, a weight or state, after the step."""
    new = _named(inputs[0], f"{old.name}/next", op, *inputs[1:])
    old.build.updates[old.name] = new.name
    return new


def _scaled(value: Lifted, factor: float) -> Lifted:
    return value if factor == 1 else value * factor


def _clipped(build: Builder, gradients: Mapping[str, str], optimizer: optim.Optimizer) -> Mapping[str, str]:
    """``clip_grad_norm_``: all times ``min(1, limit / (norm + 1e-6))``, or ``clip_grad_value_``."""
    grads = {weight: lift(build, grad) for weight, grad in gradients.items()}
    limit = optimizer.clip_value
    if limit is not None:
        below = {weight: minimum(grad, limit) for weight, grad in grads.items()}
        return {weight: apply("Max", grad, -limit).name for weight, grad in below.items()}
    if optimizer.clip_norm is None or not grads:
        return gradients
    norm = _named(sum_of((grad * grad).total() for grad in grads.values()), "grad/norm", "Sqrt")
    most = norm.number(optimizer.clip_norm)
    factor = minimum(most / (norm + 1e-6), 1.0)
    return {weight: (grad * factor.cast(grad.dtype)).name for weight, grad in grads.items()}


def _decayed(w: Lifted, lr: Lifted, decay: float) -> Lifted:
    """Add the weight times ``1 - lr decay``."""
    return w * (lr.number(1.0) - _scaled(lr, decay)) if decay else w


def _with_decay(grad: Lifted, w: Lifted, decay: float) -> Lifted:
    """Add the gradient of a weight with that of its L2 decay."""
    return grad + _scaled(w, decay) if decay else grad


def _moved(mean: Lifted, to: Lifted, beta: float) -> Lifted:
    """Put the next value of a moving average: ``mean + (1 - beta) (to - mean)``."""
    return _put(mean, "Add", mean, _scaled(to - mean, 1 - beta))


def _mean_square(square: Lifted, grad: Lifted, beta: float) -> Lifted:
    """Put the next mean of squares: ``beta square + (1 - beta) grad^2``."""
    fresh = _scaled(grad * grad, 1 - beta)
    return _put(square, "Add", _scaled(square, beta), fresh)


def _sgd(w: Lifted, grad: Lifted, rule: optim.SGD, group: Group) -> None:
    grad = _with_decay(grad, w, rule.weight_decay)
    if rule.momentum:
        buffer = _state(w, "momentum")
        part = grad * _scalar(w, group.scalar("sgd/undamped")) if rule.dampening else grad
        buffer = _put(buffer, "Add", _scaled(buffer, rule.momentum), part)
        grad = grad + _scaled(buffer, rule.momentum) if rule.nesterov else buffer
    _put(w, "Sub", w, grad * _scalar(w, group.scalar("lr")))


def _adam(w: Lifted, grad: Lifted, rule: optim.Adam, group: Group) -> None:
    lr, value = _scalar(w, group.scalar("lr")), w
    if isinstance(rule, optim.AdamW):
        value = _decayed(w, lr, rule.weight_decay)
    elif not isinstance(rule, optim.LAMB):
        grad = _with_decay(grad, w, rule.weight_decay)
    mean, square = _state(w, "exp_avg"), _state(w, "exp_avg_sq")
    mean, square = _moved(mean, grad, rule.betas[0]), _mean_square(square, grad, rule.betas[1])
    below = sqrt(square) / _scalar(w, group.scalar("adam/bias2")) + rule.eps
    bias = _scalar(w, group.scalar("adam/bias1"))
    if isinstance(rule, optim.LAMB):
        step = mean / bias / below + _scaled(w, rule.weight_decay)
        move = step * _trusted(w, step, rule, lr)
    else:
        move = mean * (lr / bias) / below
    _put(w, "Sub", value, move)


def _trusted(w: Lifted, step: Lifted, rule: optim.LAMB, lr: Lifted) -> Lifted:
    """Add the learning rate times the norm of the weight over that of its step, where both are positive."""
    if not (rule.weight_decay or rule.always_adapt):
        return lr
    zero = w.number(0.0)
    long, far = (sqrt((value * value).total()) for value in (w, step))
    both = apply("And", zero < long, zero < far)
    return lr * where(both, long / far, w.number(1.0))


def _rmsprop(w: Lifted, grad: Lifted, rule: optim.RMSprop, group: Group) -> None:
    grad = _with_decay(grad, w, rule.weight_decay)
    mean_square = _mean_square(_state(w, "square_avg"), grad, rule.alpha)
    if rule.centered:
        mean = _moved(_state(w, "grad_avg"), grad, rule.alpha)
        mean_square = mean_square - mean * mean
    step = grad / (sqrt(mean_square) + rule.eps)
    if rule.momentum:
        buffer = _state(w, "momentum")
        step = _put(buffer, "Add", _scaled(buffer, rule.momentum), step)
    _put(w, "Sub", w, step * _scalar(w, group.scalar("lr")))


def _lion(w: Lifted, grad: Lifted, rule: optim.Lion, group: Group) -> None:
    lr = _scalar(w, group.scalar("lr"))
    value, mean = _decayed(w, lr, rule.weight_decay), _state(w, "exp_avg")
    ahead = mean + _scaled(grad - mean, 1 - rule.betas[0])
    _moved(mean, grad, rule.betas[1])
    zero = w.number(0.0)
    sign = where(ahead < zero, w.number(-1.0), ahead)
    sign = where(zero < ahead, w.number(1.0), sign)
    _put(w, "Sub", value, sign * lr)


_UPDATES: Mapping[type, Callable[..., None]] = {
    optim.SGD: _sgd, optim.Adam: _adam, optim.AdamW: _adam, optim.LAMB: _adam, optim.RMSprop: _rmsprop,
    optim.Lion: _lion,
}  # fmt: skip
"""Optimizer -> what appends the update of a weight: (weight, gradient, optimizer, its group)."""


def _own(w: Lifted, grad: str, rule: optim.Own, group: Group) -> None:
    """Append the update of one weight; what stays as it is is left out.

    InputError if the function gives other state than was registered, or values of other shapes.
    """
    build = w.build
    state = {kind: _state(w, kind).name for kind, _ in rule.state}
    lr, step = (_scalar(w, group.scalar(name)).name for name in ("lr", optim.STEP))
    made = optim.known_rule(rule.name).update(build, w.name, grad, state, {"lr": lr, "step": step})
    said = f"the optimizer '{rule.name}'"
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Mapping):
        raise InputError(f"{said} has to return (new weight, new state by kind), not {made!r}")
    new, after = made
    if set(after) != set(state):
        raise InputError(f"{said} returned state {sorted(after)}, but was registered with {sorted(state)}")
    for old, value in {w.name: new, **{state[kind]: value for kind, value in after.items()}}.items():
        if value not in build.values:
            raise InputError(f"{said} gave {value!r} for '{old}', which is no value")
        gave, wanted = (f"{build.dtype(name)} {list(build.shape(name))}" for name in (value, old))
        if gave != wanted:
            raise InputError(f"{said} gave {gave} for '{old}', which is {wanted}")
        if value != old:
            # Less zero is the same to the last bit, and is a node, also where the value is a copy.
            _put(w.to(old), "Sub", w.to(value), w.to(value).number(0.0))
