"""Reads values of options from texts of the command line, and texts from a TOML file (``--config run.toml``).

Errors name the option. Options that are typed take precedence over those of the file.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl import transforms
from oocdl.config import shown
from oocdl.errors import InputError
from oocdl.ops.schedules import (
    Cosine,
    CosineRestarts,
    Exponential,
    MultiStep,
    OneCycle,
    Polynomial,
    Rate,
    Step,
)
from oocdl.space import IntUniform, LogUniform, Uniform
from oocdl.training.signature import hint

SCHEDULES = (
    "cosine", "cosine_restarts:STEPS[:TIMES]", "polynomial[:POWER]", "one_cycle", "exponential:FACTOR",
    "multi_step:STEP:STEP..", "step:EVERY[:FACTOR]",
)  # fmt: skip
KINDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "": Uniform,
    "uniform": Uniform,
    "log": LogUniform,
    "int": IntUniform,
}
RANGE = re.compile(r"(?:(\w+):)?([^.,:][^,:]*?)\.\.([^,:]+)")


def flag(name: str) -> str:
    """Return how an option is typed.

    >>> flag("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Read numbers with commas between them.

    >>> numbers("hosts", "1,2,4", int)
    (1, 2, 4)
    """
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag(option)} takes {what} with commas between them, got '{text}'") from None


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str] | None:
    """Read ``name=value`` texts, one each or several with commas, as a mapping; None if there are none.

    >>> pairs("inputs", ["image=t1", "mask=m,age=a"])
    {'image': 't1', 'mask': 'm', 'age': 'a'}
    """
    found: dict[str, str] = {}
    for text in (part for item in given or () for part in item.split(",")):
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{flag(option)} takes name=value, got '{text}'")
        if name.strip() in found:
            raise InputError(f"{flag(option)} has '{name.strip()}' twice, the second time as '{text}'")
        found[name.strip()] = value.strip()
    return found or None


def sizes(option: str, given: Sequence[str] | None, kind: type[int] | type[float]) -> dict[str, Any] | None:
    """Read ``name=number`` texts as a mapping; None if there are none.

    >>> sizes("dims", ["depth=512"], int)
    {'depth': 512}
    """
    try:
        return {name: kind(value) for name, value in (pairs(option, given) or {}).items()} or None
    except ValueError:
        raise InputError(f"{flag(option)} takes name=number, got '{' '.join(given or ())}'") from None


def parse_loss(text: str) -> Any:
    """Read ``--loss``: one loss by name, or ``output=loss:weight`` for each output.

    >>> parse_loss("dice_ce"), parse_loss("seg=dice:1,edge=bce:0.5")
    ('dice_ce', {'seg': ('dice', 1.0), 'edge': ('bce', 0.5)})
    """
    if "=" not in text:
        return text
    heads: dict[str, tuple[str, float]] = {}
    for output, given in (pairs("loss", [text]) or {}).items():
        name, _, weight = given.partition(":")
        try:
            heads[output] = (name, float(weight or 1))
        except ValueError:
            raise InputError(f"--loss takes output=loss:weight, got '{output}={given}'") from None
    return heads


def parse_validation(text: str | None) -> Any:
    """Read what is validated on: a share, indices, or a dataset.

    >>> [parse_validation(text) for text in ("0.2", ".5", "3,5", "val.zarr", "..", "1,2.5")]
    [0.2, 0.5, (3, 5), 'val.zarr', '..', '1,2.5']
    """
    if text is not None and re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return numbers("validation", text, int) if text and re.fullmatch(r"\d+(,\d+)*", text) else text


def parse_parallel(text: str) -> Any:
    """Read ``--parallel``: "auto", or the number of pieces by kind of axis.

    >>> parse_parallel("batch=2,space=3x2x1")
    {'batch': 2, 'space': (3, 2, 1)}
    """
    if text == "auto":
        return text
    try:
        asked = pairs("parallel", [text]) or {}
        return {
            name: tuple(map(int, value.split("x"))) if name == "space" else int(value)
            for name, value in asked.items()
        }
    except ValueError:
        raise InputError(f"--parallel takes cuts such as batch=2,space=3x2x1, got '{text}'") from None


def parse_schedule(text: str, lr: float) -> Rate:
    """Read ``--schedule``: a schedule that begins with ``lr`` and, where it ends, ends with the run.

    >>> parse_schedule("cosine", 0.1), parse_schedule("step:30:0.5", 0.1)
    (Cosine(lr=0.1, steps=None, minimum=0.0), Step(lr=0.1, every=30, factor=0.5))
    """
    name, *words = text.split(":")
    with suppress(ValueError):
        match name, [float(word) for word in words]:
            case "cosine", []:
                return Cosine(lr)
            case "one_cycle", []:
                return OneCycle(lr)
            case "polynomial", []:
                return Polynomial(lr)
            case "polynomial", [power]:
                return Polynomial(lr, power=power)
            case "step", [every, *factor] if every.is_integer() and len(factor) < 2:
                return Step(lr, int(every), *factor)
            case "multi_step", [_, *_] as steps if all(step.is_integer() for step in steps):
                return MultiStep(lr, tuple(map(int, steps)))
            case "exponential", [factor]:
                return Exponential(lr, factor)
            case "cosine_restarts", [_, *more] as counts if len(more) < 2 and all(
                count.is_integer() for count in counts
            ):
                return CosineRestarts(lr, *map(int, counts))
    raise InputError(f"--schedule takes {', '.join(SCHEDULES)}; got '{text}'")


def parse_groups(given: Sequence[str]) -> list[Any] | None:
    """Read ``--param-groups``: a word, or ``params=pattern`` and fields of the optimizer, values with "|".

    >>> parse_groups(["params=encoder.*|stem.*,lr=1e-4", "no_decay_1d"])
    [{'params': ('encoder.*', 'stem.*'), 'lr': 0.0001}, 'no_decay_1d']
    """
    found: list[Any] = []
    for text in given:
        held = {} if "=" not in text else pairs("param_groups", [text]) or {}
        values = {name: tuple(_value(one) for one in value.split("|")) for name, value in held.items()}
        found.append({n: one if len(one) > 1 else one[0] for n, one in values.items()} or text)
    return found or None


def parse_augment(given: Sequence[str]) -> list[Any] | None:
    """Read ``--augment``: "nnunet", or transforms as one writes them in Python.

    >>> parse_augment(["RandSpatialCrop((64, 64, 32), foreground=0.33)", "nnunet"])
    [RandSpatialCrop(roi_size=(64, 64, 32), foreground=0.33), 'nnunet']
    """
    found: list[Any] = []
    for text in given:
        try:
            call: Any = ast.parse(text, mode="eval").body
            fields = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            found.append(getattr(transforms, call.func.id)(*map(ast.literal_eval, call.args), **fields))
        except AttributeError:  # no transform: the check of the option says so
            found.append(text)
        except (SyntaxError, ValueError, TypeError) as error:
            raise InputError(f"--augment {text}: {error}") from error
    return found or None


def parse_space(given: Sequence[str]) -> dict[str, Any]:
    """Read texts such as ``lr=log:1e-5..1e-2``, ``optimizer.momentum=0..0.9``, ``batch_size=1,2,4``.

    >>> parse_space(["lr=log:1e-5..1e-2", "batch_size=1,2", "optimizer=sgd,adam"])
    {'lr': LogUniform(low=1e-05, high=0.01), 'batch_size': [1, 2], 'optimizer': ['sgd', 'adam']}
    """
    space: dict[str, Any] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not (name and equals and values) or name in space:
            raise InputError(
                f"--space takes an option and its values, once each, such as lr=0.1,0.01; got '{text}'"
            )
        found = RANGE.fullmatch(values)
        if found is None:
            space[name] = [_value(value) for value in values.split(",")]
            continue
        kind, low, high = found[1] or "", _value(found[2]), _value(found[3])
        if kind not in KINDS:
            raise InputError(f"--space {text}: a range is log:a..b, int:a..b or a..b")
        space[name] = KINDS[kind](low, high)
    return space


def _value(text: str) -> Any:
    """A whole number, a number, a flag, or a name.

    >>> [_value(text) for text in ("4", "1e-3", "false", "True", "dice_ce")]
    [4, 0.001, False, True, 'dice_ce']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


LISTS = ("class_weights", "folds", "hosts", "spacing")
"""Options whose lists are typed with commas."""
NEVER = ("config", "help", "as_json", "version")
"""Parameters of commands that no file has."""


def read_config(path: Path) -> dict[str, Any]:
    """Read options by their names, as a command line would have them. Raises InputError."""
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path} is no TOML: {error}") from error
    found = {name.replace("-", "_"): value for name, value in given.items()}
    for name in given:
        if "-" in name and name.replace("-", "_") in given:
            raise InputError(f"--config {path} has '{name}' twice, once with '_'; leave one of them out")
    return found


