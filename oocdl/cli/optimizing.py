"""Makes an optimizer and a loss of the options of the command line that are fields of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from oocdl.config import nearest, parse_optimizer
from oocdl.errors import InputError
from oocdl.ops.loss_functions import LOSSES, DiceCE
from oocdl.ops.schedules import Cosine, OneCycle, Polynomial, Rate, Step, WarmUp

OPTIMIZER_FIELDS = ("momentum", "nesterov", "weight_decay", "clip_norm")
LOSS_FIELDS = ("class_weights", "ignore_index")
SCHEDULES = ("cosine", "polynomial[:POWER]", "one_cycle", "step:EVERY[:FACTOR]")


def optimizer_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``optimizer`` and ``lr`` as ``fit`` takes them; InputError for what the optimizer has not.

    >>> names = ("lr", "schedule", "warm_up", "nesterov", "weight_decay", "clip_norm")
    >>> optimizer_of({**dict.fromkeys(names), "optimizer": "sgd", "momentum": 0.9})["optimizer"]
    SGD(lr=0.01, momentum=0.9, nesterov=False, weight_decay=0.0, dampening=0.0, clip_norm=None)
    """
    name, lr = params["optimizer"], params["lr"]
    given = {field: params[field] for field in OPTIMIZER_FIELDS if params[field] not in (None, False)}
    if not given and params["schedule"] is None and params["warm_up"] is None:
        return {"optimizer": name, "lr": lr}
    made = parse_optimizer(name, lr)
    rate: Rate = made.lr if params["schedule"] is None else parse_schedule(params["schedule"], float(made.lr))  # type: ignore[arg-type]
    if params["warm_up"] is not None:
        rate = WarmUp(rate, params["warm_up"])
    return {"optimizer": _with(f"--optimizer {name}", made, {**given, "lr": rate}), "lr": None}


def loss_of(loss: Any, params: Mapping[str, Any]) -> Any:
    """Return a loss as ``fit`` takes it, with the fields that are given; InputError for what it has not.

    Of Dice and cross entropy together the latter has them, as in nnU-Net.
    """
    given = {field: params[field] for field in LOSS_FIELDS if params[field] is not None}
    if not given:
        return loss
    if "class_weights" in given:
        given["class_weights"] = _numbers("--class-weights", given["class_weights"])
    made = LOSSES.get(loss) if isinstance(loss, str) else None
    if made is None:
        flags = " and ".join(f"--{field.replace('_', '-')}" for field in given)
        raise InputError(f"{flags} go with one loss by name; several are for oocdl.losses, in Python")
    if isinstance(made, DiceCE):
        return replace(made, cross_entropy=replace(made.cross_entropy, **given))
    return _with(f"--loss {loss}", made, given)


def parse_schedule(text: str, lr: float) -> Rate:
    """Read ``--schedule``: a schedule that begins with ``lr`` and, where it ends, ends with the run.

    >>> parse_schedule("cosine", 0.1), parse_schedule("step:30:0.5", 0.1)
    (Cosine(lr=0.1, steps=None, minimum=0.0), Step(lr=0.1, every=30, factor=0.5))
    """
    name, *words = text.split(":")
    values = [float(number) for number in _numbers("--schedule", ",".join(words))] if words else []
    match name, values:
        case "cosine", []:
            return Cosine(lr)
        case "one_cycle", []:
            return OneCycle(lr)
        case "polynomial", []:
            return Polynomial(lr)
        case "polynomial", [power]:
            return Polynomial(lr, power=power)
        case "step", [every] if every.is_integer():
            return Step(lr, int(every))
        case "step", [every, factor] if every.is_integer():
            return Step(lr, int(every), factor)
    raise InputError(f"--schedule takes {', '.join(SCHEDULES)}; got '{text}'")


def _with(what: str, record: Any, changes: Mapping[str, Any]) -> Any:
    """A frozen record with other fields; InputError for those that it has not."""
    known = [field.name for field in fields(record) if field.init] if is_dataclass(record) else []
    for name in changes:
        if name not in known:
            others = ", ".join(f"--{field.replace('_', '-')}" for field in known if field in ALL_FIELDS)
            raise InputError(
                f"{what} has no --{name.replace('_', '-')}{nearest(name, known)}; it has {others or 'none'}"
            )
    return replace(record, **changes)


ALL_FIELDS = (*OPTIMIZER_FIELDS, *LOSS_FIELDS)


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"{flag} takes numbers, got '{text}'") from None
