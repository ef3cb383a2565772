"""The options of the command line, made from those of the Python functions, and how their texts are read.

Names, defaults and help texts come from the records of options; a type says how a text is read.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl.callbacks import CSV, MLflow, TensorBoard
from oocdl.cli.optimizing import SCHEDULES, loss_of, optimizer_of
from oocdl.cli.space_options import parse_space
from oocdl.config.options import LossLike, Names, Option, Pieces
from oocdl.errors import InputError
from oocdl.events import Listener
from oocdl.ops.schedules import Rate
from oocdl.report.plan_view import Plan
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.signature import records_of


def told(name: str) -> str:
    """Return what is said of an option of ``fit``, in one sentence."""
    return ALL_OPTIONS[name].first_sentence


Model = Annotated[Path, typer.Argument(help="ONNX file.")]
Data = Annotated[str, typer.Argument(help="Zarr group or HDF5 file, with samples on the first axis.")]
RunDir = Annotated[Path, typer.Argument(help="Run directory.")]
Out = Annotated[Path, typer.Argument(help="Output path.")]
Register = Annotated[
    list[Path] | None,
    typer.Option(help="Python file to run first, to register your own parts; may be repeated."),
]
Spill = Annotated[str | None, typer.Option(help=told("spill"))]
Engine = Annotated[str, typer.Option(help=told("engine"))]
Dims = Annotated[list[str] | None, typer.Option(metavar="NAME=SIZE,..", help="Open dimensions.")]
ARGUMENTS = {"model": Model, "dataset": Data, "out": Out}
IN_PYTHON_ONLY = (
    "self", "client", "scheduler", "callbacks", "rates", "dynamic", "verify", "wait_seconds",
)  # fmt: skip
"""Parameters that no option is made of; for clients, there are ``worker_options``."""


def optimizer_options(
    schedule: Annotated[
        str | None, typer.Option(help=f"Learning-rate schedule over the whole run: {', '.join(SCHEDULES)}.")
    ] = None,
    warm_up: Annotated[int | None, typer.Option(help="Number of warm-up steps.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of sgd.")] = None,
    nesterov: Annotated[bool, typer.Option("--nesterov", help="Use Nesterov momentum with sgd.")] = False,
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay; default: the optimizer's.")
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")] = None,
    class_weights: Annotated[
        str | None,
        typer.Option(help="Weights for cross_entropy, dice, or dice_ce's cross entropy: 1,2.5,2.5."),
    ] = None,
    ignore_index: Annotated[int | None, typer.Option(help="Label to ignore.")] = None,
) -> None:
    """Describe fields of the optimizer and of the loss; only the signature is used."""


Records = Mapping[str, Option]
"""Options by their names in Python."""


def records_for(function: Callable[..., Any]) -> Records:
    """Return what the command line has of a public function."""
    return {name: one for name, one in records_of(function).items() if name not in IN_PYTHON_ONLY}


def with_options(
    *declared: Records | Callable[..., None], leave_out: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options, from records or from the signatures of functions, which stand before its own.

    The command gets their values by name, in its ``**given``.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        apart = {*leave_out, *(p.name for p in kept)}
        shared = [p for one in declared for p in _declared(one) if p.name not in apart]
        needed = [p for p in (*kept, *shared) if p.default is inspect.Parameter.empty]
        parameters = [*needed, *(p for p in (*shared, *kept) if p not in needed)]
        command.__dict__["__signature__"] = own.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return give


def _declared(declared: Records | Callable[..., None]) -> list[inspect.Parameter]:
    if isinstance(declared, Mapping):
        return [_parameter(name, record) for name, record in declared.items()]
    return list(inspect.signature(declared, eval_str=True).parameters.values())


def _parameter(name: str, record: Option) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if name in ARGUMENTS:
        return inspect.Parameter(name, kind, annotation=ARGUMENTS[name])
    form, default, help_text = _form(name, record), record.default, record.first_sentence
    if form.type == list[str]:
        default, help_text = None, f"{help_text[:-1]}; may be repeated."
    if default is inspect.Parameter.empty or isinstance(default, tuple):
        default = form.default
    flags = [f"--{name.replace('_', '-')}"] if default is False else []
    option = typer.Option(*flags, help=help_text, metavar=form.metavar)
    text: Any = form.type | None if default is None else form.type
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[text, option])


def arguments_for(records: Records, given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of options into arguments of the function of the records. Raises InputError."""
    options = {
        name: given[name] if name in ARGUMENTS else _form(name, record).read(name, given[name])
        for name, record in records.items()
        if name in given
    }
    if "schedule" in given:
        options |= optimizer_of(given) | {"loss": loss_of(options["loss"], given)}
    return options