def as_words(name: str, value: Any) -> Any:
    """Write a value as the command line takes it: what is repeated there is a list here.

    >>> as_words("inputs", {"image": "t1"}), as_words("parallel", {"batch": 2, "space": [3, 2, 1]})
    (['image=t1'], 'batch=2,space=3x2x1')
    >>> as_words("loss", {"seg": ["dice", 0.5], "edge": "bce"}), as_words("class_weights", [1, 2.5])
    ('seg=dice:0.5,edge=bce', '1,2.5')
    >>> as_words("param_groups", [{"params": ["a.*", "b.*"], "lr": 0.01}, "no_decay_1d"])
    ['params=a.*|b.*,lr=0.01', 'no_decay_1d']
    >>> as_words("space", {"lr": "log:1e-5..1e-2", "shuffle": [True, False]}), as_words("batch_size", 2)
    (['lr=log:1e-5..1e-2', 'shuffle=true,false'], 2)
    >>> as_words("validation", [0, 1]), as_words("validation_freq", [3])
    ('0,1', '3,')
    """
    if name in ("param_groups", "augment"):
        groups = value if isinstance(value, list) else [value]
        return [
            ",".join(f"{key}={_joined(held, '|')}" for key, held in group.items())
            if isinstance(group, Mapping)
            else group
            for group in groups
        ]
    between = {"parallel": "x", "loss": ":"}.get(name, ",")
    if isinstance(value, Mapping):
        words = [f"{key}={_joined(held, between)}" for key, held in value.items()]
        return ",".join(words) if name in ("parallel", "loss") else words
    if name == "validation" and isinstance(value, list):  # a share is no list of one
        return _joined(value, ",") if value and all(type(row) is int for row in value) else value
    if name == "validation_freq" and isinstance(value, list):
        return f"{_joined(value, ',')},"
    return _joined(value, ",") if name in LISTS and isinstance(value, list) else value


