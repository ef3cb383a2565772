"""``search``: trains many trials, the better ones on; and ``Search``, which reads what has come of it."""

# Annotations are evaluated where they stand, as they hold the records: no "from __future__" here.

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

from oocdl.config.option_checks import anything, shown, validation, whole
from oocdl.config.options import OPTIONS, CommonOptions, Option, PassOptions, SettingOptions, options_of
from oocdl.config.settings import checked
from oocdl.errors import InputError, StoreError
from oocdl.events import SearchListener
from oocdl.host.optional import needed
from oocdl.host.paths import path_of
from oocdl.report import notebook
from oocdl.report.search_view import SearchProgress, search_table, search_text
from oocdl.training.call import WAIT_SECONDS, listeners
from oocdl.training.job import is_module
from oocdl.training.run import Run
from oocdl.training.signature import listing, public
from oocdl.tuning.asked import SEARCH_FILE, asked_of
from oocdl.tuning.trial import Metric


def _no_share(name: str, value: Any) -> Any:
    """Check what trials are compared by: a dataset, which is checked where it is opened."""
    number = re.fullmatch(r"[\d.,]*\d", value) if isinstance(value, str) else None
    if number or isinstance(validation(name, value), float | tuple):
        raise InputError(f"{name} takes a dataset in a search, no share and no samples, got {shown(value)}")
    return value


class OwnOptions(TypedDict, total=False):
    """Options of ``search`` alone, or otherwise than ``fit`` has them."""

    trials: Annotated[int | None, Option(None, "neither")]
    """How many are drawn; default: 16, or all combinations, if there are fewer. A grid has all of them."""
    steps: Annotated[int | None, Option(None, "bits")]
    """Total of steps in the first rung."""
    epochs: Annotated[int | None, Option(None, "bits")]
    """Total of epochs in the first rung; 1 if neither this nor ``steps`` is given."""
    rungs: Annotated[int, Option(1, "bits")]
    """How often a trial trains at most, the first time included; 1: all trials train alike. A schedule
    (``oocdl.optim.Cosine``) has to last for the last rung's ``steps * eta**(rungs - 1)``."""
    eta: Annotated[int, Option(3, "bits", check=partial(whole, least=2))]
    """One of so many trials trains on, to so many times the steps; of a rung's first, the best so far."""
    sampler: Annotated[Literal["random", "grid", "optuna"], Option("random", "bits")]
    """"random" draws, "grid" takes every combination, "optuna" draws by earlier results (Optuna's TPE)."""
    trials_per_round: Annotated[int, Option(8, "bits")]
    """Trials that "optuna" draws at a time; it knows the results of all rounds before."""
    seed: Annotated[int, Option(0, "bits", check=partial(whole, least=0))]
    """Seed of the draws. It is the seed of ``fit`` too, if the space has none. In this process, or with one
    worker, the same seed gives the same table. More workers draw the same trials with "random" and "grid";
    which of them go on, and what "optuna" draws, may depend on which is done first."""
    metric: Annotated[Metric, Option("loss", "neither", check=anything)]
    """"loss", with several heads "loss/<output>", or a function of the ``Run`` that returns a number."""
    mode: Annotated[Literal["min", "max"], Option("min", "neither")]
    """Whether "min" or "max" is best."""
    validation: Annotated[Any, Option(None, "neither", check=_no_share)]
    """Dataset whose loss counts (``Run.evaluate``); default: that of training. A function as ``metric`` takes
    none."""
    last_steps: Annotated[int, Option(10, "neither")]
    """Training's loss is the mean over so many of the last steps."""
    client: Annotated[Any, Option(None, "plan", check=anything)]
    """A ``distributed.Client``, a Dask cluster, or the address or file of a scheduler, whose workers train
    one trial at a time each; None: this process does, one after the other. A trial whose worker is lost goes
    on with another, from its last commit."""
    wait_seconds: Annotated[float, Option(WAIT_SECONDS, "neither")]
    """Wait so long for a worker while there is none."""
    workdir: Annotated[str | Path | None, Option(None, "neither", check=path_of)]
    """Folder of the search; default: <model>.search beside the file, or <Class>.search in the current folder
    for a module. Runs are in its ``trials``. With a client, all its workers have to see it."""
    callbacks: Annotated[Sequence[SearchListener], Option((), "neither", check=listeners)]
    """Callables that take one event (``TrialDone``, ``Notice`` of ``oocdl.events``)."""
    progress: Annotated[bool, Option(True, "neither")]
    """Show progress: a line for each event."""


class SearchOptions(OwnOptions, CommonOptions, PassOptions, SettingOptions, total=False):
    """All options of ``search``, but for the space."""


OWN_OPTIONS: Mapping[str, Option] = options_of(OwnOptions)


