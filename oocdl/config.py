"""``Settings``: one frozen object with every setting of a run, checked once by ``make_settings``."""

from __future__ import annotations

import difflib
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.errors import InputError
from oocdl.host.limits import default_budget_bytes
from oocdl.host.paths import path_of
from oocdl.ops.file_loss import file_loss
from oocdl.ops.loss_functions import LOSSES, CrossEntropy, Loss
from oocdl.ops.optimizers import OPTIMIZERS, SGD, Adam, Optimizer

BYTES_BY_UNIT = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BYTES_BY_UNIT |= {f"{unit}i": 1 << shift for unit, shift in zip("KMGT", (10, 20, 30, 40), strict=True)}
SPILL_VARIABLE = "OOCDL_SPILL"
SAMPLED_STEPS = (*range(8), *(1 << shift for shift in range(3, 17)))
"""Steps at which a learning rate that is a function is sampled, to tell it from another."""


def parse_bytes(size: float | str) -> int:
    """Read a size in bytes from a number or a text with a unit; InputError if it is none.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (2147483648, 1500000, 4096)
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*((?:[KMGT]i?)?)B?\s*", size, re.IGNORECASE)
        if match is None:
            raise InputError(f"'{shown(size)}' is not a size; write for example '2GiB' or a number of bytes")
        number = float(match[1]) * BYTES_BY_UNIT[match[2].upper().replace("I", "i")]
    else:
        number = _finite("a size", size)
    if number > sys.maxsize:
        raise InputError(f"a size of {shown(size)} is more than any machine has")
    if number < 1:
        raise InputError(f"a size must be at least one byte, got {shown(size)}")
    return int(number)


def parse_optimizer(optimizer: str | Optimizer, lr: Any = None) -> Optimizer:
    """Return an optimizer, given by name (of ``OPTIMIZERS``; ``lr`` goes with it) or as an object.

    Raises InputError.
    """
    if isinstance(optimizer, str):
        kind = OPTIMIZERS.get(optimizer) or OPTIMIZERS.get(optimizer.lower())
        if kind is None:
            raise InputError(
                f"there is no optimizer '{shown(optimizer)}'{nearest(optimizer, OPTIMIZERS)}; "
                f"choose one of: {', '.join(OPTIMIZERS)}, or register your own with oocdl.optim.register"
            )
        rate = lr if lr is not None else 0.01 if kind is SGD else 0.001
        optimizer = kind(lr=rate if callable(rate) else _finite("lr", rate))
    elif not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer {shown(optimizer)} is neither a name ({', '.join(OPTIMIZERS)}) nor of oocdl.optim"
        )
    elif lr is not None:
        raise InputError("lr goes with an optimizer given by name; this one has its own")
    if not callable(optimizer.lr) and _finite("lr", optimizer.lr) < 0:
        raise InputError(f"lr must not be negative, got {optimizer.lr}")
    return optimizer


def nearest(word: object, known: Iterable[str]) -> str:
    """Ask whether the most alike of the known words was meant; nothing if none is alike.

    >>> nearest("CrossEntropyLoss", ["cross_entropy", "dice"])
    " (did you mean 'cross_entropy'?)"
    """
    names = {re.sub("_|loss", "", name.lower()): name for name in known}
    near = difflib.get_close_matches(re.sub(r"_|loss|\W", "", str(word).lower()), list(names), 1)
    return f" (did you mean '{names[near[0]]}'?)" if near else ""


def shown(value: object) -> str:
    """Return a value as a short text in one line."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {shown(value)}")
    return number


def _whole(name: str, value: Any, least: int | None = 1, most: int = sys.maxsize) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {shown(value)}")
    if least is not None and number < least:
        raise InputError(f"{name} must be at least {least}, got {shown(number)}")
    if abs(number) > most:
        raise InputError(f"{name} must be at most {most}, got {shown(number)}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return a setting that is on or off; InputError for anything else, numbers among it."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{name} must be {' or '.join(map(repr, known))}, got {shown(value)}")
        return value

    return check


def _names(name: str, value: Any) -> tuple[str, ...]:
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for item in found:
        if not isinstance(item, str):
            raise InputError(f"{name} takes names, got {shown(item)}")
    return found


def _mapping(item: Callable[[str, Any], Any]) -> Callable[[str, Any], dict[str, Any] | None]:
    def check(name: str, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InputError(f"{name} takes a mapping by name, got {shown(value)}")
        return {str(key): item(f"{name}['{shown(key)}']", held) for key, held in value.items()}

    return check


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} takes a name, got {shown(value)}")
    return value


def _parallel(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            f"{name} takes 'auto' or a mapping such as {{'space': (2, 2, 1)}}, got {shown(value)}"
        )
    known, found = ("batch", "space", "channels"), dict[str, Any]()
    for key, count in value.items():
        if key not in known:
            raise InputError(
                f"parallel does not know '{shown(key)}'{nearest(key, known)}; it takes {', '.join(known)}"
            )
        counts = count if key == "space" and isinstance(count, tuple | list) else (count,)
        checked = tuple(_whole(f"parallel['{key}']", number) for number in counts)
        found[key] = checked if key == "space" else checked[0]
    return found


def _loss(value: Any) -> Loss:
    if isinstance(value, str) and value in LOSSES:
        return LOSSES[value]
    if str(value).endswith(".onnx"):
        return file_loss(path_of("loss", value))
    if not isinstance(value, Loss):
        word = f"'{shown(value)}'" if isinstance(value, str) else f"like {shown(value)}"
        raise InputError(
            f"there is no loss {word}{nearest(value, LOSSES)}; choose one of: {', '.join(LOSSES)}, "
            "an ONNX file, or an object of oocdl.losses"
        )
    return value


def _losses(name: str, value: Any) -> Loss | dict[str, tuple[Loss, float]]:
    if not isinstance(value, Mapping):
        return _loss(value)
    if not value:
        raise InputError("loss is empty: name one, or a mapping output -> (loss, weight)")
    heads = {}
    for output, given in value.items():
        pair = tuple(given) if isinstance(given, tuple | list) else (given, 1.0)
        if len(pair) != 2:
            raise InputError(f"loss['{shown(output)}'] must be a loss or (loss, weight), got {shown(given)}")
        heads[str(output)] = (_loss(pair[0]), _finite(f"the weight of loss['{shown(output)}']", pair[1]))
    return heads


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, Real) or not float(value) >= 0:
        raise InputError(f"{name} must be a number of seconds, got {shown(value)}")
    return float(value)


