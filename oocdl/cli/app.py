"""The command line: a command for each verb, which parses its options, calls Python and prints.

Every error is one line on stderr; the exit code is the error's own (2 input, 3 store, 4 resources), 130
after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. ``--debug`` anywhere adds the traceback.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from oocdl.cli.cluster import app as cluster_app
from oocdl.cli.cluster import call_options, job_options, worker_options, workers
from oocdl.cli.demo import run_demo
from oocdl.cli.info import machine_tables, shape_text, size_text, tables_of
from oocdl.cli.options import (
    BatchSize,
    Commit,
    Data,
    Dims,
    Engine,
    Inputs,
    Memory,
    Out,
    Register,
    RunDir,
    Spill,
    Targets,
    Workdir,
    host_counts,
    host_settings,
    numbers,
    pairs,
    run_files,
    settings,
    training_options,
    varied_settings,
    with_options,
)
from oocdl.cli.say import say
from oocdl.cli.space import parse_space
from oocdl.config import parse_bytes
from oocdl.errors import CorruptError, InputError, OocdlError, printable
from oocdl.host.limits import default_budget_bytes
from oocdl.report.printer.show import What
from oocdl.report.progress import counted, show_progress
from oocdl.storage.run.repair import repair as repair_run
from oocdl.storage.run.verify import verify as verify_run
from oocdl.training.signals import Stopped
from oocdl.training.simulation import simulate as simulate_run
from oocdl.training.trainer import fit as fit_run
from oocdl.training.trainer import open as open_run
from oocdl.training.trainer import plan as plan_run
from oocdl.tuning.search import search as search_runs

INTERRUPTED_EXIT_CODE = 130
app = typer.Typer(
    epilog="--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(cluster_app, name="cluster")


@app.callback()
def shared(register: Register = None) -> None:
    """Trains an ONNX model on a Zarr or HDF5 dataset within a memory budget, exactly."""
    run_files(register or ())


@app.command()
@with_options(training_options, worker_options, job_options)
def fit(
    commit_seconds: Commit = 30.0,
    workdir: Workdir = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run that is there.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start anew, even if a run is there.")] = False,
    replan: Annotated[bool, typer.Option("--replan", help="Plan anew on resume; changes rounding.")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="Run whose cuts to repeat: the same bits on any number of workers.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress.")] = True,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of one step, for ui.perfetto.dev.")
    ] = None,
    **given: Any,
) -> None:
    """Train a model on a dataset within a memory budget."""
    options = settings(given) | {
        "commit_seconds": commit_seconds,
        "workdir": workdir,
        "resume": "restart" if restart else resume,
        "replan": replan,
        "plan": plan,
        "trace": trace,
        **call_options(given),
    }
    budget_bytes = default_budget_bytes() if given["memory"] is None else parse_bytes(given["memory"])
    with workers(given) as client, show_progress(budget_bytes) as listener:
        shown = [listener] if progress else []
        run = fit_run(**options, client=client, progress=False, callbacks=shown)
    say(f"{run.path}: {counted(run.steps, 'step')}, loss {run.history[-1]['loss']:.6g}")


@app.command()
@with_options(training_options, worker_options, job_options)
def search(
    space: Annotated[
        list[str] | None,
        typer.Option(help='What varies: "lr=log:1e-5..1e-2", "batch_size=1,2,4"; may be repeated.'),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many are drawn; default: 16 at most.")] = None,
    rungs: Annotated[int, typer.Option(help="How often the best train on, the first time included.")] = 1,
    eta: Annotated[int, typer.Option(help="The best of so many train on, to so many times the steps.")] = 3,
    sampler: Annotated[str, typer.Option(help="random, grid or optuna.")] = "random",
    trials_per_round: Annotated[int, typer.Option(help="With optuna: asked for at a time.")] = 8,
    metric: Annotated[str, typer.Option(help="loss, or loss/OUTPUT of several.")] = "loss",
    mode: Annotated[str, typer.Option(help="Whether min or max is best.")] = "min",
    validation: Annotated[str | None, typer.Option(help="Dataset whose loss counts, not training's.")] = None,
    last_steps: Annotated[int, typer.Option(help="Training's loss is the mean over so many.")] = 10,
    commit_seconds: Commit = 30.0,
    workdir: Annotated[Path | None, typer.Option(help="Default: MODEL.search beside the model.")] = None,
    progress: Annotated[bool, typer.Option(help="Show progress.")] = True,
    **given: Any,
) -> None:
    """Train many runs with other settings, the better ones on; --steps and --epochs are the first rung's."""
    options: dict[str, Any] = {
        "space": parse_space(space or ()),
        "trials": trials,
        "rungs": rungs,
        "eta": eta,
        "sampler": sampler,
        "trials_per_round": trials_per_round,
        "metric": metric,
        "mode": mode,
        "validation": validation,
        "last_steps": last_steps,
        "commit_seconds": commit_seconds,
        "workdir": workdir,
        "progress": progress,
        **varied_settings(given),
        **call_options(given),
    }
    with workers(given) as client:
        found = search_runs(**options, client=client)
    say(str(found).rstrip())
    if found.best is not None:
        say(f"best: {found.best['run']}")


