"""The command line: one verb each, the words of ``fit`` as options. Parses, calls, prints.

Every error is one line on stderr; the exit code is the error's own (2 input, 3 store,
4 resources), 130 after Ctrl-C. ``--debug`` anywhere adds the traceback.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oocdl.cli.demo import run_demo
from oocdl.cli.info import machine_tables, shape_text, size_text, tables_of
from oocdl.config import parse_bytes
from oocdl.errors import InputError, OocdlError
from oocdl.host.limits import default_budget_bytes
from oocdl.report.printer.show import What
from oocdl.report.progress import counted, show_progress
from oocdl.training.trainer import fit as fit_run
from oocdl.training.trainer import open as open_run
from oocdl.training.trainer import plan as plan_run

INTERRUPTED = 130
app = typer.Typer(
    help="Trains an ONNX model on a Zarr or HDF5 dataset within a memory budget, exactly.",
    epilog="--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[Path, typer.Argument(help="ONNX file.")]
Data = Annotated[str, typer.Argument(help="Zarr group or HDF5 file; arrays with the sample axis first.")]
RunDir = Annotated[Path, typer.Argument(help="Run directory.")]
Out = Annotated[Path, typer.Argument(help="What to write.")]
Loss = Annotated[
    str, typer.Option(help="cross_entropy, dice, dice_ce, bce, mse, l1; or output=loss:weight,..")
]
Optimizer = Annotated[str, typer.Option(help="sgd, adam or adamw.")]
Rate = Annotated[float | None, typer.Option(help="Learning rate; default: the optimizer's.")]
Epochs = Annotated[int, typer.Option(help="Epochs of the whole run.")]
Steps = Annotated[int | None, typer.Option(help="Steps of the whole run, instead of --epochs.")]
BatchSize = Annotated[int, typer.Option(help="Samples of one pass (of one step, without --accumulate).")]
Accumulate = Annotated[
    int, typer.Option(help="Passes of one step: gradients of so many batches make an update.")
]
Shuffle = Annotated[bool, typer.Option(help="Draw samples in a new order each epoch.")]
Seed = Annotated[int, typer.Option(help="Of shuffling and dropout.")]
Memory = Annotated[
    str | None, typer.Option(help="Memory budget of the process, such as 2GiB; default: a safe share.")
]
Spill = Annotated[
    str | None, typer.Option(help="Folder for what does not fit; default: $OOCDL_SPILL, or in the run.")
]
SpillDtype = Annotated[
    str | None, typer.Option(help="bfloat16: activations may be rounded to 16 bits between layers.")
]
Disk = Annotated[
    str | None, typer.Option(help="Limit of spill and run directory, such as 50GiB; default: what is free.")
]
Inputs = Annotated[list[str] | None, typer.Option(help="Model input=dataset array; may be repeated.")]
Targets = Annotated[list[str] | None, typer.Option(help="Model output=dataset array; may be repeated.")]
Dims = Annotated[list[str] | None, typer.Option(help="Open dimension=size; may be repeated.")]
Scale = Annotated[list[str] | None, typer.Option(help="Dataset array=factor; may be repeated.")]
Logits = Annotated[str, typer.Option(help="auto: train without a final Softmax or Sigmoid.")]
Missing = Annotated[bool, typer.Option(help="Read missing chunks of the dataset as zeros.")]
Parallel = Annotated[str, typer.Option(help='At least these cuts: "batch=2,space=3x2x1,channels=2".')]
Threads = Annotated[int | None, typer.Option(help="Compute threads; default: all cores.")]
Engine = Annotated[
    str,
    typer.Option(help="auto, torch, onnxruntime, or torch:cuda."),
]
Precision = Annotated[str, typer.Option(help="float32; with the torch engine bfloat16 or float64, too.")]
Freeze = Annotated[list[str] | None, typer.Option(help="Weights to leave as they are, as a pattern.")]
Keep = Annotated[list[str] | None, typer.Option(help="Activation, or grad/weight, to leave in the run.")]
Commit = Annotated[float, typer.Option(help="At most so many seconds of work are ever lost.")]
Workdir = Annotated[Path | None, typer.Option(help="Run directory; default: MODEL.run beside the model.")]


@app.command()
def fit(
    ctx: typer.Context,
    model: Model,
    dataset: Data,
    loss: Loss = "cross_entropy",
    optimizer: Optimizer = "adam",
    lr: Rate = None,
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
    allow_missing_chunks: Missing = False,
    parallel: Parallel = "auto",
    threads: Threads = None,
    engine: Engine = "auto",
    precision: Precision = "float32",
    freeze: Freeze = None,
    keep: Keep = None,
    commit_seconds: Commit = 30.0,
    workdir: Workdir = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run that is there.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start anew, even if a run is there.")] = False,
    replan: Annotated[bool, typer.Option("--replan", help="Plan anew on resume; changes rounding.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress.")] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of one step, for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Train a model on a dataset within a memory budget."""
    given = ctx.params
    options = settings(given) | {"workdir": workdir, "replan": replan, "trace": trace}
    options["resume"] = "restart" if restart else resume
    budget_bytes = parse_bytes(memory) if memory is not None else default_budget_bytes()
    with show_progress(budget_bytes) as listener:
        run = fit_run(model, dataset, **options, progress=False, callbacks=[listener] if progress else [])
    say(f"{run.path}: {counted(run.steps, 'step')}, loss {run.history[-1]['loss']:.6g}")