@dataclass(eq=False)
class Search:
    """A search on disk, finished or not. Made by ``oocdl.search``, or of its folder.

    It reads what is there now, also while another process searches. ``str(search)`` is its table. Raises
    StoreError if there is no search in ``path``, or one of an earlier version of oocdl, CorruptError if it is
    damaged, InputError where Optuna is not installed.
    """

    path: Path

    def __post_init__(self) -> None:
        self.path = path_of("path", self.path).absolute()
        if not (self.path / SEARCH_FILE).is_file():
            raise StoreError(f"no search is in {self.path}: there is no {SEARCH_FILE}")
        _ = self.table

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each trial, best first; ``pandas.DataFrame(search.table)`` is a frame.

        ``trial`` (from 0), the values by their names in the space, ``state`` ("waiting", "going on",
        "stopped", "finished" or "failed"), ``rung`` and total ``steps`` that it has trained to, ``metric``
        there, ``error``, ``seconds`` of its steps, ``peak_bytes``, and ``run``, the path of its run.
        """
        rows: list[dict[str, Any]] = _inside().SearchStudy(self.path).rows()
        return rows

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the best trial in the last rung that any has got to; None if none has a metric.

        Of equal trials it is that with the lower number.
        """
        return next((row for row in self.table if row["metric"] is not None), None)

    @property
    def best_run(self) -> Run:
        """The run of the best trial. Raises StoreError if no trial has got so far."""
        best = self.best
        if best is None:
            raise StoreError(f"no trial of the search in {self.path} has a metric yet")
        return Run(Path(best["run"]))

    def __str__(self) -> str:
        return search_text(self.table)

    def _repr_html_(self) -> str:
        return notebook.page(f"search {self.path}", search_table(self.table))

    def __repr__(self) -> str:
        return f"Search({str(self.path)!r}, trials={len(self.table)})"


@public
@listing(OwnOptions)
def search(model: Any, dataset: Any, *, space: Mapping[str, Any], **options: Unpack[SearchOptions]) -> Search:
    """Train a network with many settings, each a run of its own, and train those on that do best.

    Trials are drawn from a space by Optuna (the extra ``oocdl[search]``), and trained by ``oocdl.fit``. Each
    trains to ``steps`` (the first rung). One that is among the best 1 of ``eta`` that have got so far goes on
    to ``steps * eta``, in the same way to ``steps * eta**2``, and so on: asynchronous successive halving. The
    same call goes on with a search that was stopped or killed, and repeats nothing that is done; with more
    ``trials`` it extends it.

    Parameters
    ----------
    model
        As in ``fit``. With a client, all its workers have to see its file and ``workdir``. Losses, operators
        and optimizers of your own that are registered here are sent to them.
    dataset
        As in ``fit``. With a client, all its workers have to see it.
    space
        Option of ``fit`` -> list of values, or ``oocdl.space.Uniform``, ``LogUniform`` or ``IntUniform``.
        A dot leads to a field: ``"optimizer.weight_decay"``, ``"loss.smooth"``, ``"optimizer.lr.lr"`` of a
        schedule. What a run cannot take is refused before the first trial.
    memory
        Memory budget of a trial; default: a safe share of what a worker may use, divided by the workers that
        share it. It is kept when a search goes on.
    threads
        Compute threads of a trial; default: as many as a worker has. They are kept when a search goes on.

    Returns
    -------
    The search, with its table. A trial that fails, as by a loss that is NaN or a budget that is too small,
    is a row with its error, and no error of the search; the same call tries those again whose error is not
    their own doing, such as a full disk. The same trials have the same metrics, to the bit where their plans
    are the same: with the same ``memory`` and ``threads``, on machines of one kind.

    Raises
    ------
    InputError, before the first trial, for a space, options, model or dataset that trials cannot take, for a
    search in ``workdir`` that was started differently, and where Optuna is not installed. BudgetError if no
    worker has the memory for a trial. StoreError if another process searches in ``workdir``, no worker sees
    it, or its search is of an earlier version. ResourceError if no worker comes, or the scheduler is lost.

    Examples
    --------
    >>> from oocdl.space import LogUniform
    >>> found = oocdl.search(  # doctest: +SKIP
    ...     "unet.onnx", "train.zarr", space={"lr": LogUniform(1e-5, 1e-2), "batch_size": [1, 2, 4]},
    ...     trials=27, steps=100, rungs=3, validation="valid.zarr", memory="4GiB")
    >>> print(found.best, found.best_run.export("best.onnx"))  # doctest: +SKIP
    """
    given: Mapping[str, Any] = options
    own = checked(OWN_OPTIONS, {name: value for name, value in given.items() if name in OWN_OPTIONS})
    asked = asked_of(space, varied({n: v for n, v in given.items() if n not in OWN_OPTIONS}), own)
    told: list[SearchListener] = [*own["callbacks"], *([SearchProgress()] if own["progress"] else [])]
    stem = Path(type(model).__name__) if is_module(model) else path_of("model", model)
    folder, searching = (own["workdir"] or stem.with_suffix(".search")).absolute(), _inside()
    say = searching.Said(told, warns=not own["progress"])
    searching.run_search(asked, model, dataset, folder, own["client"], own["wait_seconds"], say)
    return Search(folder)


def varied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that are not as they are by default."""
    defaults = {name: OPTIONS[name].default for name in options}
    return {n: v for n, v in options.items() if type(v) is not type(defaults[n]) or v != defaults[n]}


def _inside() -> Any:
    needed("optuna", "search", "search")
    from oocdl.tuning import searching

    return searching
