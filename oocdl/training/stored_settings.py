"""Makes settings of the plain data that a run keeps of them: all, or those that its predictions go by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from oocdl.config.settings import SAMPLED_STEPS, Settings, make_settings, setting_names
from oocdl.errors import InputError
from oocdl.ops.loss_functions import Loss
from oocdl.ops.optimizers import SGD, Adam, AdamW, Own
from oocdl.ops.schedules import Constant, Cosine, OneCycle, Polynomial, Step, Then, WarmUp

KINDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        *get_args(Loss), SGD, Adam, AdamW, Constant, Step, Cosine, Polynomial, OneCycle, WarmUp, Then,
    )
}  # fmt: skip
"""What plain data may be of, by the name of its type."""
ALL = setting_names(lambda option: True)
OF_PREDICTIONS = setting_names(lambda option: option.predicts)
"""Settings that a run also predicts and evaluates with."""


@dataclass(frozen=True)
class Noted:
    """A learning rate that was a function of the user's own, of which a run has some values."""

    values: Sequence[float]

    def __call__(self, step: int) -> float:
        """Return what was noted of a step; InputError if nothing was."""
        known: dict[int, float] = dict(zip(SAMPLED_STEPS, self.values, strict=False))
        if step not in known:
            raise InputError(f"the learning rate was a function of yours, which was not noted at step {step}")
        return known[step]


def restored(data: Mapping[str, Any], names: Collection[str] = OF_PREDICTIONS) -> Settings:
    """Make the settings of which ``Settings.stored`` has made ``data``, of the others the defaults.

    Raises KeyError, TypeError, ValueError or AttributeError for bad data.
    """
    found = {name: _value(data[name]) for name in ALL if name in names and name in data}
    heads = data["loss"].get("heads")
    if heads is not None:
        found["loss"] = {name: (_value(spec), float(weight)) for name, (spec, weight) in heads.items()}
    return replace(make_settings(), **found)


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_value, data))
    if not isinstance(data, Mapping):
        return data
    if "type" not in data:
        return {name: _value(held) for name, held in data.items()}
    if "values" in data:
        return Noted(tuple(data["values"]))
    values = {name: _value(held) for name, held in data.items() if name != "type"}
    if data["type"] != Own.__name__:
        return KINDS[data["type"]](**values)
    made = object.__new__(Own)  # it need not be registered here
    for one in fields(Own):
        object.__setattr__(made, one.name, values[one.name])
    return made
