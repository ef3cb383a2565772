"""``search``: trains many trials, the better ones on; and ``Search``, which reads what has come of it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from oocdl.config import OPTIONS
from oocdl.errors import InputError, StoreError
from oocdl.events import SearchListener
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.graph.onnx.same import network_differences
from oocdl.host.paths import path_of
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.schedules import Rate
from oocdl.pytorch.door import AS_IT_IS, is_module
from oocdl.report.search_view import SearchProgress, search_html, search_text
from oocdl.storage.files import reporting
from oocdl.storage.run.lock import RunLock
from oocdl.training.arguments import check_call, check_seconds
from oocdl.training.client_workers import WAIT_SECONDS
from oocdl.training.from_module import planned_file
from oocdl.training.run import Run
from oocdl.training.signature import LossLike, Names, Size, described_by, public
from oocdl.training.trainer import fit
from oocdl.tuning import search_record as records
from oocdl.tuning.asked import Asked, Data, asked_of, opened
from oocdl.tuning.search_record import Record
from oocdl.tuning.searching import Said, Searching
from oocdl.tuning.trainers import Crew, ThisProcess
from oocdl.tuning.trial import Measure, Metric


@dataclass(eq=False)
class Search:
    """A search on disk, finished or not. Made by ``oocdl.search``, or of its folder.

    It reads what is there now, also while another process searches. ``str(search)`` is its table. Raises
    StoreError if there is no search in ``path``, CorruptError if it is damaged.
    """

    path: Path

    def __post_init__(self) -> None:
        self.path = path_of("path", self.path).absolute()
        self._read()

    def _read(self) -> Record:
        record = records.read_record(self.path)
        if record is None:
            raise StoreError(f"no search is in {self.path}: there is no {records.SEARCH_FILE}")
        return record

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each trial, best first; ``pandas.DataFrame(search.table)`` is a frame.

        ``trial`` (from 0), the values by their names in the space, ``state`` ("waiting", "going on",
        "stopped", "finished" or "failed"), ``rung`` and total ``steps`` that it has trained to, ``metric``
        there, ``error``, ``seconds`` of its steps, ``peak_bytes``, and ``run``, the path of its run.
        """
        record = self._read()
        return records.rows_of(self.path, record, records.read_results(self.path, record))

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
        return search_html(str(self.path), self.table)

    def __repr__(self) -> str:
        return f"Search({str(self.path)!r}, trials={len(self._read().trials)})"


@public
@described_by(fit)
def search(
    model: Any,
    dataset: Any,
    *,
    space: Mapping[str, Any],
    trials: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    rungs: int = 1,
    eta: int = 3,
    sampler: Literal["random", "grid", "optuna"] = "random",
    trials_per_round: int = 8,
    seed: int = 0,
    metric: Metric = "loss",
    mode: Literal["min", "max"] = "min",
    validation: Any = None,
    last_steps: int = 10,
    loss: LossLike = "cross_entropy",
    optimizer: str | Optimizer = "adam",
    lr: Rate | None = None,
    batch_size: int = 1,
    accumulate: int = 1,
    shuffle: bool = True,
    inputs: Mapping[str, str] | None = None,
    targets: Mapping[str, str] | None = None,
    dims: Mapping[str, int] | None = None,
    scale: Mapping[str, float] | None = None,
    logits: Literal["strict", "auto"] = "strict",
    allow_missing_chunks: bool = True,
    strict: bool = False,
    memory: Size | None = None,
    disk: Size | None = None,
    spill: str | Path | None = None,
    spill_dtype: Literal["bfloat16"] | None = None,
    parallel: Literal["auto"] | Mapping[str, int | Sequence[int]] = "auto",
    threads: int | None = None,
    engine: str = "auto",
    precision: Literal["float32", "bfloat16", "float64"] = "float32",
    freeze: Names = (),
    keep: Names = (),
    commit_seconds: float = 30.0,
    client: Any = None,
    wait_seconds: float = WAIT_SECONDS,
    workdir: str | Path | None = None,
    callbacks: Sequence[SearchListener] = (),
    progress: bool = True,
) -> Search:
    """Train a network with many settings, each a run of its own, and train those on that do best.

    Trials are drawn from a space, and trained by ``oocdl.fit``. All of them train to ``steps`` (the first
    rung); the best 1 of ``eta`` go on to ``steps * eta``, of these the best to ``steps * eta**2``, and so on:
    successive halving. The same call goes on with a search that was stopped or killed, and repeats nothing
    that is done; with more ``trials`` or ``rungs`` it extends it.

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
    trials
        How many are drawn; default: 16, or all combinations, if there are fewer. A grid has all of them.
    steps
        Total of steps in the first rung.
    epochs
        Total of epochs in the first rung; 1 if neither this nor ``steps`` is given.
    rungs
        How often the best train on, the first time included. A schedule (``oocdl.optim.Cosine``) has to last
        for the last rung's ``steps * eta**(rungs - 1)``.
    eta
        The best of so many (rounded down, at least one) train on, to so many times the steps.
    sampler
        "random" draws, "grid" takes every combination, "optuna" asks Optuna (the extra ``oocdl[optuna]``).
    trials_per_round
        Trials that Optuna is asked for at a time; it is told their metrics in the first rung.
    seed
        Seed of the draws: the same gives the same trials on any number of workers. It is the seed of ``fit``
        too, if the space has none.
    metric
        "loss", with several heads "loss/<output>", or a function of the ``Run`` that returns a number.
    mode
        Whether "min" or "max" is best.
    validation
        Dataset whose loss counts (``Run.evaluate``); None: that of training.
    last_steps
        Training's loss is the mean over so many of the last steps.
    memory
        Memory budget of a trial; default: a safe share of what a worker may use, divided by the workers that
        share it. It is kept when a search goes on.
    threads
        Compute threads of a trial; default: as many as a worker has. They are kept when a search goes on.
    client
        A ``distributed.Client``, a Dask cluster, or the address or file of a scheduler, whose workers train
        one trial at a time each; None: this process does, one after the other. A trial whose worker is lost
        goes on with another, from its last commit.
    wait_seconds
        Wait so long for a worker while there is none.
    workdir
        Folder of the search; default: <model>.search beside the file, or <Class>.search in the current folder
        for a module. Runs are in its ``trials``. With a client, all its workers have to see it.
    callbacks
        Callables that take one event (``TrialDone``, ``RungDone``, ``Notice`` of ``oocdl.events``).
    progress
        Show progress: a line for each event.

    Returns
    -------
    The search, with its table. A trial that fails, as by a loss that is NaN or a budget that is too small,
    is a row with its error, and no error of the search; the same call tries those again whose error is not
    their own doing, such as a full disk. The same trials have the same metrics, to the bit where their plans
    are the same: with the same ``memory`` and ``threads``, on machines of one kind.

    Raises
    ------
    InputError, before the first trial, for a space, options, model or dataset that trials cannot take, and
    for a search in ``workdir`` that was started differently. BudgetError if no worker has the memory for a
    trial. StoreError if another process searches in ``workdir``, or no worker sees it. ResourceError if no
    worker comes, or the scheduler is lost.

    Examples
    --------
    >>> from oocdl.space import LogUniform
    >>> found = oocdl.search(  # doctest: +SKIP
    ...     "unet.onnx", "train.zarr", space={"lr": LogUniform(1e-5, 1e-2), "batch_size": [1, 2, 4]},
    ...     trials=27, steps=100, rungs=3, validation="valid.zarr", memory="4GiB")
    >>> print(found.best, found.best_run.export("best.onnx"))  # doctest: +SKIP
    """
    options = varied(locals(), fit)
    place = check_call(workdir, None, callbacks, resume=True, replan=False, progress=progress)
    check_seconds("wait_seconds", wait_seconds)
    measure = Measure(metric, validation, last_steps)
    asked = asked_of(
        space, options, measure, mode, trials=trials, steps=steps, epochs=epochs, rungs=rungs, eta=eta,
        sampler=sampler, trials_per_round=trials_per_round, seed=seed,
    )  # fmt: skip
    listeners: list[SearchListener] = [*callbacks, *([SearchProgress()] if progress else [])]
    folder = (place or _folder_for(model)).absolute()
    with _locked(folder):
        data = opened(asked, _model_file(model, dataset, asked, folder), dataset)
        say = Said(listeners, warns=not progress)
        with _crew(client, data, folder, say.note, wait_seconds) as crew:
            Searching(folder, asked, data, crew, say).run()
    return Search(folder)