@dataclass(frozen=True)
class Settings:
    """Settings of a run, as ``fit`` takes them; see there for their meaning. Made by ``make_settings``.

    ``memory_bytes`` and ``disk_bytes`` are ``memory=`` and ``disk=``, in bytes.
    """

    loss: Loss | Mapping[str, tuple[Loss, float]] = CrossEntropy()
    optimizer: Optimizer = field(default_factory=Adam)
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 1
    accumulate: int = 1
    shuffle: bool = True
    seed: int = 0
    inputs: Mapping[str, str] | None = None
    targets: Mapping[str, str] | None = None
    dims: Mapping[str, int] | None = None
    scale: Mapping[str, float] | None = None
    logits: str = "strict"
    allow_missing_chunks: bool = True
    strict: bool = False
    memory_bytes: int = field(default_factory=default_budget_bytes)
    spill: str | None = None
    spill_dtype: str | None = None
    disk_bytes: int | None = None
    parallel: Any = "auto"
    threads: int | None = None
    engine: str = "auto"
    precision: str = "float32"
    freeze: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    commit_seconds: float = 30.0

    @property
    def dtype(self) -> str:
        """Dtype of weights and of all operators but products: float32 with precision "bfloat16"."""
        return "float32" if self.precision == "bfloat16" else self.precision

    def spill_folder(self, default: Path) -> Path:
        """Return the folder of the spill: ``spill``, else ``$OOCDL_SPILL``, else ``default``."""
        return Path(self.spill or os.environ.get(SPILL_VARIABLE) or default)

    def stored(self) -> dict[str, Any]:
        """Return all of it as plain data, for ``oocdl/training/stored_settings.py`` to read."""
        found = {one.name: plain(getattr(self, one.name)) for one in fields(self)}
        return found | ({"loss": {"heads": found["loss"]}} if isinstance(self.loss, Mapping) else {})


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "loss": _losses,
    "epochs": _whole,
    "steps": lambda name, value: None if value is None else _whole(name, value),
    "batch_size": _whole,
    "accumulate": _whole,
    "shuffle": flag,
    "seed": lambda name, value: _whole(name, value, None),
    "inputs": _mapping(_text),
    "targets": _mapping(_text),
    "dims": _mapping(_whole),
    "scale": _mapping(_finite),
    "logits": _one_of("strict", "auto"),
    "strict": flag,
    "allow_missing_chunks": flag,
    "spill": lambda name, value: None if value is None else str(path_of(name, value)),
    "spill_dtype": lambda name, value: None if value is None else _one_of("bfloat16")(name, value),
    "parallel": _parallel,
    "threads": lambda name, value: None if value is None else _whole(name, value, most=4096),
    "engine": _text,
    "precision": _one_of("float32", "bfloat16", "float64"),
    "freeze": _names,
    "keep": _names,
    "commit_seconds": _seconds,
}


OPTIONS = frozenset({*_CHECKS, "optimizer", "lr", "memory", "disk"})
"""The options of ``fit`` that settings are made of."""


def make_settings(**options: Any) -> Settings:
    """Check the options of ``fit`` and make settings of them.

    Raises InputError for a bad value, and for an unknown option, with the nearest known one.
    """
    for name in options:
        if name not in OPTIONS:
            raise InputError(f"unknown option '{shown(name)}'{nearest(name, sorted(OPTIONS))}")
    values = {name: check(name, options[name]) for name, check in _CHECKS.items() if name in options}
    values["optimizer"] = parse_optimizer(options.get("optimizer", "adam"), options.get("lr"))
    for name in ("memory", "disk"):
        if options.get(name) is not None:
            values[f"{name}_bytes"] = parse_bytes(options[name])
    return Settings(**values)


def plain(value: Any) -> Any:
    """Turn a setting into what JSON can hold: equal settings give equal data, in every process.

    A dataclass becomes its fields and the name of its type; any other function of the step becomes its
    values at some steps.

    >>> plain({"lr": np.float32(0.5), "loss": LOSSES["dice"]})
    {'lr': 0.5, 'loss': {'type': 'Dice', 'smooth': 1e-05, 'ignore_index': None, 'class_weights': None}}
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
