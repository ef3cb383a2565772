"""The command line: a command for each verb, which parses its options, calls Python and prints.

Every error is one line on stderr; the exit code is the error's own (2 input, 3 store, 4 resources), 130
after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. ``--debug`` anywhere adds the traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from oocdl.cli.cluster import WORKER_OPTIONS, call_options, workers
from oocdl.cli.cluster import app as cluster_app
from oocdl.cli.config_file import ConfigFile
from oocdl.cli.convert import app as convert_app
from oocdl.cli.look import app as look_app
from oocdl.cli.preset import ALL_FOLDS, Folds, Hours, Preset, train_preset
from oocdl.cli.say import (
    INTERRUPTED_EXIT_CODE,
    UNCHANGED,
    Ended,
    Json,
    Outcome,
    ending,
    say,
    say_json,
    waiting,
)
from oocdl.cli.texts import numbers
from oocdl.cli.verb_options import (
    ACTING,
    FIELDS,
    Register,
    acting,
    arguments_for,
    logs,
    records_for,
    run_files,
    told,
    with_options,
)
from oocdl.config import OPTIONS, parse_bytes
from oocdl.errors import InputError, OocdlError
from oocdl.events import Listener
from oocdl.host.limits import default_budget_bytes, installed_version
from oocdl.presets.nnunet_folds import HOURS
from oocdl.report.printer.show import What
from oocdl.report.progress import Progress
from oocdl.report.units import counted
from oocdl.storage.files import io_error
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.simulation import simulate as simulate_run
from oocdl.training.trainer import fit as fit_run
from oocdl.training.trainer import plan as plan_run
from oocdl.tuning.search import search as search_runs

FIT, SEARCH = records_for(fit_run), records_for(search_runs)
PLAN, SIMULATE = records_for(plan_run), records_for(simulate_run)
OF_A_RUN = ["commit_seconds", *(name for name in ALL_OPTIONS if name not in OPTIONS)]
"""Options that only ``fit`` has on the command line: they do not change a plan."""

app = typer.Typer(
    epilog="--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(asked: bool) -> None:
    if asked:
        say(f"oocdl {installed_version('oocdl')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version.")
]


@app.callback()
def shared(register: Register = None, version: Version = False) -> None:
    """Trains an ONNX model on a Zarr or HDF5 dataset within a memory budget, exactly."""
    run_files(register or ())


@app.command()
@with_options(FIT, FIELDS, ACTING, WORKER_OPTIONS)
def fit(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="ONNX file; with --preset, the folder.")],
    dataset: Annotated[
        str | None, typer.Argument(help="Zarr group or HDF5 file, with samples on the first axis.")
    ] = None,
    config: ConfigFile = None,
    preset: Preset = None,
    folds: Folds = ALL_FOLDS,
    hours: Hours = HOURS,
    resume: Annotated[bool, typer.Option(help="Resume an existing run.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start over, even if a run exists.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help=told("dashboard"))] = False,
    dashboard_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Show the run live on this port.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="csv=FILE, tensorboard=FOLDER or mlflow=EXPERIMENT; may be repeated."),
    ] = None,
    **given: Any,
) -> None:
    """Train a model on a dataset within a memory budget."""
    if preset is not None:
        if dataset is not None:
            raise InputError(f"--preset takes one folder, not '{dataset}' beside it")
        given |= {"log": log, "restart": restart, "dashboard": dashboard, "dashboard_port": dashboard_port}
        train_preset(context, FIT, model, {"folds": folds, "hours": hours}, given)
        return
    if dataset is None:
        raise InputError("fit takes a model and a dataset; only --preset takes one folder")
    how = {"resume": "restart" if restart else resume, "dashboard": dashboard_port or dashboard}
    options = arguments_for(FIT, {**given, "model": model, "dataset": dataset}) | call_options(given)
    options |= how | {"progress": False}
    written = [*acting(given), *logs(log)]
    budget_bytes = default_budget_bytes() if given["memory"] is None else parse_bytes(given["memory"])
    outcome = Outcome()
    shown: AbstractContextManager[Progress | None] = (
        Progress(budget_bytes) if given["progress"] else nullcontext()
    )
    with ending(lambda: str(outcome)), shown as listener, workers(given) as client:
        listeners: list[Listener] = [*([] if listener is None else [listener]), outcome, *written]
        run = fit_run(**options, client=client, callbacks=listeners)
    say(f"{run.path}: {counted(run.steps, 'step')}, loss {run.history[-1]['loss']:.6g}")


@app.command()
@with_options(SEARCH, FIELDS, WORKER_OPTIONS)
def search(config: ConfigFile = None, as_json: Json = False, **given: Any) -> None:
    """Train many runs with other settings, the better ones on; --steps and --epochs are the first rung's."""
    options = arguments_for(SEARCH, given) | call_options(given)
    with ending(lambda: "trials that are done are kept, the same command goes on"), workers(given) as client:
        found = search_runs(**options, client=client)
    if as_json:
        say_json(found.table)
        return
    say(str(found).rstrip())
    if found.best is not None:
        say(f"best: {found.best['run']}")


