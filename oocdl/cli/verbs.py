"""The commands that train, plan, simulate and search: each parses its options, calls Python and prints."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import typer

from oocdl.cli import verb_options
from oocdl.cli.cluster import WORKER_OPTIONS, call_options, workers
from oocdl.cli.cluster import app as cluster_app
from oocdl.cli.look import app as look_app
from oocdl.cli.say import UNCHANGED, Json, ending, say, say_json, waiting
from oocdl.cli.texts import ConfigFile, flag, numbers
from oocdl.cli.verb_options import ACTING, FIELDS, arguments_for, records_for, with_options
from oocdl.config import OPTIONS
from oocdl.errors import InputError
from oocdl.events import Committed, Event, Listener, RunStarted, RunStopped
from oocdl.presets.nnunet_folds import HOURS, nnunet
from oocdl.report.printer.show import What
from oocdl.report.units import counted
from oocdl.training.call import ALL_OPTIONS
from oocdl.training.simulation import simulate as simulate_run
from oocdl.training.trainer import fit as fit_run
from oocdl.training.trainer import plan as plan_run
from oocdl.tuning.search import search as search_runs

FIT, SEARCH = records_for(fit_run), records_for(search_runs)
PLAN, SIMULATE = records_for(plan_run), records_for(simulate_run)
OF_A_RUN = ["commit_seconds", *(name for name in ALL_OPTIONS if name not in OPTIONS)]
"""Options that only ``fit`` has on the command line: they do not change a plan."""
ALL_FOLDS, SHOW = "0,1,2,3,4", ALL_OPTIONS["dashboard"].first_sentence
OF_ONE_RUN = ("log", "dashboard", "dashboard_port", "resume", "restart", *ACTING)
DECIDED = ("validation", "metrics", "loss")
"""Options that are for one run, and those that the preset decides itself."""

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


class Outcome:
    """Knows what a run has committed, and whether an earlier one was removed. A listener."""

    workdir: str | None = None
    """The run directory; None: no run was begun or taken up."""
    done = 0

    def __init__(self, restarted: Path | None = None) -> None:
        self.restarted = restarted
        self._earlier = self._files()

    def _files(self) -> list[tuple[int, int]]:
        paths = [] if self.restarted is None else [self.restarted / name for name in ("run.json", "CURRENT")]
        return [((its := path.stat()).st_ino, its.st_mtime_ns) for path in paths if path.is_file()]

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted() | RunStopped():
                self.workdir, self.done = event.workdir, event.done
            case Committed(step):
                self.done = step

    def __str__(self) -> str:
        if self.workdir is None and self._earlier not in ([], self._files()):
            return f"the old run in {self.restarted} was removed, no step of the new one is committed"
        if self.workdir is None:
            return f"no step was done, {UNCHANGED}"
        are = "is" if self.done == 1 else "are"
        command = "the same command" if self.restarted is None else "the same command without --restart"
        return f"{counted(self.done, 'step')} {are} committed in {self.workdir}; {command} goes on"


@app.command()
@with_options(FIT, FIELDS, ACTING, WORKER_OPTIONS)
def fit(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="ONNX file; with --preset, the folder.")],
    dataset: verb_options.OptionalData = None,
    config: ConfigFile = None,
    preset: Annotated[
        Literal["nnunet"] | None,
        typer.Option(help="Cross-validate nnU-Net's network, with its defaults, on an nnU-Net raw folder."),
    ] = None,
    folds: Annotated[str, typer.Option(help="Folds to train with --preset: 0,1,.. or all.")] = ALL_FOLDS,
    hours: Annotated[float, typer.Option(help="Maximum predicted hours of a fold with --preset.")] = HOURS,
    resume: Annotated[bool, typer.Option(help="Resume an existing run.")] = True,
    restart: Annotated[bool, typer.Option("--restart", help="Start over, even if a run exists.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help=SHOW)] = False,
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
    if restart and not resume:
        raise InputError("--restart and --no-resume contradict each other: leave one of them out")
    if preset is not None:
        if dataset is not None:
            raise InputError(f"--preset takes one folder, not '{dataset}' beside it")
        given |= dict.fromkeys(("resume", "restart", "log", "dashboard", "dashboard_port"))
        return _train_preset(context, model, folds, hours, given)
    if dataset is None:
        raise InputError("fit takes a model and a dataset; only --preset takes one folder")
    for name in ("folds", "hours"):
        if _is_given(context, name):
            raise InputError(f"{flag(name)} goes with --preset")
    options = arguments_for(FIT, {**given, "model": model, "dataset": dataset}) | call_options(given)
    options |= {"resume": "restart" if restart else resume, "dashboard": dashboard_port or dashboard}
    outcome = Outcome((options.get("workdir") or model.with_suffix(".run")) if restart else None)
    listeners: list[Listener] = [outcome, *verb_options.acting(given), *verb_options.logs(log)]
    with ending(lambda: str(outcome)), workers(given) as client:
        run = fit_run(**options, client=client, callbacks=listeners)
    say(f"{run.path}: {counted(run.steps, 'step')}, loss {run.history[-1]['loss']:.6g}")


def _is_given(context: typer.Context, name: str) -> bool:
    return getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def _train_preset(
    context: typer.Context, folder: Path, folds: str, hours: float, given: dict[str, Any]
) -> None:
    asked = {name: value for name, value in given.items() if _is_given(context, name)}
    for name in asked:
        if name in (*OF_ONE_RUN, *DECIDED) or (name in FIELDS and "optimizer" not in asked):
            instead = "give --optimizer with it" if name in FIELDS else "leave it out"
            raise InputError(f"--preset nnunet does not take {flag(name)}: {instead}")
    options = {name: value for name, value in arguments_for(FIT, given).items() if name in asked}
    chosen = ["all"] if folds == "all" else numbers("folds", folds, int)
    options |= {"hours": hours, "folds": chosen, **call_options(given)}
    outcome = Outcome()
    with ending(lambda: str(outcome)), workers(given) as client:
        trained = nnunet(folder, client=client, callbacks=[outcome], **options)
    steps, (first, *others) = ",".join(map(str, trained.spacing)), trained.runs.values()
    further = "".join(f" --with {quote(str(run.path))}" for run in others)
    say(str(trained).rstrip())
    say(
        f"results: {trained.path}; predict other cases, by the mean of all folds and mirror images:\n"
        f"  oocdl convert {quote(str(folder))} test.zarr --split test --spacing {steps}\n"
        f"  oocdl predict {quote(str(first.path))} test.zarr{further} --mirror --argmax --nifti labels"
    )


@app.command()
@with_options(SEARCH, FIELDS, WORKER_OPTIONS)
def search(config: ConfigFile = None, as_json: Json = False, **given: Any) -> None:
    """Train many runs with other settings, the better ones on; --steps and --epochs are the first rung's."""
    options = arguments_for(SEARCH, given) | call_options(given)
    with ending(lambda: "trials that are done are kept, the same command goes on"), workers(given) as client:
        found = search_runs(**options, client=client)
    if as_json:
        return say_json(found.table)
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
        return say_json(made.data() | ({} if scaling is None else {"hosts": scaling.table().records()}))
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
        return say_json({"title": found.title, "weak": found.weak, "hosts": found.table().records()})
    say(str(found).rstrip())
    if picture is not None:
        say(f"picture {picture}")


app.add_typer(look_app)
app.add_typer(cluster_app, name="cluster")
