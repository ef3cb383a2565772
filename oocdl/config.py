"""One frozen object with every setting of a run, checked once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from oocdl.errors import InputError
from oocdl.machine import default_budget_bytes
from oocdl.ops.losses import LOSSES
from oocdl.ops.optimizers import SGD, Adam, AdamW, Optimizer

UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}i": 1 << shift for unit, shift in zip("KMGT", (10, 20, 30, 40), strict=True)}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or a text with a unit.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (2147483648, 1500000, 4096)
    """
    if isinstance(size, int):
        number, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?i?)B?\s*", size, re.IGNORECASE)
        if match is None:
            raise InputError(f"'{size}' is not a size; write for example '2GiB' or a number of bytes")
        number = float(match[1])
        unit = match[2].upper().replace("I", "i")
    if number <= 0:
        raise InputError(f"a size must be positive, got {size}")
    return int(number * UNITS[unit])


def parse_optimizer(optimizer: str | Optimizer, lr: float | None = None) -> Optimizer:
    """An optimizer by name ("sgd", "adam", "adamw") or as it is."""
    if not isinstance(optimizer, str):
        return optimizer
    kinds: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    if optimizer.lower() not in kinds:
        raise InputError(f"there is no optimizer '{optimizer}'{_nearest(optimizer, kinds)}; choose one of: {', '.join(kinds)}")
    kind = kinds[optimizer.lower()]
    if lr is not None:
        return kind(lr=lr)  # type: ignore[no-any-return]
    return kind(lr=0.01) if kind is SGD else kind()  # type: ignore[no-any-return]


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean '{near[0]}'?)" if near else ""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, as ``fit`` takes them; see there for their meaning."""

    loss: Any = "cross_entropy"
    optimizer: Optimizer = field(default_factory=Adam)
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 1
    shuffle: bool = True
    seed: int = 0
    inputs: Mapping[str, str] | None = None
    targets: Mapping[str, str] | None = None
    dims: Mapping[str, int] | None = None
    scale: Mapping[str, float] | None = None
    logits: str = "strict"
    allow_missing_chunks: bool = False
    memory_bytes: int = field(default_factory=default_budget_bytes)
    spill: str | None = None
    parallel: Any = "auto"
    threads: int | None = None
    engine: str = "auto"
    precision: str = "float32"
    freeze: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    commit_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        if self.precision not in ("float32", "float64"):
            raise InputError(f"precision must be 'float32' or 'float64', got '{self.precision}'")
        if self.logits not in ("strict", "auto"):
            raise InputError(f"logits must be 'strict' or 'auto', got '{self.logits}'")
        losses = self.loss.values() if isinstance(self.loss, Mapping) else [self.loss]
        for loss in losses:
            name = loss[0] if isinstance(loss, tuple) else loss
            if isinstance(name, str) and name not in LOSSES:
                raise InputError(f"there is no loss '{name}'{_nearest(name, LOSSES)}; choose one of: {', '.join(LOSSES)}")
        if self.parallel != "auto":
            unknown = set(self.parallel) - {"batch", "space", "channels"}
            if unknown:
                raise InputError(f"parallel does not know '{min(unknown)}'; it takes batch, space, channels")

    def identity(self) -> dict[str, str]:
        """The settings that a resumed run must share, as text."""
        free = {"epochs", "steps", "memory_bytes", "spill", "keep", "commit_seconds", "parallel", "threads"}
        return {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name not in free}


def make_settings(**options: Any) -> Settings:
    """Settings from the options of ``fit``; an unknown one is refused with the nearest known."""
    known = {f.name: None for f in fields(Settings)} | {"memory": None, "lr": None}
    for name in options:
        if name not in known:
            raise InputError(f"unknown option '{name}'{_nearest(name, known)}")
    values = dict(options)
    lr = values.pop("lr", None)
    values["optimizer"] = parse_optimizer(values.get("optimizer", "adam"), lr)
    memory = values.pop("memory", None)
    if memory is not None:
        values["memory_bytes"] = parse_bytes(memory)
    for name in ("freeze", "keep"):
        given = values.get(name, ())
        values[name] = (given,) if isinstance(given, str) else tuple(given)
    if isinstance(values.get("spill"), Path):
        values["spill"] = str(values["spill"])
    return Settings(**values)
