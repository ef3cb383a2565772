"""Checks of options: each takes a name and what is given; returns the value, or raises InputError."""

from __future__ import annotations

import difflib
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.augmentation.crop import RandSpatialCrop
from oocdl.augmentation.normalization import METHODS
from oocdl.augmentation.transform import Transform
from oocdl.errors import InputError
from oocdl.host.paths import path_of
from oocdl.ops.loss_functions import LOSSES, Loss
from oocdl.ops.losses.deep_supervision import DeepSupervision
from oocdl.ops.metric_functions import METRICS, Metric
from oocdl.ops.optimizers import OPTIMIZERS, SGD, Optimizer
from oocdl.ops.own_loss import file_loss
from oocdl.ops.param_groups import NO_DECAY, ParamGroups

Check = Callable[[str, Any], Any]

BYTES_BY_UNIT = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BYTES_BY_UNIT |= {f"{unit}i": 1 << shift for unit, shift in zip("KMGT", (10, 20, 30, 40), strict=True)}
MOST_THREADS, MOST_PORT = 4096, 65535


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
        number = finite("a size", size)
    if number > sys.maxsize:
        raise InputError(f"a size of {shown(size)} is more than any machine has")
    if number < 1:
        raise InputError(f"a size must be at least one byte, got {shown(size)}")
    return int(number)


def parse_optimizer(optimizer: str | Optimizer, lr: Any = None) -> Optimizer:
    """Return an optimizer, given by name (``lr`` goes with it) or as an object. Raises InputError."""
    if isinstance(optimizer, str):
        kind = OPTIMIZERS.get(optimizer) or OPTIMIZERS.get(optimizer.lower())
        if kind is None:
            others = f"{', '.join(OPTIMIZERS)}, or register your own with oocdl.optim.register"
            word = f"'{shown(optimizer)}'{nearest(optimizer, OPTIMIZERS)}"
            raise InputError(f"there is no optimizer {word}; choose one of: {others}")
        rate = lr if lr is not None else 0.01 if kind is SGD else kind().lr
        made: Optimizer = kind(lr=rate if callable(rate) else finite("lr", rate))
    elif not isinstance(optimizer, Optimizer):
        known = ", ".join(OPTIMIZERS)
        raise InputError(f"optimizer {shown(optimizer)} is neither a name ({known}) nor of oocdl.optim")
    elif lr is not None:
        raise InputError("lr goes with an optimizer given by name; this one has its own")
    else:
        made = with_fields(optimizer)
    if not callable(made.lr) and finite("lr", made.lr) < 0:
        raise InputError(f"lr must not be negative, got {made.lr}")
    return made


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


def finite(name: str, value: Any) -> float:
    """Check a finite number."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {shown(value)}")
    return number


def whole(name: str, value: Any, least: int | None = 1, most: int = sys.maxsize) -> int:
    """Check a whole number from ``least`` to ``most``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {shown(value)}")
    if least is not None and number < least:
        raise InputError(f"{name} must be at least {least}, got {shown(number)}")
    if abs(number) > most:
        raise InputError(f"{name} must be at most {most}, got {shown(number)}")
    return number


def whole_or_several(name: str, value: Any) -> int | tuple[int, ...]:
    """Check a whole number from 1, or several."""
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(whole(name, item) for item in value) if several else whole(name, value)


def validation(name: str, value: Any) -> Any:
    """Check what is validated on: a share, or indices; a dataset is checked where it is opened."""
    if isinstance(value, Real) and not isinstance(value, bool):
        share = finite(name, value)
        if not 0 < share < 1:
            raise InputError(f"{name} takes a share of the samples between 0 and 1, got {shown(value)}")
        return share
    if isinstance(value, Sequence | np.ndarray | range) and not isinstance(value, str):
        rows = tuple(sorted(whole(f"an index of {name}", row, least=0) for row in value))
        if not rows or len(set(rows)) < len(rows):
            raise InputError(f"{name} takes indices of samples, each once, got {shown(value)}")
        return rows
    return str(value) if isinstance(value, Path) else value


