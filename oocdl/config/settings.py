"""``Settings``: one frozen object with every setting of a run, checked once by ``make_settings``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import numpy as np

from oocdl.config.option_checks import nearest, parse_optimizer, shown
from oocdl.config.options import OPTIONS, Option
from oocdl.errors import InputError
from oocdl.host.limits import default_budget_bytes
from oocdl.ops.loss_functions import Loss
from oocdl.ops.optimizers import SGD, Adam, AdamW, Optimizer, Own
from oocdl.ops.schedules import Constant, Cosine, OneCycle, Polynomial, Step, Then, WarmUp

SPILL_VARIABLE = "OOCDL_SPILL"
SAMPLED_STEPS = (*range(8), *(1 << shift for shift in range(3, 17)))
"""Steps at which a learning rate that is a function is sampled, to tell it from another."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run: the options of `docs/reference/options.md` that a run is made by, checked.

    Made by ``make_settings``, which has the defaults. ``memory_bytes`` and ``disk_bytes`` are ``memory=`` and
    ``disk=``, in bytes; ``optimizer`` has ``lr=``.
    """

    loss: Loss | Mapping[str, tuple[Loss, float]]
    optimizer: Optimizer
    epochs: int
    steps: int | None
    batch_size: int
    accumulate: int
    shuffle: bool
    seed: int
    inputs: Mapping[str, str] | None
    targets: Mapping[str, str] | None
    dims: Mapping[str, int] | None
    scale: Mapping[str, float] | None
    logits: str
    allow_missing_chunks: bool
    strict: bool
    memory_bytes: int
    spill: str | None
    spill_dtype: str | None
    disk_bytes: int | None
    parallel: Any
    threads: int | None
    engine: str
    precision: str
    freeze: tuple[str, ...]
    keep: tuple[str, ...]
    commit_seconds: float

    @property
    def dtype(self) -> str:
        """Dtype of weights and of all operators but products: float32 with precision "bfloat16"."""
        return "float32" if self.precision == "bfloat16" else self.precision

    def spill_folder(self, default: Path) -> Path:
        """Return the folder of the spill: ``spill``, else ``$OOCDL_SPILL``, else ``default``."""
        return Path(self.spill or os.environ.get(SPILL_VARIABLE) or default)

    def stored(self) -> dict[str, Any]:
        """Return all of it as plain data, for ``restored`` to read."""
        found = {one.name: plain(getattr(self, one.name)) for one in fields(self)}
        return found | ({"loss": {"heads": found["loss"]}} if isinstance(self.loss, Mapping) else {})


def make_settings(**options: Any) -> Settings:
    """Check the options of ``fit`` and make settings of them.

    Raises InputError for a bad value, and for an unknown option, with the nearest known one.
    """
    values = checked(OPTIONS, options)
    optimizer = parse_optimizer(values.pop("optimizer"), values.pop("lr"))
    memory_bytes, disk_bytes = values.pop("memory") or default_budget_bytes(), values.pop("disk")
    return Settings(optimizer=optimizer, memory_bytes=memory_bytes, disk_bytes=disk_bytes, **values)


def checked(known: Mapping[str, Option], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every known option: what is given, checked, or the default.

    Raises InputError for a bad value, and for an unknown option, with the nearest known one.
    """
    for name in options:
        if name not in known:
            raise InputError(f"unknown option '{shown(name)}'{nearest(name, sorted(known))}")
    given = {name: options.get(name, option.default) for name, option in known.items()}
    return {name: option.checked(name, given[name]) for name, option in known.items()}


def setting_names(of: Callable[[Option], bool]) -> tuple[str, ...]:
    """Return the names of those settings whose options are such.

    >>> setting_names(lambda option: option.fixed == "plan")
    ('spill_dtype', 'parallel', 'keep')
    """
    names = [field.name for field in fields(Settings)]
    return tuple(name for name in names if of(OPTIONS[name.removesuffix("_bytes")]))


def plain(value: Any) -> Any:
    """Turn a setting into what JSON can hold: equal settings give equal data, in every process.

    A dataclass becomes its fields and the name of its type; any other function of the step becomes its
    values at some steps.

    >>> plain({"lr": np.float32(0.5), "loss": make_settings(loss="mse").loss})
    {'lr': 0.5, 'loss': {'type': 'MSE'}}
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "type": type(value).__name__,
            **{f.name: plain(getattr(value, f.name)) for f in fields(value)},
        }
    if isinstance(value, Mapping):
        return {str(key): plain(held) for key, held in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(held) for held in value]
    if callable(value):
        return {"type": "function of the step", "values": _sampled(value)}
    return shown(value)


def _sampled(function: Callable[[int], Any]) -> list[float]:
    found: list[float] = []
    for step in SAMPLED_STEPS:
        try:
            found.append(float(function(step)))
        except Exception:  # a table that ends, or a function that knows its range
            break
    return found


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """List in words where two plain settings differ.

    >>> differences({"a": {"lr": 1, "b": 2}}, {"a": {"lr": 3, "b": 2}})
    ['a.lr was 1, is 3']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("type") == new.get("type"):
        keys = [*old, *(key for key in new if key not in old)]
        inner = [(key, f"{name}.{key}" if name else str(key)) for key in keys]
        return [text for key, label in inner for text in differences(old.get(key), new.get(key), label)]
    return [] if old == new else [f"{shown(name)} was {_in_words(old)}, is {_in_words(new)}"]


def _in_words(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return str(kind) if kind else shown("nothing" if value is None else value)


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
