"""The options of the command line, made from the records of Python's, and arguments made of their values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from oocdl.augmentation.nnunet import Augment
from oocdl.callbacks import CSV, EarlyStopping, MLflow, ModelCheckpoint, TensorBoard
from oocdl.cli import texts
from oocdl.cli.texts import SCHEDULES, flag, numbers, pairs
from oocdl.config import make_settings, nearest, parse_optimizer
from oocdl.config.options import LossLike, Metrics, Names, Normalize, Option, ParamGroups, Pieces, Validation
from oocdl.errors import InputError
from oocdl.events import Listener
from oocdl.host.paths import path_of
from oocdl.ops.losses.overlap_losses import DiceCE
from oocdl.ops.schedules import Rate, WarmUp
from oocdl.report.plan_view import Plan
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.signature import records_of
from oocdl.training.versions import Which
from oocdl.tuning.asked import with_values

Records = Mapping[str, Option]


def typed(text: str, kind: Any = str | None, default: Any = None) -> Option:
    """Make the record of an option that only the command line has."""
    return Option(default, "neither", type=kind, doc=text)


Model = Annotated[Path, typer.Argument(help="ONNX file.")]
DATA = "Zarr group or HDF5 file, with samples on the first axis."
Data = Annotated[str, typer.Argument(help=DATA)]
OptionalData = Annotated[str | None, typer.Argument(help=DATA)]
RunDir = Annotated[Path, typer.Argument(help="Run directory.")]
Out = Annotated[Path, typer.Argument(help="Output path.")]
OptionalOut = Annotated[Path | None, typer.Argument(help="Output path; may be left out with --nifti.")]
Engine = Annotated[str, typer.Option(help=ALL_OPTIONS["engine"].first_sentence)]
Dims = Annotated[list[str] | None, typer.Option(metavar="NAME=SIZE,..", help="Open dimensions.")]
ARGUMENTS = {"model": Model, "dataset": Data, "out": Out}
IN_PYTHON_ONLY = ["self", "client", "scheduler", "callbacks", "rates", "dynamic", "verify", "wait_seconds"]
"""Parameters that no option is made of; for clients, there are those of ``cluster.py``."""
_NAMES = ["overwrite", *(name for name in ALL_OPTIONS if name not in IN_PYTHON_ONLY)]
_ARGUMENT = re.compile(
    rf"(?<![\w.-])(?P<name>{'|'.join(_NAMES)})=(?P<value>\{{[^}}]*\}}|\[[^]]*\]|'[^']*'|\w*)(?![.(\w])"
)
_NO_QUOTES = str.maketrans("", "", "{}'")

OPTIMIZER_FIELDS: Records = {
    "momentum": typed("Momentum of sgd.", float | None),
    "nesterov": typed("Use Nesterov momentum with sgd.", bool, False),
    "weight_decay": typed("Weight decay; default: the optimizer's.", float | None),
    "clip_norm": typed("Clip gradients to this global norm.", float | None),
    "clip_value": typed("Clip elements of gradients to this absolute value.", float | None),
}
LOSS_FIELDS: Records = {
    "class_weights": typed("Weights for cross_entropy, dice, or dice_ce's cross entropy: 1,2.5,2.5."),
    "ignore_index": typed("Label to ignore.", int | None),
    "label_smoothing": typed("Share of each label that all classes get, with cross_entropy.", float | None),
}
FIELDS: Records = {
    "schedule": typed(f"Learning-rate schedule over the whole run: {', '.join(SCHEDULES)}."),
    "warm_up": typed("Number of warm-up steps.", int | None),
    **OPTIMIZER_FIELDS,
    **LOSS_FIELDS,
}
OFF_AT_ZERO = ("momentum", "nesterov", "clip_norm", "clip_value", "label_smoothing")
"""Options that mean "off" where they are 0 or false, whichever the optimizer is."""


def in_flags(text: str) -> str:
    """Return a message with options as they are typed, where it has arguments of Python's.

    >>> in_flags("choose another workdir, or resume='restart'")
    'choose another workdir, or --restart'
    >>> in_flags("pass targets={'logits': ...}, freeze=['a', 'b'] or less memory=")
    'pass --targets logits=..., --freeze a --freeze b or less --memory'
    """
    return _ARGUMENT.sub(lambda found: _as_flag(*found.group("name", "value")), text)


def _as_flag(name: str, value: str) -> str:
    if (name, value) == ("resume", "'restart'"):
        return flag("restart")
    if value in ("True", "False"):
        return flag(name if value == "True" else f"no_{name}")
    if value.startswith("["):
        return " ".join(f"{flag(name)} {each}" for each in re.findall("'([^']*)'", value))
    pairs = re.sub(r"': \('(\w+)', ([\d.]+)\)", r"=\1:\2", value).replace("': ", "=")
    return f"{flag(name)} {pairs.translate(_NO_QUOTES)}".rstrip()


def records_for(function: Callable[..., Any]) -> Records:
    """Return what the command line has of a public function."""
    return {name: one for name, one in records_of(function).items() if name not in IN_PYTHON_ONLY}


def with_options(
    *declared: Records, leave_out: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some records, before its own; their values come in its ``**given``."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        apart = {*leave_out, *(p.name for p in kept)}
        shared = [_parameter(*one) for records in declared for one in records.items() if one[0] not in apart]
        needed = [p for p in (*kept, *shared) if p.default is inspect.Parameter.empty]
        parameters = [*needed, *(p for p in (*shared, *kept) if p not in needed)]
        command.__dict__["__signature__"] = own.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return give


def _parameter(name: str, record: Option) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if name in ARGUMENTS:
        annotation = ARGUMENTS[name] if record.default is not None else OptionalOut
        return inspect.Parameter(name, kind, default=record.default, annotation=annotation)
    form, default, help_text = _form(name, record), record.default, record.first_sentence
    if form.type == list[str]:
        default, help_text = None, f"{help_text[:-1]}; may be repeated."
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    flags = [flag(name)] if default is False else []
    option = typer.Option(*flags, help=help_text, metavar=form.metavar)
    text: Any = form.type | None if default is None else form.type
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[text, option])


def arguments_for(records: Records, given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of options into arguments of the function of the records. Raises InputError."""
    options = {name: _read(name, record, given[name]) for name, record in records.items() if name in given}
    return options if "schedule" not in given else _with_fields(options, given)