def metrics(name: str, value: Any) -> tuple[Metric, ...]:
    """Check one metric or several, each by name or as an object."""
    items = (value,) if isinstance(value, str | Metric) else value
    if not isinstance(items, Iterable):
        raise InputError(f"{name} takes metrics by name, got {shown(value)}")
    found: dict[str, Metric] = {}
    for item in items:
        metric = METRICS.get(item) if isinstance(item, str) else item
        if not isinstance(metric, Metric):
            known = f"{nearest(item, METRICS)}; choose of: {', '.join(METRICS)}, or register your own"
            raise InputError(f"there is no metric {shown(repr(item))}{known}")
        if metric.name in found:
            raise InputError(f"{name} has '{metric.name}' twice")
        found[metric.name] = with_fields(metric)
    return tuple(found.values())


def augment(name: str, value: Any) -> str | tuple[Transform | str, ...] | None:
    """Check transforms, the name of nnU-Net's among them; a crop comes first."""
    items = _several(name, value, Transform, "transforms of oocdl.transforms or 'nnunet'", "nnunet")
    if any(isinstance(one, RandSpatialCrop) for one in items[1:]):
        raise InputError(f"{name}: RandSpatialCrop stands once, in front of all other transforms")
    return "nnunet" if items == ("nnunet",) else items or None


def normalize(name: str, value: Any) -> str | dict[str, str]:
    """Check a method of normalisation, or a mapping from array to method."""
    method = one_of(*METHODS)
    check = mapping_of(method) if isinstance(value, Mapping) else method
    checked: str | dict[str, str] = check(name, value)
    return checked


def _several(name: str, value: Any, kind: type, takes: str, word: str | None = None) -> tuple[Any, ...]:
    items = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    for item in items:
        if not isinstance(item, kind) and not (isinstance(item, str) and item == word):
            raise InputError(f"{name} takes {takes}, got {shown(item)}")
    return items


def flag(name: str, value: Any) -> bool:
    """Check what is on or off: numbers are neither."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def seconds(name: str, value: Any) -> float:
    """Check a number of seconds, which may be infinite."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) >= 0:
        raise InputError(f"{name} must be a number of seconds, got {shown(value)}")
    return float(value)


def text(name: str, value: Any) -> str:
    """Check a name."""
    if not isinstance(value, str):
        raise InputError(f"{name} takes a name, got {shown(value)}")
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """Check one name or several."""
    return _several(name, value, str, "names")


def anything(name: str, value: Any) -> Any:
    """Take a value as it is: it is checked where it is used, with others."""
    return value


def one_of(*known: str) -> Check:
    """Return the check of a word that is one of these."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise InputError(f"{name} must be {' or '.join(map(repr, known))}, got {shown(value)}")
        return value

    return check


def mapping_of(item: Check) -> Check:
    """Return the check of a mapping from names to what ``item`` checks."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise InputError(f"{name} takes a mapping by name, got {shown(value)}")
        return {str(key): item(f"{name}['{shown(key)}']", held) for key, held in value.items()}

    return check


def pieces(name: str, value: Any) -> Any:
    """Check ``parallel``: "auto", or numbers of pieces by kind of axis."""
    if isinstance(value, str) and value == "auto":
        return value
    if not isinstance(value, Mapping):
        raise InputError(f"{name} takes 'auto' or a mapping like {{'space': (2, 2, 1)}}, got {shown(value)}")
    known, checked = ("batch", "space", "channels"), dict[str, Any]()
    for key, count in value.items():
        if key not in known:
            hint = f"{nearest(key, known)}; it takes {', '.join(known)}"
            raise InputError(f"parallel does not know '{shown(key)}'{hint}")
        counts = count if key == "space" and isinstance(count, tuple | list) else (count,)
        numbers = tuple(whole(f"parallel['{key}']", number) for number in counts)
        checked[key] = numbers if key == "space" else numbers[0]
    return checked


def losses(name: str, value: Any) -> Loss | dict[str, tuple[Loss, float]]:
    """Check a loss, or a mapping from output to loss or (loss, weight)."""
    if not isinstance(value, Mapping):
        return _loss(value)
    if not value:
        raise InputError("loss is empty: name one, or a mapping output -> (loss, weight)")
    heads = {}
    for output, given in value.items():
        pair = tuple(given) if isinstance(given, tuple | list) else (given, 1.0)
        if len(pair) != 2:
            raise InputError(f"loss['{shown(output)}'] must be a loss or (loss, weight), got {shown(given)}")
        heads[str(output)] = (_loss(pair[0]), finite(f"the weight of loss['{shown(output)}']", pair[1]))
    return heads