def _joined(value: Any, between: str) -> str:
    items = value if isinstance(value, list) else [value]
    return between.join(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Make what is in a file the defaults of a command.

    A file may have options of all commands that take one, so that one file does for ``plan`` and ``fit``.
    """
    if path is None or context.resilient_parsing:
        return path
    root = context.find_root().command
    commands = getattr(root, "commands", {}).values()
    known = {
        str(parameter.name)
        for command in commands
        if any(parameter.name == "config" for parameter in command.params)
        for parameter in command.params
    }.difference(NEVER)
    found = read_config(path)
    for name in found:
        if name not in known:
            raise InputError(
                f"--config {path} has '{shown(name)}', which is no option{hint(name, sorted(known))}"
            )
    own = {str(parameter.name): parameter for parameter in context.command.params}
    context.default_map = {
        name: _typed(f"--config {path}: '{name}'", as_words(name, value), own[name])
        for name, value in found.items()
        if name in own
    }
    return path


def _typed(what: str, words: Any, option: Any) -> Any:
    """Return words as they come from a shell, which writes a home in full; one of a list is a list.

    Raises InputError for a value of a kind that the option does not have, such as 1 for a flag.
    """
    is_repeated, is_flag = getattr(option, "multiple", False), getattr(option, "is_flag", False)
    items = words if isinstance(words, list) and is_repeated else [words]
    for item in items:
        if not isinstance(item, bool if is_flag else int | float | str) or isinstance(item, bool) != is_flag:
            takes = "true or false" if is_flag else "texts" if is_repeated else "one text or number"
            raise InputError(f"{what} takes {takes}, got {shown(words if items is words else items[0])}")
    typed = [os.path.expanduser(item) if str(item).startswith("~/") else item for item in items]
    return typed if is_repeated else typed[0]


ConfigFile = Annotated[
    Path | None,
    typer.Option(is_eager=True, callback=_use, help="TOML file of options; typed options take precedence."),
]