@app.command()
@with_options(training_options)
def plan(
    plot: Annotated[Path | None, typer.Option(help="Draw one step, too: a PNG or SVG file.")] = None,
    show: Annotated[What | None, typer.Option(help="Print this of a pass, not the summary.")] = None,
    layer: Annotated[str | None, typer.Option(help="With --show: of one layer, by name or index.")] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Also predict it on so many hosts of --threads threads: 1,2,4.")
    ] = None,
    **given: Any,
) -> None:
    """Show what fit with the same options would do and need; nothing runs."""
    if layer is not None and show is None:
        raise InputError("--layer goes with --show")
    counts = None if hosts is None else host_counts(hosts)
    made = plan_run(**settings(given))
    picture = None if plot is None else made.plot(plot)
    say(str(made).rstrip() if show is None else made.show(show, layer))
    if picture is not None:
        say(f"picture {picture}")
    if counts is not None:
        options = host_settings({**given, "threads": None})
        say(str(simulate_run(hosts=counts, cores=made.machine.threads, **options)).rstrip())


@app.command()
@with_options(training_options)
def simulate(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, with commas.")] = "1,2,4,8,16,32,64",
    cores: Annotated[int, typer.Option(help="Compute threads of each host.")] = 16,
    network: Annotated[str, typer.Option(help="Of each host, in each direction, a second.")] = "10Gbit",
    disk_rate: Annotated[
        str | None, typer.Option(help="Of each host, a second, such as 2GB; default: this machine's.")
    ] = None,
    weak: Annotated[bool, typer.Option("--weak", help="The batch grows with the hosts.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-up, too: a PNG or SVG file.")] = None,
    **given: Any,
) -> None:
    """Predict a step on many hosts, --memory on each; nothing runs."""
    found = simulate_run(
        hosts=host_counts(hosts),
        cores=cores,
        network=network,
        disk_rate=disk_rate,
        weak=weak,
        **host_settings(given),
    )
    picture = None if plot is None else found.plot(plot)
    say(str(found).rstrip())
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
    spill: Spill = None,
) -> None:
    """Run a trained model over a dataset; writes a Zarr group with one array an output."""
    group = open_run(run).predict(
        dataset, out, memory=memory, batch_size=batch_size, inputs=pairs("inputs", inputs), spill=spill
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
    spill: Spill = None,
) -> None:
    """Print the mean loss of a trained model over a dataset."""
    found = open_run(run).evaluate(
        dataset,
        memory=memory,
        batch_size=batch_size,
        inputs=pairs("inputs", inputs),
        targets=pairs("targets", targets),
        spill=spill,
    )
    for name, number in found.items():
        say(f"{printable(name)} {number:.6g}")


@app.command()
def export(run: RunDir, out: Out) -> None:
    """Write the model with its trained weights as an ONNX file."""
    written = open_run(run).export(out)
    say(f"{written}: {size_text(written.stat().st_size)}")


@app.command()
def verify(run: RunDir) -> None:
    """Read every byte of a run and name what is damaged; ends with 3 if anything is."""
    found = verify_run(run)
    say(str(found))
    if not found.sound:
        raise typer.Exit(CorruptError.exit_code)


@app.command()
def repair(
    run: RunDir,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="From an owner on another host, which is dead.")
    ] = False,
) -> None:
    """Go back to the newest sound version of a run, leave out what is damaged, and say what is lost."""
    say(str(repair_run(run, take_over)))


@app.command()
def info(
    what: Annotated[str | None, typer.Argument(help="A run directory, an ONNX file or a dataset.")] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="What this machine can do; measured once, half a minute.")
    ] = False,
    engine: Engine = "auto",
    again: Annotated[bool, typer.Option("--again", help="With --machine: measure anew.")] = False,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Of a model: each initializer, and why it is trained or not."),
    ] = False,
    dims: Dims = None,
) -> None:
    """Show what is in a run, a model or a dataset, or what this machine can do."""
    if (what is None) != machine:
        raise InputError("info takes either a path or --machine")
    if again and not machine:
        raise InputError("--again goes with --machine")
    if (weights or dims) and not str(what).lower().endswith(".onnx"):
        raise InputError("--weights and --dims go with a model")
    console = Console(highlight=False)
    sizes = numbers("dims", dims, int)
    for part in machine_tables(engine, again) if what is None else tables_of(what, sizes, weights):
        console.print(part, soft_wrap=isinstance(part, Text))


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    warnings.formatwarning = lambda message, *_, **__: f"oocdl: {message}\n"
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
        code = INTERRUPTED_EXIT_CODE
    except Stopped as stop:
        print(f"oocdl: stopped by {stop.signal}; a run stays at its last commit", file=sys.stderr)
        return int(stop.code or 0)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}; --debug shows where"
        return complain(error, text, 1, debug)
    if code == INTERRUPTED_EXIT_CODE:
        print("oocdl: interrupted; a run stays at its last commit", file=sys.stderr)
    return code if isinstance(code, int) else 0


def complain(error: Exception, text: str, code: int, debug: bool) -> int:
    """Print an error as one line on stderr, after the traceback with ``debug``; returns ``code``."""
    if debug:
        traceback.print_exception(error)
    print(f"oocdl: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