def _loss(value: Any) -> Loss:
    if isinstance(value, str) and value in LOSSES:
        value = LOSSES[value]
    if str(value).endswith(".onnx"):
        return file_loss(path_of("loss", value))
    if not isinstance(value, Loss):
        word = f"'{shown(value)}'" if isinstance(value, str) else f"like {shown(value)}"
        others = f"choose one of: {', '.join(LOSSES)}, an ONNX file, or an object of oocdl.losses"
        if callable(value):
            made = "oocdl.from_torch(loss, (prediction, target), 'loss.onnx')"
            others += f"; a PyTorch module is written as such a file by {made}"
        raise InputError(f"there is no loss {word}{nearest(value, LOSSES)}; {others}")
    value = replace(value, loss=_loss(value.loss)) if isinstance(value, DeepSupervision) else value
    found: Loss = with_fields(value)
    return found


def with_fields(record: Any) -> Any:
    """Check the fields of a loss, metric or optimizer by their types; numbers may be NumPy's or PyTorch's."""
    given = {one.name: (str(one.type), getattr(record, one.name)) for one in fields(record) if one.init}
    what = type(record).__name__
    return replace(record, **{name: _field(f"{name} of {what}", *held) for name, held in given.items()})


def _numbers(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _field(name: str, kind: str, value: Any) -> Any:
    value = _numbers(value)
    if kind == "Any" or (kind == "Rate" and callable(value)) or (value is None and "None" in kind):
        return value
    if is_dataclass(value) and type(value).__name__ == kind:
        return with_fields(value)
    if isinstance(value, tuple | list) and "tuple" in kind:
        return tuple(finite(name, _numbers(item)) for item in value)
    checks: dict[str, Check] = {"float": finite, "Rate": finite, "bool": flag, "str": text}
    checks["int"] = lambda name, value: whole(name, value, least=None)
    check = checks.get(kind.partition(" ")[0])
    if check is None:
        wanted = "several numbers" if "tuple" in kind else f"an object of oocdl.losses.{kind}"
        raise InputError(f"{name} takes {wanted}, got {shown(value)}")
    return check(name, value)


def decay(name: str, value: Any) -> float:
    """Check the decay of a moving average."""
    number = finite(name, value)
    if not 0 <= number < 1:
        raise InputError(f"{name} must be at least 0 and less than 1, such as 0.999, got {shown(value)}")
    return number


def param_groups(name: str, value: Any) -> ParamGroups | None:
    """Check groups of weights: mappings with patterns, and the word that says which weights do not decay."""
    items = (value,) if isinstance(value, str | Mapping) else value
    if not isinstance(items, Iterable):
        raise InputError(f"{name} takes a list of mappings, got {shown(value)}")
    found: list[Mapping[str, Any] | str] = []
    for item in items:
        if isinstance(item, str) and item == NO_DECAY:
            found.append(item)
            continue
        if not isinstance(item, Mapping) or not item.get("params"):
            raise InputError(
                f"{name} takes '{NO_DECAY}' and mappings such as {{'params': 'encoder.*', 'lr': 1e-4}}, "
                f"got {shown(item)}"
            )
        given = {str(key): held for key, held in item.items()}
        found.append({**given, "params": names(f"{name}['params']", item["params"])})
    return tuple(found) or None


def groups_with_fields(optimizer: Optimizer, groups: ParamGroups | None) -> ParamGroups | None:
    """Check the fields of an optimizer that groups have by their types, as ``with_fields`` does its own."""
    kinds = {one.name: str(one.type) for one in fields(optimizer) if one.init}

    def checked(given: Mapping[str, Any]) -> dict[str, Any]:
        known = {n: _field(f"param_groups['{n}']", kinds[n], held) for n, held in given.items() if n in kinds}
        return {**given, **known}

    return groups and tuple(one if isinstance(one, str) else checked(one) for one in groups)