def _as_it_is(name: str, value: Any) -> Any:
    return value


def run_files(paths: Sequence[Path]) -> None:
    """Run files of Python, which register a user's own operators, losses and optimizers.

    Raises InputError if one fails.
    """
    for path in paths:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"--register takes a file of Python, and '{path}' is none")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise InputError(f"--register {path}: {type(error).__name__}: {error}") from error


LOGS: Mapping[str, Callable[[str], Listener]] = {"csv": CSV, "tensorboard": TensorBoard, "mlflow": MLflow}


def logs(given: Sequence[str] | None) -> list[Listener]:
    """Read ``--log``: where else the history of a run is written."""
    found = pairs("log", given) or {}
    for name in found:
        if name not in LOGS:
            raise InputError(f"--log knows no '{name}', only {', '.join(LOGS)}")
    return [LOGS[name](place) for name, place in found.items()]


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str] | None:
    """Read ``name=value`` texts, one each or several with commas, as a mapping; None if there are none.

    >>> pairs("inputs", ["image=t1", "mask=m,age=a"])
    {'image': 't1', 'mask': 'm', 'age': 'a'}
    """
    found: dict[str, str] = {}
    for text in (part for item in given or () for part in item.split(",")):
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"--{option} takes name=value, got '{text}'")
        found[name.strip()] = value.strip()
    return found or None


def numbers(option: str, given: Sequence[str] | None, kind: type[int] | type[float]) -> dict[str, Any] | None:
    """Read ``name=number`` texts as a mapping; None if there are none.

    >>> numbers("dims", ["depth=512"], int)
    {'depth': 512}
    """
    try:
        return {name: kind(value) for name, value in (pairs(option, given) or {}).items()} or None
    except ValueError:
        raise InputError(f"--{option} takes name=number, got '{' '.join(given or ())}'") from None


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


def parse_parallel(text: str) -> Any:
    """Read ``--parallel``: "auto", or the number of pieces by kind of axis.

    >>> parse_parallel("batch=2,space=3x2x1")
    {'batch': 2, 'space': (3, 2, 1)}
    """
    if text == "auto":
        return text
    try:
        asked = pairs("parallel", [text]) or {}
        cuts = {name: tuple(int(count) for count in value.split("x")) for name, value in asked.items()}
    except ValueError:
        raise InputError(f"--parallel takes cuts such as batch=2,space=3x2x1, got '{text}'") from None
    return {name: counts if name == "space" else counts[0] for name, counts in cuts.items()}


def host_counts(text: str) -> list[int]:
    """Read ``--hosts``.

    >>> host_counts("1,2,4")
    [1, 2, 4]
    """
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise InputError(f"--hosts takes whole numbers with commas, got '{text}'") from None


@dataclass(frozen=True)
class Form:
    """The form of a value on the command line."""

    type: Any
    """Of the text, for typer."""
    read: Callable[[str, Any], Any] = _as_it_is
    """Makes the argument of an option's name and its text."""
    metavar: str | None = None
    default: str | None = None
    """Where the default of Python is no text."""


FORMS: Mapping[Any, Form] = {
    bool: Form(bool),
    int: Form(int),
    int | None: Form(int),
    float: Form(float),
    Rate | None: Form(float),
    str | Path | None: Form(Path),
    Plan | str | Path | None: Form(Path),
    LossLike: Form(str, lambda name, text: parse_loss(text), "NAME or OUTPUT=NAME:WEIGHT,.."),
    Pieces: Form(str, lambda name, text: parse_parallel(text), "batch=2,space=3x2x1,channels=2"),
    Names: Form(list[str], lambda name, items: tuple(items or ()), "NAME"),
    Sequence[int]: Form(str, lambda name, text: host_counts(text), "1,2,4,..", "1,2,4,8,16,32,64"),
    Mapping[str, str] | None: Form(list[str], pairs, "NAME=ARRAY"),
    Mapping[str, int] | None: Form(list[str], lambda name, items: numbers(name, items, int), "NAME=SIZE"),
    Mapping[str, float] | None: Form(
        list[str], lambda name, items: numbers(name, items, float), "NAME=FACTOR"
    ),
    Mapping[str, Any]: Form(list[str], lambda name, items: parse_space(items or ()), "OPTION=VALUES"),
}
"""By the types of options; all others are texts."""


def _form(name: str, record: Option) -> Form:
    return TEXT if name == "spill" else FORMS.get(record.type, TEXT)


TEXT = Form(str)
