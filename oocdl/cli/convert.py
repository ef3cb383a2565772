"""The command that makes a dataset of files of other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oocdl.cli.config_file import ConfigFile
from oocdl.cli.say import UNCHANGED, ending, say
from oocdl.cli.texts import numbers
from oocdl.cli.verb_options import Out
from oocdl.data import convert as convert_files
from oocdl.report.units import counted, shape_text
from oocdl.training.signals import Signals

app = typer.Typer()


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="nnU-Net folder, CSV or JSON table, NIfTI, DICOM, NumPy, HDF5, Zarr."),
    ],
    out: Out,
    config: ConfigFile = None,
    spacing: Annotated[
        str | None, typer.Option(metavar="Z,Y,X", help="Millimetres to resample volumes to.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget, such as 1GiB.")] = None,
    split: Annotated[str, typer.Option(help="Of an nnU-Net folder: train or test.")] = "train",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a dataset that was converted before.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show progress.")] = True,
) -> None:
    """Write images and labels of other formats as a dataset that fit reads, within a memory budget."""
    steps = None if spacing is None else numbers("spacing", spacing, float)
    with ending(lambda: UNCHANGED), Signals() as signals, signals.allowed():
        group = convert_files(
            source, out, spacing=steps, memory=memory, split=split, overwrite=overwrite, progress=progress
        )
    samples = [sample for _, sample in sorted(group.groups())]
    if samples:
        say(f"{out}: {counted(len(samples), 'sample')}, the first of which is")
    for _, array in sorted((samples or [group])[0].arrays()):
        say(f"{out}/{array.path}: {shape_text(array.shape)} {array.dtype}")