def varied(call: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return those options of ``fit`` in a call that are not as they are by default."""
    defaults = {
        name: found.default for name, found in signature(function).parameters.items() if name in OPTIONS
    }
    own = ("seed", "steps", "epochs")
    return {
        name: call[name]
        for name, default in defaults.items()
        if name in call
        and name not in own
        and not (type(call[name]) is type(default) and call[name] == default)
    }


def _folder_for(model: Any) -> Path:
    """The folder of a search by default."""
    name = f"{type(model).__name__}.search"
    return Path(name) if is_module(model) else path_of("model", model).with_suffix(".search")


def _dask(module: str) -> Any:
    # distributed takes 16 MiB, which a search in one process can use better.
    return importlib.import_module(f"oocdl.{module}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder that is one of a search, or is new. Raises StoreError for any other."""
    made = not folder.exists()
    if not made and not (folder / records.SEARCH_FILE).is_file():
        others = {entry.name for entry in folder.iterdir()} - {"LOCK", "model", "model.partial"}
        if not folder.is_dir() or others:
            raise StoreError(f"{folder} is not empty and no search; choose another workdir")
    with reporting(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder / "LOCK")
    try:
        yield
    finally:
        lock.release()
        if not (folder / records.SEARCH_FILE).exists():  # refused: as it was before
            shutil.rmtree(folder / "model", ignore_errors=True)
            (folder / "LOCK").unlink(missing_ok=True)
            if made and not any(folder.iterdir()):
                folder.rmdir()


def _model_file(model: Any, dataset: Any, asked: Asked, folder: Path) -> Path:
    """The file that trials train; of a module, one in the folder, as it was when the search began."""
    if not is_module(model):
        return path_of("model", model).absolute()
    kept = folder / "model" / f"{type(model).__name__}.onnx"
    with planned_file(model, dataset, asked.options, AS_IT_IS) as new, reporting(folder):
        if kept.is_file():
            found = network_differences(inspect_onnx(kept), inspect_onnx(new))
            if found:
                raise InputError(
                    f"the search in {folder} is of another network: {found}; choose another workdir"
                )
            return kept
        partial = folder / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(new.parent, partial)
        partial.rename(kept.parent)
    return kept


@contextmanager
def _crew(
    client: Any, data: Data, folder: Path, say: Callable[[str], None], wait_seconds: float
) -> Iterator[Crew]:
    if client is None:
        yield ThisProcess()
        return
    sources = [found.spec().source for found in (data.dataset, data.validation) if found is not None]
    files = [Path(source) for source in sources if isinstance(source, str) and "://" not in source]
    crew, workers = _dask("runtime.cluster.crew"), _dask("tuning.trial_workers")
    with _dask("runtime.cluster.connecting").connected(client) as found:
        _, refusals = crew.gather(found, wait_seconds, say, _dask("runtime.cluster.member").SEARCH)
        for error in refusals.values():
            raise error
        yield workers.Workers(found, [data.model, folder, *files], say, wait_seconds)