def _read(name: str, record: Option, value: Any) -> Any:
    if name in ARGUMENTS:
        return value
    told = texts.table(value) if isinstance(value, str) else None
    return _form(name, record).read(name, value) if told is None else told


def _with_fields(options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``fit`` whose optimizer and loss have the fields that are given."""
    held = {name: given[name] for name in FIELDS if given[name] is not None}
    asked = {name: value for name, value in held.items() if value or name not in OFF_AT_ZERO}
    of_optimizer, of_loss = ([n for n in kind if n in asked] for kind in (OPTIMIZER_FIELDS, LOSS_FIELDS))
    values = {f"optimizer.{name}": asked[name] for name in of_optimizer}
    if asked.keys() - LOSS_FIELDS:
        made = parse_optimizer(options["optimizer"], options["lr"])
        _check_fields(f"--optimizer {options['optimizer']}", made, of_optimizer)
        rate = made.lr
        if "schedule" in asked:
            rate = texts.parse_schedule(asked["schedule"], float(rate))  # type: ignore[arg-type]
        values["optimizer.lr"] = WarmUp(rate, asked["warm_up"]) if "warm_up" in asked else rate
    if "class_weights" in asked:
        asked["class_weights"] = numbers("class_weights", asked["class_weights"], float)
    part = _loss_with(of_loss, options["loss"]) if of_loss else ""
    return with_values(options, values | {f"{part}.{name}": asked[name] for name in of_loss})


def _loss_with(names: Sequence[str], loss: Any) -> str:
    """Return the dotted name of what has these fields of a loss. Raises InputError where nothing has them."""
    if not isinstance(loss, str):
        flags = " and ".join(map(flag, names))
        raise InputError(f"{flags} go with one loss by name; several are for oocdl.losses, in Python")
    made = make_settings(loss=loss).loss
    if isinstance(made, DiceCE):  # as in nnU-Net
        return "loss.cross_entropy"
    _check_fields(f"--loss {loss}", made, names)
    return "loss"


def _check_fields(what: str, record: Any, names: Sequence[str]) -> None:
    known = [field.name for field in fields(record) if field.init] if is_dataclass(record) else []
    for name in names:
        if name not in known:
            others = [held for held in known if held in {*OPTIMIZER_FIELDS, *LOSS_FIELDS}]
            it_has = ", ".join(map(flag, others)) or "none"
            raise InputError(f"{what} has no {flag(name)}{nearest(name, others)}; it has {it_has}")


def one_or_several(name: str, text: str) -> int | Sequence[int]:
    """Read one number, or several; one with a comma behind it is a series of one.

    >>> one_or_several("hosts", "4"), one_or_several("hosts", "2,5"), one_or_several("hosts", "4,")
    (4, (2, 5), (4,))
    """
    found = numbers(name, text.removesuffix(","), int)
    return found if "," in text else found[0]


def word_or_pairs(name: str, items: Sequence[str] | None) -> Any:
    """Return the one word that is given, or what pairs of NAME=WORD map.

    >>> word_or_pairs("normalize", ["ct"]), word_or_pairs("normalize", ["a=ct"])
    ('ct', {'a': 'ct'})
    """
    is_word = items and len(items) == 1 and "=" not in items[0] and texts.table(items[0]) is None
    return items[0] if items and is_word else pairs(name, items)


LOGS: Mapping[str, Callable[[str], Listener]] = {"csv": CSV, "tensorboard": TensorBoard, "mlflow": MLflow}


def logs(given: Sequence[str] | None) -> list[Listener]:
    """Read ``--log``: where else the history of a run is written."""
    found = [one for text in given or () for one in texts.each_pair("log", text)]
    for name, _ in found:
        if name not in LOGS:
            raise InputError(f"--log knows no '{name}', only {', '.join(LOGS)}")
    return [LOGS[name](place) for name, place in found]


ACTING: Records = {
    "monitor": typed("Result of validations to act upon, with --patience or --keep-best.", str, "val_loss"),
    "patience": typed("Stop after so many validations in a row without a better result.", int | None),
    "keep_best": typed("Keep the version of the best validation.", bool, False),
}


def acting(given: Mapping[str, Any]) -> list[Listener]:
    """Make the callbacks of ``ACTING``."""
    monitor, patience = given["monitor"], given["patience"]
    best = given["keep_best"] or patience is not None
    if not best and monitor != ACTING["monitor"].default:
        raise InputError("--monitor goes with --patience or --keep-best; without them nothing looks at it")
    found: list[Listener] = [ModelCheckpoint(monitor)] if best else []
    return found if patience is None else [*found, EarlyStopping(monitor, patience=patience)]


class Form(NamedTuple):
    """The form of a value on the command line: typer's type, and what makes an argument of name and text."""

    type: Any
    read: Callable[[str, Any], Any] = lambda name, value: value
    metavar: str | None = None


FORMS: Mapping[Any, Form] = {
    **{form: Form(kind) for kind in (bool, int, float) for form in (kind, kind | None)},
    bool | Sequence[int]: Form(bool),
    Rate | None: Form(float),
    **dict.fromkeys(
        (str | Path | None, Plan | str | Path | None),  # a Path of "" would be the current folder
        Form(str, lambda name, text: None if text is None else path_of(name, text), "<path>"),
    ),
    LossLike: Form(str, lambda _, text: texts.parse_loss(text), "NAME or OUTPUT=NAME:WEIGHT,.."),
    Pieces: Form(str, lambda _, text: texts.parse_parallel(text), "batch=2,space=3x2x1,channels=2"),
    Validation: Form(str, lambda _, text: texts.parse_validation(text), "DATA or SHARE"),
    Metrics: Form(list[str], lambda _, items: tuple(",".join(items).split(",")) if items else (), "NAME"),
    int | Sequence[int]: Form(str, one_or_several, "N or N,N,.."),
    **dict.fromkeys(
        (Which, Which | Sequence[Which]),
        Form(str, lambda _, text: int(text) if (text or "").isdigit() else text, "last, best, ema or STEP"),
    ),
    Names: Form(list[str], lambda _, items: tuple(items or ()), "NAME"),
    ParamGroups: Form(list[str], lambda _, items: texts.parse_groups(items or ()), "params=NAME,lr=.."),
    Augment: Form(list[str], lambda _, items: texts.parse_augment(items or ()), "nnunet or TRANSFORM(..)"),
    Normalize: Form(list[str], word_or_pairs, "METHOD or ARRAY=METHOD"),
    Sequence[int]: Form(str, lambda name, text: numbers(name, text, int), "1,2,4,.."),
    Sequence[float] | None: Form(str, lambda name, text: text and numbers(name, text, float), "Z,Y,X"),
    Mapping[str, str] | None: Form(list[str], pairs, "NAME=ARRAY"),
    Mapping[str, int] | None: Form(list[str], lambda name, items: pairs(name, items, int), "NAME=SIZE"),
    Mapping[str, float] | None: Form(list[str], lambda name, items: pairs(name, items, float), "NAME=FACTOR"),
    Mapping[str, Any]: Form(list[str], lambda _, items: texts.parse_space(items or ()), "OPTION=VALUES"),
}
"""Option type -> form; options of all other types are texts."""


def _form(name: str, record: Option) -> Form:
    return FORMS.get("" if name == "spill" else record.type, Form(str))
