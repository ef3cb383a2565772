"""The options of the command line: their names, help texts and defaults, and how their texts are read.

What ``fit`` and ``plan`` share is declared once, by the parameters of ``training_options``.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl.callbacks import CSV, MLflow, TensorBoard
from oocdl.cli.optimizing import SCHEDULES, loss_of, optimizer_of
from oocdl.errors import InputError
from oocdl.events import Listener
from oocdl.ops.loss_functions import LOSSES
from oocdl.ops.optimizers import OPTIMIZERS
from oocdl.training.signature import first_sentence
from oocdl.training.trainer import fit


def told(name: str) -> str:
    """Return what ``fit`` says of an option, in one sentence."""
    return first_sentence(fit, name)


Model = Annotated[Path, typer.Argument(help="ONNX file.")]
Data = Annotated[str, typer.Argument(help="Zarr group or HDF5 file, with samples on the first axis.")]
RunDir = Annotated[Path, typer.Argument(help="Run directory.")]
Out = Annotated[Path, typer.Argument(help="Output path.")]
Register = Annotated[
    list[Path] | None,
    typer.Option(help="Python file to run first, to register your own parts; may be repeated."),
]
Loss = Annotated[str, typer.Option(help=f"{', '.join(LOSSES)}; or output=loss:weight,..")]
Optimizer = Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")]
Rate = Annotated[float | None, typer.Option(help=told("lr"))]
Momentum = Annotated[float | None, typer.Option(help="Momentum of sgd.")]
Nesterov = Annotated[bool, typer.Option("--nesterov", help="Use Nesterov momentum with sgd.")]
Decay = Annotated[float | None, typer.Option(help="Weight decay; default: the optimizer's.")]
Clip = Annotated[float | None, typer.Option(help="Clip gradients to this global norm.")]
Schedule = Annotated[
    str | None, typer.Option(help=f"Learning-rate schedule over the whole run: {', '.join(SCHEDULES)}.")
]
WarmSteps = Annotated[int | None, typer.Option(help="Number of warm-up steps.")]
ClassWeights = Annotated[
    str | None, typer.Option(help="Weights for cross_entropy, dice, or dice_ce's cross entropy: 1,2.5,2.5.")
]
Ignored = Annotated[int | None, typer.Option(help="Label to ignore.")]
Epochs = Annotated[int, typer.Option(help=told("epochs"))]
Steps = Annotated[int | None, typer.Option(help=told("steps"))]
BatchSize = Annotated[int, typer.Option(help=told("batch_size"))]
Accumulate = Annotated[int, typer.Option(help=told("accumulate"))]
Shuffle = Annotated[bool, typer.Option(help=told("shuffle"))]
Seed = Annotated[int, typer.Option(help=told("seed"))]
Memory = Annotated[str | None, typer.Option(help=told("memory"))]
Spill = Annotated[str | None, typer.Option(help=told("spill"))]
SpillDtype = Annotated[str | None, typer.Option(help=told("spill_dtype"))]
Disk = Annotated[str | None, typer.Option(help=told("disk"))]
Inputs = Annotated[list[str] | None, typer.Option(help="Model input=dataset array; may be repeated.")]
Targets = Annotated[list[str] | None, typer.Option(help="Model output=dataset array; may be repeated.")]
Dims = Annotated[list[str] | None, typer.Option(help="Open dimension=size; may be repeated.")]
Scale = Annotated[list[str] | None, typer.Option(help="Dataset array=factor; may be repeated.")]
Logits = Annotated[str, typer.Option(help=told("logits"))]
Missing = Annotated[bool, typer.Option(help=told("allow_missing_chunks"))]
Strict = Annotated[bool, typer.Option("--strict", help=told("strict"))]
Parallel = Annotated[str, typer.Option(help='Minimum pieces per axis: "batch=2,space=3x2x1,channels=2".')]
Threads = Annotated[int | None, typer.Option(help=told("threads"))]
Engine = Annotated[str, typer.Option(help=told("engine"))]
Precision = Annotated[str, typer.Option(help=told("precision"))]
Freeze = Annotated[list[str] | None, typer.Option(help="Pattern of weights to leave unchanged.")]
Keep = Annotated[list[str] | None, typer.Option(help="Activation, or grad/WEIGHT, to keep in the run.")]
Commit = Annotated[float, typer.Option(help=told("commit_seconds"))]
Workdir = Annotated[Path | None, typer.Option(help=told("workdir"))]


def training_options(
    model: Model,
    dataset: Data,
    loss: Loss = "cross_entropy",
    optimizer: Optimizer = "adam",
    lr: Rate = None,
    schedule: Schedule = None,
    warm_up: WarmSteps = None,
    momentum: Momentum = None,
    nesterov: Nesterov = False,
    weight_decay: Decay = None,
    clip_norm: Clip = None,
    class_weights: ClassWeights = None,
    ignore_index: Ignored = None,
    epochs: Epochs = 1,
    steps: Steps = None,
    batch_size: BatchSize = 1,
    accumulate: Accumulate = 1,
    shuffle: Shuffle = True,
    seed: Seed = 0,
    memory: Memory = None,
    spill: Spill = None,
    disk: Disk = None,
    spill_dtype: SpillDtype = None,
    inputs: Inputs = None,
    targets: Targets = None,
    dims: Dims = None,
    scale: Scale = None,
    logits: Logits = "strict",
    allow_missing_chunks: Missing = True,
    strict: Strict = False,
    parallel: Parallel = "auto",
    threads: Threads = None,
    engine: Engine = "auto",
    precision: Precision = "float32",
    freeze: Freeze = None,
    keep: Keep = None,
) -> None:
    """What ``fit`` and ``plan`` take, in the order of their help; only the signature is used."""


def with_options(*declared: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the parameters of functions that declare options, which stand before its own.

    The command gets their values by name, in its ``**given``.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        shared = [p for one in declared for p in inspect.signature(one, eval_str=True).parameters.values()]
        parameters = sorted([*shared, *kept], key=lambda p: p.default is not inspect.Parameter.empty)
        command.__dict__["__signature__"] = own.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
        return command

    return give


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of ``training_options`` into arguments of ``oocdl.fit`` and ``oocdl.plan``."""
    plain = (
        "model",
        "dataset",
        "epochs",
        "steps",
        "batch_size",
        "accumulate",
        "shuffle",
        "seed",
        "memory",
        "spill",
        "disk",
        "spill_dtype",
        "logits",
        "strict",
        "allow_missing_chunks",
        "threads",
        "engine",
        "precision",
    )
    options = {name: params[name] for name in plain} | optimizer_of(params)
    options["loss"] = loss_of(parse_loss(params["loss"]), params)
    options["parallel"] = parse_parallel(params["parallel"])
    for name in ("inputs", "targets"):
        options[name] = pairs(name, params[name])
    options["dims"] = numbers("dims", params["dims"], int)
    options["scale"] = numbers("scale", params["scale"], float)
    for name in ("freeze", "keep"):
        options[name] = tuple(params[name] or ())
    return options


def host_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of ``training_options`` into arguments of ``oocdl.simulate``.

    Raises InputError for options that do not go with it.
    """
    if params["threads"] is not None:
        raise InputError("give --cores, the compute threads of each host, not --threads")
    if params["accumulate"] != 1:
        raise InputError("a step of one pass is simulated: leave --accumulate out")
    left_out = ("threads", "accumulate")
    return {name: value for name, value in settings(params).items() if name not in left_out}


def varied_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the values of ``training_options`` into arguments of ``oocdl.search``: no epochs by default."""
    found = settings(params)
    return {**found, "epochs": None if found["epochs"] == 1 else found["epochs"]}


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