@app.command()
def plan(
    ctx: typer.Context,
    model: Model,
    dataset: Data,
    loss: Loss = "cross_entropy",
    optimizer: Optimizer = "adam",
    lr: Rate = None,
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
    allow_missing_chunks: Missing = False,
    parallel: Parallel = "auto",
    threads: Threads = None,
    engine: Engine = "auto",
    precision: Precision = "float32",
    freeze: Freeze = None,
    keep: Keep = None,
    plot: Annotated[Path | None, typer.Option(help="Draw one step, too: a PNG or SVG file.")] = None,
    show: Annotated[What | None, typer.Option(help="Print this of a pass, not the summary.")] = None,
    layer: Annotated[str | None, typer.Option(help="With --show: of one layer, by name or index.")] = None,
) -> None:
    """Show what fit with the same options would do and need; nothing runs."""
    if layer is not None and show is None:
        raise InputError("--layer goes with --show")
    made = plan_run(model, dataset, **settings(ctx.params))
    picture = None if plot is None else made.plot(plot)
    say(str(made).rstrip() if show is None else made.show(show, layer))
    if picture is not None:
        say(f"picture {picture}")


@app.command()
def predict(
    run: RunDir,
    dataset: Data,
    out: Out,
    memory: Memory = None,
    batch_size: BatchSize = 1,
    inputs: Inputs = None,
) -> None:
    """Run a trained model over a dataset; writes a Zarr group with one array an output."""
    group = open_run(run).predict(
        dataset, out, memory=memory, batch_size=batch_size, inputs=pairs("inputs", inputs)
    )
    for name, array in sorted(group.arrays()):
        say(f"{out}/{name}: {shape_text(array.shape)} {array.dtype}")


@app.command()
def evaluate(
    run: RunDir,
    dataset: Data,
    memory: Memory = None,
    batch_size: BatchSize = 1,
    inputs: Inputs = None,
    targets: Targets = None,
) -> None:
    """Print the mean loss of a trained model over a dataset."""
    found = open_run(run).evaluate(
        dataset,
        memory=memory,
        batch_size=batch_size,
        inputs=pairs("inputs", inputs),
        targets=pairs("targets", targets),
    )
    for name, number in found.items():
        say(f"{name} {number:.6g}")


@app.command()
def export(run: RunDir, out: Out) -> None:
    """Write the model with its trained weights as an ONNX file."""
    written = open_run(run).export(out)
    say(f"{written}: {size_text(written.stat().st_size)}")


@app.command()
def info(
    what: Annotated[str | None, typer.Argument(help="A run directory, an ONNX file or a dataset.")] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="What this machine can do; measured once, half a minute.")
    ] = False,
    engine: Engine = "auto",
    again: Annotated[bool, typer.Option("--again", help="With --machine: measure anew.")] = False,
) -> None:
    """Show what is in a run, a model or a dataset, or what this machine can do."""
    if (what is None) != machine:
        raise InputError("info takes either a path or --machine")
    if again and not machine:
        raise InputError("--again goes with --machine")
    console = Console(highlight=False)
    for table in machine_tables(engine, again) if what is None else tables_of(what):
        console.print(table)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where to write.")] = Path("oocdl-demo"),
    size: Annotated[int, typer.Option(help="Edge of the volumes, a multiple of 4.")] = 48,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 80,
    memory: Annotated[str, typer.Option(help="Memory budget.")] = "512MiB",
    engine: Engine = "auto",
) -> None:
    """Make small volumes, train a 3D U-Net on them cut in space, draw what it found."""
    run_demo(folder, size, steps, memory, engine)


def settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``fit`` and ``plan`` from those of the command line."""
    plain = (
        "optimizer",
        "lr",
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
        "allow_missing_chunks",
        "threads",
        "engine",
        "precision",
    )
    options = {name: params[name] for name in plain}
    options["loss"] = parse_loss(params["loss"])
    options["parallel"] = parse_parallel(params["parallel"])
    for name in ("inputs", "targets"):
        options[name] = pairs(name, params[name])
    options["dims"] = numbers("dims", params["dims"], int)
    options["scale"] = numbers("scale", params["scale"], float)
    for name in ("freeze", "keep"):
        options[name] = tuple(params[name] or ())
    return options


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str] | None:
    """``name=value`` texts, one each or several with commas, as a mapping.

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
    """``name=number`` texts as a mapping.

    >>> numbers("dims", ["depth=512"], int)
    {'depth': 512}
    """
    try:
        return {name: kind(value) for name, value in (pairs(option, given) or {}).items()} or None
    except ValueError:
        raise InputError(f"--{option} takes name=number, got '{' '.join(given or ())}'") from None


def parse_loss(text: str) -> Any:
    """A loss by name, or one for each output.

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
    """The cuts that are asked for.

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


def say(text: str) -> None:
    """Print a result."""
    typer.echo(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    sys.exit(run_command(arguments, debug))


def run_command(arguments: Sequence[str], debug: bool) -> int:
    """Run one command; returns its exit code. Errors become one line."""
    try:
        code = app(list(arguments), prog_name="oocdl", standalone_mode=False)
    except typer.TyperException as error:
        return complain(error, error.format_message(), InputError.exit_code, debug)
    except OocdlError as error:
        return complain(error, str(error), error.exit_code, debug)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}; --debug shows where"
        return complain(error, text, 1, debug)
    if code == INTERRUPTED:
        print("oocdl: interrupted; a run stays at its last commit", file=sys.stderr)
    return code if isinstance(code, int) else 0


def complain(error: Exception, text: str, code: int, debug: bool) -> int:
    """One line on stderr, after the traceback if that is wanted; returns ``code``."""
    if debug:
        traceback.print_exception(error)
    print(f"oocdl: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