@app.command()
@with_options(PLAN, FIELDS, leave_out=OF_A_RUN)
def plan(
    config: ConfigFile = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw one step, as a PNG or SVG file.")] = None,
    show: Annotated[What | None, typer.Option(help="Print this view of a pass instead.")] = None,
    layer: Annotated[str | None, typer.Option(help="With --show: only this layer, by name or index.")] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Also predict these numbers of hosts, each with --threads threads: 1,2,4."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a row for every layer.")] = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Show what fit with the same options would do and need; nothing runs."""
    if layer is not None and show is None:
        raise InputError("--layer goes with --show")
    if show is not None and as_json:
        raise InputError("--show prints a text: leave --json out")
    counts = None if hosts is None else numbers("hosts", hosts, int)
    if counts is not None and given["accumulate"] != 1:
        raise InputError("--hosts simulates a step of one pass: leave --accumulate out")
    scaling = None
    with ending(lambda: UNCHANGED), waiting("planning .."):
        made = plan_run(**arguments_for(PLAN, given))
        picture = None if plot is None else made.plot(plot)
        if counts is not None:
            options = arguments_for(SIMULATE, given)
            scaling = simulate_run(**options, hosts=counts, cores=made.machine.threads)
    if as_json:
        say_json(made.data() | ({} if scaling is None else {"hosts": scaling.table().records()}))
        return
    say(made.text(every).rstrip() if show is None else made.show(show, layer))
    if picture is not None:
        say(f"picture {picture}")
    if scaling is not None:
        say(str(scaling).rstrip())


@app.command()
@with_options(SIMULATE, FIELDS, leave_out=OF_A_RUN)
def simulate(
    config: ConfigFile = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the speed-up, as a PNG or SVG file.")] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Predict a step on many hosts, --memory on each; nothing runs."""
    with ending(lambda: UNCHANGED), waiting("planning .."):
        found = simulate_run(**arguments_for(SIMULATE, given))
        picture = None if plot is None else found.plot(plot)
    if as_json:
        say_json({"title": found.title, "weak": found.weak, "hosts": found.table().records()})
        return
    say(str(found).rstrip())
    if picture is not None:
        say(f"picture {picture}")


app.add_typer(convert_app)
app.add_typer(look_app)
app.add_typer(cluster_app, name="cluster")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    warnings.formatwarning = lambda message, *_, **__: f"oocdl: {message}\n"
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    code = run_command(arguments, debug)
    try:
        sys.stdout.flush()
    except OSError:  # it was said; Python would say it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run_command(arguments: Sequence[str], debug: bool) -> int:
    """Run one command; returns its exit code. Errors become one line."""
    try:
        code = app(list(arguments), prog_name="oocdl", standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is an error of this command
    except typer.TyperException as error:
        return complain(error, error.format_message(), InputError.exit_code, debug)
    except OocdlError as error:
        return complain(error, str(error), error.exit_code, debug)
    except Ended as end:
        return complain(end, str(end), end.code, debug)
    except KeyboardInterrupt:
        code = INTERRUPTED_EXIT_CODE
    except OSError as error:
        found = io_error(error, Path("the output or a file"), 0, "read or write")
        return complain(error, str(found), found.exit_code, debug)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error}; --debug shows where"
        return complain(error, text, 1, debug)
    if code == INTERRUPTED_EXIT_CODE:
        print("oocdl: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def complain(error: Exception, text: str, code: int, debug: bool) -> int:
    """Print an error as one line on stderr, after the traceback with ``debug``; returns ``code``."""
    if debug:
        traceback.print_exception(error)
    print(f"oocdl: {' '.join(text.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
