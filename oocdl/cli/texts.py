"""Reads values of options from texts of the command line, and from a TOML file (``--config run.toml``)."""

from __future__ import annotations

import ast
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl import transforms
from oocdl.config import shown
from oocdl.errors import InputError
from oocdl.ops import schedules
from oocdl.space import IntUniform, LogUniform, Uniform
from oocdl.training.signature import hint

SCHEDULES = (
    "cosine", "cosine_restarts:STEPS[:TIMES]", "polynomial[:POWER]", "one_cycle", "exponential:FACTOR",
    "multi_step:STEP:STEP..", "step:EVERY[:FACTOR]",
)  # fmt: skip
KINDS: Mapping[str | None, Callable[[Any, Any], Any]] = {
    None: Uniform, "uniform": Uniform, "log": LogUniform, "int": IntUniform
}  # fmt: skip
RANGE = re.compile(r"(?:(\w+):)?([^.,:][^,:]*?)\.\.([^,:]+)")


def flag(name: str) -> str:
    """Return how an option is typed.

    >>> flag("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def table(text: str) -> Any:
    """Return the list or table that a text is in JSON, as those of a file come; None for other texts."""
    if text.startswith(("[", "{")):
        with suppress(ValueError):
            return json.loads(text)
    return None


def numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Read numbers with commas between them.

    >>> numbers("hosts", "1,2,4", int)
    (1, 2, 4)
    """
    try:
        return tuple(kind(number) for number in text.strip("[]").split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{flag(option)} takes {what} with commas between them, got '{text}'") from None


def each_pair(option: str, text: str) -> Iterator[tuple[str, Any]]:
    """Read ``name=value`` texts with commas between them, or a table."""
    told = table(text)
    if isinstance(told, dict):
        yield from told.items()
        return
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise InputError(f"{flag(option)} takes name=value, got '{part}'")
        yield name.strip(), value.strip()


def pairs(
    option: str, given: Sequence[str] | None, kind: type[int] | type[float] | None = None
) -> dict[str, Any] | None:
    """Read ``name=value`` texts, one each or several with commas, as a mapping; None if there are none.

    >>> pairs("inputs", ["image=t1", "mask=m,age=a"]), pairs("dims", ["depth=512"], int)
    ({'image': 't1', 'mask': 'm', 'age': 'a'}, {'depth': 512})
    """
    found: dict[str, Any] = {}
    for name, value in (pair for text in given or () for pair in each_pair(option, text)):
        if name in found:
            raise InputError(f"{flag(option)} has '{name}' twice, the second time as '{name}={value}'")
        try:
            found[name] = value if kind is None else kind(str(value))
        except ValueError:
            raise InputError(f"{flag(option)} takes name=number, got '{name}={value}'") from None
    return found or None


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
        asked = {name: value.split("x") for name, value in (pairs("parallel", [text]) or {}).items()}
        return {n: tuple(map(int, counts)) if n == "space" else int(*counts) for n, counts in asked.items()}
    except (ValueError, TypeError):  # a second count of another axis
        raise InputError(f"--parallel takes cuts such as batch=2,space=3x2x1, got '{text}'") from None


def parse_schedule(text: str, lr: float) -> schedules.Rate:
    """Read ``--schedule``: a schedule that begins with ``lr`` and, where it ends, ends with the run.

    >>> parse_schedule("cosine", 0.1), parse_schedule("step:30:0.5", 0.1)
    (Cosine(lr=0.1, steps=None, minimum=0.0), Step(lr=0.1, every=30, factor=0.5))
    """
    name, *words = text.split(":")
    with suppress(ValueError):
        match name, [float(word) for word in words]:
            case "cosine", []:
                return schedules.Cosine(lr)
            case "one_cycle", []:
                return schedules.OneCycle(lr)
            case "polynomial", [*power] if len(power) < 2:
                return schedules.Polynomial(lr, None, *power)
            case "step", [every, *factor] if every.is_integer() and len(factor) < 2:
                return schedules.Step(lr, int(every), *factor)
            case "exponential", [factor]:
                return schedules.Exponential(lr, factor)
            case "multi_step", [_, *_] as steps if all(map(float.is_integer, steps)):
                return schedules.MultiStep(lr, tuple(map(int, steps)))
            case "cosine_restarts", [_, *more] as counts if all(map(float.is_integer, counts)):
                if len(more) < 2:
                    return schedules.CosineRestarts(lr, *map(int, counts))
    raise InputError(f"--schedule takes {', '.join(SCHEDULES)}; got '{text}'")


def parse_groups(given: Sequence[str]) -> list[Any] | None:
    """Read ``--param-groups``: a word, or ``params=pattern`` and fields of the optimizer, values with "|".

    >>> parse_groups(["params=encoder.*|stem.*,lr=1e-4", "no_decay_1d"])
    [{'params': ('encoder.*', 'stem.*'), 'lr': 0.0001}, 'no_decay_1d']
    """
    found: list[Any] = []
    for text in given:
        if (told := table(text)) is not None or "=" not in text:
            found.append(told or text)
            continue
        held = pairs("param_groups", [text]) or {}
        values = {name: tuple(_value(one) for one in value.split("|")) for name, value in held.items()}
        found.append({name: one if len(one) > 1 else one[0] for name, one in values.items()})
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
        told = table(text) or {name: values}
        if "" in (*told, *told.values()) or space.keys() & told.keys():
            told = "an option and its values, once each, such as lr=0.1,0.01"
            raise InputError(f"--space takes {told}; got '{text}'")
        space |= {n: held if isinstance(held, list) else _values(n, str(held)) for n, held in told.items()}
    return space


def _values(name: str, text: str) -> Any:
    found = RANGE.fullmatch(text)
    if found is None:
        return [_value(value) for value in text.split(",")]
    if found[1] not in KINDS:
        raise InputError(f"--space {name}={text}: a range is log:a..b, int:a..b or a..b")
    return KINDS[found[1]](_value(found[2]), _value(found[3]))


def _value(text: str) -> Any:
    """A whole number, a number, a flag, or a name.

    >>> [_value(text) for text in ("4", "1e-3", "false", "True", "dice_ce")]
    [4, 0.001, False, True, 'dice_ce']
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


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
    for name in given:
        if "-" in name and name.replace("-", "_") in given:
            raise InputError(f"--config {path} has '{name}' twice, once with '_'; leave one of them out")
    return {name.replace("-", "_"): value for name, value in given.items()}


def _use(context: typer.Context, path: Path | None) -> Path | None:
    """Make what is in a file the defaults of a command; a file may have options of other commands, too."""
    if path is None or context.resilient_parsing:
        return path
    commands = getattr(context.find_root().command, "commands", {}).values()
    names = [{str(parameter.name) for parameter in command.params} for command in commands]
    known = sorted(set().union(*(its for its in names if "config" in its)).difference(NEVER))
    found = read_config(path)
    for name in found:
        if name not in known:
            raise InputError(f"--config {path} has '{shown(name)}', which is no option{hint(name, known)}")
    own = {str(parameter.name): parameter for parameter in context.command.params}
    mine = {name: value for name, value in found.items() if name in own}
    context.default_map = {n: _typed(f"--config {path}: '{n}'", value, own[n]) for n, value in mine.items()}
    return path


def _typed(what: str, value: Any, option: Any) -> Any:
    """Return a value as it is typed: a home in full, lists and tables as JSON. InputError for other kinds."""
    is_repeated, is_flag = getattr(option, "multiple", False), getattr(option, "is_flag", False)
    items, typed = value if isinstance(value, list) and is_repeated else [value], []
    kinds = (bool,) if is_flag else (int, float, str, list, dict)
    for item in items:
        if not isinstance(item, kinds) or isinstance(item, bool) != is_flag:
            takes = "true or false" if is_flag else "texts" if is_repeated else "one text or number"
            raise InputError(f"{what} takes {takes}, got {shown(value if items is value else items[0])}")
        if isinstance(item, list | dict):
            item = json.dumps(item, default=str)
        typed.append(os.path.expanduser(item) if isinstance(item, str) and item.startswith("~/") else item)
    return typed if is_repeated else typed[0]


CONFIG = "TOML file of options; typed options take precedence."
ConfigFile = Annotated[Path | None, typer.Option(is_eager=True, callback=_use, help=CONFIG)]
