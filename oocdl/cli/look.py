"""The commands that make a dataset, and those about what is there already: runs, models, this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from oocdl.cli.demo import run_demo
from oocdl.cli.info import info_of, machine_info
from oocdl.cli.say import UNCHANGED, Json, ending, say, say_json, waiting
from oocdl.cli.texts import ConfigFile, pairs
from oocdl.cli.verb_options import Dims, Engine, Out, RunDir, arguments_for, records_for, with_options
from oocdl.config import OPTIONS, plain
from oocdl.config.option_checks import MOST_PORT
from oocdl.dashboard.page_process import from_elsewhere, serve
from oocdl.data import convert as convert_files
from oocdl.errors import CorruptError, InputError, printable
from oocdl.report.tables import Sheet
from oocdl.report.units import counted, shape_text, size_text
from oocdl.storage.run.repair import repair as repair_run
from oocdl.storage.run.repair import verify as verify_run
from oocdl.training.prediction.outputs import LABELS
from oocdl.training.prediction.outputs import predict as predict_runs
from oocdl.training.prediction.predictions import is_unfinished
from oocdl.training.run import Run
from oocdl.training.signals import Signals
from oocdl.training.trainer import open as open_run

CONVERT, PREDICT = records_for(convert_files), records_for(predict_runs)
EVALUATE = records_for(Run.evaluate)
EXPORT = {"which": EVALUATE["which"]}

app = typer.Typer()


@app.command()
@with_options(CONVERT)
def convert(
    source: Annotated[
        Path, typer.Argument(help="nnU-Net folder, CSV or JSON table, NIfTI, DICOM, NumPy, HDF5, Zarr.")
    ],
    out: Out,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Write images and labels of other formats as a dataset that fit reads, within a memory budget."""
    with ending(lambda: UNCHANGED), Signals() as signals, signals.allowed():
        group = convert_files(source, out, **arguments_for(CONVERT, given))
    samples = [sample for _, sample in sorted(group.groups())]
    if samples:
        say(f"{out}: {counted(len(samples), 'sample')}, the first of which is")
    for _, array in sorted((samples or [group])[0].arrays()):
        say(f"{out}/{array.path}: {shape_text(array.shape)} {array.dtype}")


@app.command()
@with_options(PREDICT, leave_out=["runs"])
def predict(
    run: RunDir,
    further: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="RUN", help="Further run of a mean; may be repeated."),
    ] = None,
    config: ConfigFile = None,
    **given: Any,
) -> None:
    """Run a trained model over a dataset; writes a Zarr group with one array an output, or volumes."""
    out = given["out"] or Path(given["nifti"] or "") / LABELS
    with (
        ending(lambda: f"{out} is unfinished, the same command goes on" if is_unfinished(out) else UNCHANGED),
        waiting("predicting .."),
    ):
        group = predict_runs([run, *(further or ())], **arguments_for(PREDICT, given))
    for name, array in sorted(group.arrays()):
        say(f"{out}/{name}: {shape_text(array.shape)} {array.dtype}")
    if given["nifti"] is not None:
        say(f"{given['nifti']}: a volume of labels for each sample")


@app.command()
@with_options(EVALUATE)
def evaluate(run: RunDir, config: ConfigFile = None, as_json: Json = False, **given: Any) -> None:
    """Print the mean loss of a trained model over a dataset."""
    with ending(lambda: UNCHANGED), waiting("evaluating .."):
        found = open_run(run).evaluate(**arguments_for(EVALUATE, given))
    if as_json:
        return say_json(plain(found))
    for name, value in found.items():
        rows = value if isinstance(value, np.ndarray) else [[value]]
        say(f"{printable(name)} " + "\n".join(" ".join(f"{one:.6g}" for one in row) for row in rows))
    if given["per_sample"] is not None:
        say(f"{given['per_sample']}: a row for each sample")


@app.command()
@with_options(EXPORT)
def export(run: RunDir, out: Out, **given: Any) -> None:
    """Write the model with its trained weights as an ONNX file, or the weights as .safetensors."""
    with ending(lambda: UNCHANGED):
        written = open_run(run).export(out, **arguments_for(EXPORT, given))
    say(f"{written}: {size_text(written.stat().st_size)}")


@app.command()
def verify(run: RunDir) -> None:
    """Read every byte of a run and name what is damaged; ends with 3 if anything is."""
    with ending(lambda: UNCHANGED), waiting("reading .."):
        found = verify_run(run)
    say(str(found))
    if not found.sound:
        raise typer.Exit(CorruptError.exit_code)


@app.command()
def repair(
    run: RunDir,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run over from a dead owner on another host.")
    ] = False,
) -> None:
    """Go back to the newest sound version of a run, leave out what is damaged, and say what is lost."""
    say(str(repair_run(run, take_over)))


@app.command()
def dashboard(
    run: RunDir,
    port: Annotated[
        int, typer.Option(min=0, max=MOST_PORT, help="Port on 127.0.0.1; default: a free one.")
    ] = 0,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Host name used by a proxy; may be repeated.")
    ] = None,
) -> None:
    """Show a run, or all in a folder, on a page, while they go on or later, until Ctrl-C."""

    def tell(address: str) -> None:
        say(address)
        say(from_elsewhere(address), aside=True)

    with suppress(KeyboardInterrupt):  # how it is ended
        serve(run, port, tell, allow_host or ())


@app.command()
def report(
    run: RunDir,
    out: Annotated[
        Path | None, typer.Option(help="Write the dashboard's pictures and these tables as one HTML file.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print a row for every layer.")] = False,
    as_json: Json = False,
) -> None:
    """Show measured beside predicted times of a run, layer by layer."""
    found = open_run(run).report(out)
    _show(as_json, asdict(found), [found.totals(), found.table(every)])
    if out is not None:
        say(f"the page is in {out}", aside=True)


@app.command()
def info(
    what: Annotated[str | None, typer.Argument(help="A run directory, an ONNX file or a dataset.")] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Show this machine's rates; benchmarks it once.")
    ] = False,
    engine: Engine = "auto",
    again: Annotated[bool, typer.Option("--again", help="With --machine: benchmark again.")] = False,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="List every initializer of a model, and why it is trained or not."),
    ] = False,
    dims: Dims = None,
    every: Annotated[bool, typer.Option("--all", help="List every weight of a run.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a run, a model or a dataset, or what this machine can do."""
    if (what is None) != machine:
        raise InputError("info takes either a path or --machine")
    if again and not machine:
        raise InputError("--again goes with --machine")
    if (weights or dims) and not str(what).lower().endswith(".onnx"):
        raise InputError("--weights and --dims go with a model")
    with ending(lambda: UNCHANGED), waiting("looking .." if what else "measuring, unless that was done .."):
        extents = OPTIONS["dims"].checked("dims", pairs("dims", dims, int))
        data, told = machine_info(engine, again) if what is None else info_of(what, extents, weights, every)
    _show(as_json, data, told)


def _show(as_json: bool, data: Any, tables: Sequence[Sheet | Text]) -> None:
    if as_json:
        return say_json(data)
    console = Console(highlight=False)
    for part in tables:
        console.print(part, soft_wrap=isinstance(part, Text))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("oocdl-demo"),
    size: Annotated[int, typer.Option(help="Edge of the volumes, a multiple of 4.")] = 48,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 80,
    memory: Annotated[str, typer.Option(help="Memory budget.")] = "512MiB",
    engine: Engine = "auto",
) -> None:
    """Make small volumes, train a 3D U-Net on them cut in space, draw what it found."""
    run_demo(folder, size, steps, memory, engine)
