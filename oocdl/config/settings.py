"""``Settings``: one frozen object with every setting of a run, checked once by ``make_settings``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.augmentation.transform import Transform
from oocdl.config.option_checks import groups_with_fields, nearest, parse_optimizer, shown
from oocdl.config.options import OPTIONS, Option
from oocdl.errors import InputError
from oocdl.host.limits import default_budget_bytes
from oocdl.ops.loss_functions import Loss
from oocdl.ops.metric_functions import Metric
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.param_groups import ParamGroups, groups_of

SPILL_VARIABLE = "OOCDL_SPILL"
SAMPLED_STEPS = (*range(8), *(1 << shift for shift in range(3, 17)))
"""Steps at which a learning rate that is a function is sampled, to tell it from another."""


@dataclass(frozen=True)
class Settings:
    """Options of `docs/reference/options.md` that a run is made by, checked; ``optimizer`` has ``lr=``."""

    loss: Loss | Mapping[str, tuple[Loss, float]]
    optimizer: Optimizer
    param_groups: ParamGroups | None
    ema: float | None
    epochs: int
    steps: int | None
    batch_size: int
    accumulate: int
    shuffle: bool
    seed: int
    inputs: Mapping[str, str] | None
    targets: Mapping[str, str] | None
    dims: Mapping[str, int] | None
    pad_to_multiple_of: int | None
    scale: Mapping[str, float] | None
    normalize: str | Mapping[str, str] | None
    augment: str | tuple[Transform | str, ...] | None
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
    validation: Any
    validation_freq: int | tuple[int, ...]
    validation_steps: int | None
    metrics: tuple[Metric, ...]

    @property
    def dtype(self) -> str:
        """Dtype of weights and of all operators but products: float32 with precision "bfloat16"."""
        return "float32" if self.precision == "bfloat16" else self.precision

    @property
    def held_out(self) -> float | tuple[int, ...] | None:
        """The share or the indices of the samples to hold out; None if no samples are held out."""
        return self.validation if isinstance(self.validation, float | tuple) else None

    def spill_folder(self, default: Path) -> Path:
        """Return the folder of the spill: ``spill``, else ``$OOCDL_SPILL``, else ``default``."""
        return Path(self.spill or os.environ.get(SPILL_VARIABLE) or default).absolute()

    def stored(self) -> dict[str, Any]:
        given = replace(self, validation="arrays in memory") if isinstance(self.validation, Mapping) else self
        found = {one.name: plain(getattr(given, one.name)) for one in fields(self)}
        return found | ({"loss": {"heads": found["loss"]}} if isinstance(self.loss, Mapping) else {})


def make_settings(**options: Any) -> Settings:
    """Check the options of ``fit`` and make settings of them. Raises InputError as ``checked``."""
    values = checked(OPTIONS, options)
    optimizer = parse_optimizer(values.pop("optimizer"), values.pop("lr"))
    groups = groups_with_fields(optimizer, values.pop("param_groups"))
    groups_of(optimizer, groups)  # what they cannot have is refused here
    memory_bytes = values.pop("memory") or default_budget_bytes()
    values |= {"memory_bytes": memory_bytes, "disk_bytes": values.pop("disk")}
    return Settings(optimizer=optimizer, param_groups=groups, **values)


def checked(known: Mapping[str, Option], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every known option, checked, or its default. InputError for others, with a hint."""
    for name in options:
        if name not in known:
            raise InputError(f"unknown option '{shown(name)}'{nearest(name, sorted(known))}")
    return {name: one.checked(name, options.get(name, one.default)) for name, one in known.items()}


def setting_names(of: Callable[[Option], bool]) -> tuple[str, ...]:
    """Return the names of those settings whose options are such.

    >>> setting_names(lambda option: option.fixed == "plan")
    ('spill_dtype', 'parallel', 'keep')
    """
    names = [field.name for field in fields(Settings)]
    return tuple(name for name in names if of(OPTIONS[name.removesuffix("_bytes")]))


def plain(value: Any) -> Any:
    """Turn a setting into what JSON can hold: equal settings give equal data, in every process.

    A dataclass becomes its fields and the name of its type; another function, its values at some steps.

    >>> plain({"lr": np.float32(0.5), "loss": make_settings(loss="mse").loss})
    {'lr': 0.5, 'loss': {'type': 'MSE', 'sample_weights': None}}
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
        held = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        return {"type": type(value).__name__, **held}
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

    A field that ``old`` does not know, as an earlier version did not have it, is one that was off.

    >>> differences({"loss": {"type": "MSE"}}, {"loss": {"type": "MSE", "sample_weights": None}})
    []
    >>> differences({"a": {"lr": 1, "b": 2}}, {"a": {"lr": 3, "b": 2}})
    ['a.lr was 1, is 3']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("type") == new.get("type"):
        keys = [*old, *(key for key in new if key not in old and new[key])]
        inner = [(key, f"{name}.{key}" if name else str(key)) for key in keys]
        return [text for key, label in inner for text in differences(old.get(key), new.get(key), label)]
    return [] if old == new else [f"{shown(name)} was {_in_words(old)}, is {_in_words(new)}"]


def _in_words(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else None
    return str(kind) if kind else shown("nothing" if value is None else value)
