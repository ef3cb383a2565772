"""``fit --preset``: a whole way of training in one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from oocdl.cli.cluster import call_options, workers
from oocdl.cli.say import ending, say
from oocdl.cli.texts import flag, numbers
from oocdl.cli.verb_options import ACTING, FIELDS, Records, arguments_for
from oocdl.errors import InputError
from oocdl.events import Listener
from oocdl.presets import nnunet

Preset = Annotated[
    Literal["nnunet"] | None,
    typer.Option(help="Cross-validate nnU-Net's network, with its defaults, on an nnU-Net raw folder."),
]
Folds = Annotated[str, typer.Option(help="Folds to train with --preset: 0,1,.. or all.")]
Hours = Annotated[float, typer.Option(help="Maximum predicted hours of a fold with --preset.")]
ALL_FOLDS = "0,1,2,3,4"
OF_ONE_RUN = ("log", "dashboard", "dashboard_port", "resume", "restart", *ACTING)
DECIDED = ("validation", "metrics", "loss")
"""Options that are for one run, and those that the preset decides itself."""


def train_preset(
    context: typer.Context,
    records: Records,
    folder: Any,
    how: Mapping[str, Any],
    given: Mapping[str, Any],
    outcome: Listener,
) -> None:
    """Train with a preset and the options that are typed, or in a file. Raises InputError for others."""
    asked = {
        name: value
        for name, value in given.items()
        if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"
    }
    for name in asked:
        if name in (*OF_ONE_RUN, *DECIDED) or (name in FIELDS and "optimizer" not in asked):
            instead = "give --optimizer with it" if name in FIELDS else "leave it out"
            raise InputError(f"--preset nnunet does not take {flag(name)}: {instead}")
    options = {name: value for name, value in arguments_for(records, given).items() if name in asked}
    options |= {**how, **call_options(given)}
    options["folds"] = ["all"] if how["folds"] == "all" else numbers("folds", how["folds"], int)
    with ending(lambda: str(outcome)), workers(given) as client:
        trained = nnunet(folder, client=client, callbacks=[outcome], **options)
    say(str(trained).rstrip())
    steps, (first, *others) = ",".join(map(str, trained.spacing)), trained.runs.values()
    further = "".join(f" --with {run.path}" for run in others)
    say(
        f"results: {trained.path}; predict other cases, by the mean of all folds and mirror images:\n"
        f"  oocdl convert {folder} test.zarr --split test --spacing {steps}\n"
        f"  oocdl predict {first.path} test.zarr{further} --mirror --argmax --nifti labels"
    )
