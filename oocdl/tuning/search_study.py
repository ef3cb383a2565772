"""A search as a study of Optuna: which values trials have, which go on, and what has become of each.

search/  search.json  LOCK  model/  trials/0007-lr=0.003/ (a run)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from oocdl.errors import CorruptError, StoreError
from oocdl.report.units import value_text
from oocdl.space import IntUniform, LogUniform
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import read_text, reporting, sync_path, write_text
from oocdl.tuning.asked import SEARCH_FILE, Asked, Dimension, listed, picked
from oocdl.tuning.trial import Result

STUDY = "search"
MOST_NAME_CHARACTERS = 80
MOST_LISTED = 1024
"""Maximum combinations of a space whose random trials are drawn from a list of all: none comes twice."""
NOTHING = {"steps": 0, "error": None, "seconds": 0.0, "peak_bytes": 0}
"""Result of a trial that has not trained; its keys are those of every result, the metric apart."""
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed"}


class Journal(BaseJournalBackend):
    """The log of a study, in memory until ``write``. Raises CorruptError for a file that is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: list[dict[str, Any]]
        try:
            with reporting(path, "read"):
                logs = unsealed("search", read_text(path)) if path.exists() else []
        except ValueError as error:
            text = f"{path} is damaged ({error}); restore it, or choose another workdir"
            raise CorruptError(text) from error
        if not isinstance(logs, list):
            text = f"the search in {path.parent} is of an earlier version of oocdl; choose another workdir"
            raise StoreError(text)
        self.logs, self._written = logs, len(logs)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs += json.loads(json.dumps(logs))

    def write(self) -> None:
        if len(self.logs) != self._written:
            write_text(self.path, sealed("search", self.logs))
            sync_path(self.path.parent)
            self._written = len(self.logs)


class SearchStudy:
    """The study of the search in a folder; ``asked`` is what the call asks for, None to read only.

    Picks of a trial are places in lists, or numbers of distributions; its resource is a power of ``eta``.
    What is told is on disk when ``ask`` or ``tell`` returns, all of it or nothing.
    """

    def __init__(self, folder: Path, asked: Asked | None = None) -> None:
        self.folder, self._asked = folder, asked
        self._journal = Journal(folder / SEARCH_FILE)
        self._storage = JournalStorage(self._journal)
        if asked is not None and not self._journal.logs:
            direction = StudyDirection.MINIMIZE if asked.mode == "min" else StudyDirection.MAXIMIZE
            verbosity = optuna.logging.get_verbosity()
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._storage.create_new_study([direction], STUDY)
            optuna.logging.set_verbosity(verbosity)
        pruner = SuccessiveHalvingPruner(min_resource=1, reduction_factor=asked.eta if asked else 2)
        self._place: dict[str, Any] = {"study_name": STUDY, "storage": self._storage}
        self._study = optuna.load_study(**self._place, sampler=RandomSampler(), pruner=pruner)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that a resumed search must share with its beginning; empty for a new search."""
        return dict(self._study.user_attrs.get("facts", {}))

    @property
    def share(self) -> tuple[int | None, int | None]:
        """Bytes and compute threads of a trial where the call does not say; None: as the process has them."""
        memory_bytes, threads = self._study.user_attrs.get("share", (None, None))
        return memory_bytes, threads

    def begin(self, facts: Mapping[str, Any], share: tuple[int, int | None]) -> None:
        for name, held in {"facts": dict(facts), "share": list(share)}.items():
            if self._study.user_attrs.get(name) != held:
                self._study.set_user_attr(name, held)
        self._journal.write()

    def unfinished(self) -> list[tuple[int, int]]:
        """Return the trials that are to train further, each with the rung to which it is to."""
        running = (one for one in self.trials if one.state == TrialState.RUNNING)
        return [(one.number, len(one.intermediate_values)) for one in running]

    @property
    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def ask(self) -> list[tuple[int, int]]:
        """Ask Optuna for the trials of the next round; returns them as ``unfinished`` does."""
        assert self._asked is not None
        asked, first = self._asked, len(self.trials)
        count = asked.trials_per_round if asked.sampler == "optuna" else asked.trials
        distributions = {name: _distribution(dimension) for name, dimension in asked.space.items()}
        new = range(first, min(first + count, asked.trials))
        for number in new:
            study = optuna.load_study(**self._place, sampler=_sampler(asked, number))
            study.ask(distributions)
        self._journal.write()
        return [(number, 0) for number in new]

    def tell(self, result: Result) -> bool:
        """Tell Optuna of a trial, unless it is tried again; returns whether it goes on to a next rung."""
        assert self._asked is not None
        trial = Trial(self._study, result.trial)  # its id: the journal has no other study
        trial.set_user_attr("result", {name: getattr(result, name) for name in NOTHING})
        goes_on = False
        if result.metric is not None:
            trial.report(result.metric, self._asked.eta**result.rung)
            last = result.rung == self._asked.rungs - 1
            goes_on = not last and not trial.should_prune()
            if last:
                self._study.tell(result.trial, result.metric)
            elif not goes_on:
                self._study.tell(result.trial, state=TrialState.PRUNED)
        elif result.final:
            self._study.tell(result.trial, state=TrialState.FAIL)
        self._journal.write()
        return goes_on

    def run_of(self, number: int) -> Path:
        values = picked(self.facts["space"], self.trials[number].params)
        words = ",".join(f"{name}={value_text(value)}" for name, value in values.items())
        words = re.sub(r"[^A-Za-z0-9=.,+-]+", "_", words)[:MOST_NAME_CHARACTERS]
        return self.folder / "trials" / f"{number:04d}-{words}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each trial, best first: by rung, then by metric; those without a metric last."""
        sign, rows = 1 if self.facts["mode"] == "min" else -1, [self._row(trial) for trial in self.trials]
        told = [row for row in rows if row["metric"] is not None]
        told.sort(key=lambda row: (-row["rung"], sign * row["metric"], row["trial"]))
        return told + [row for row in rows if row["metric"] is None]

    def _row(self, trial: FrozenTrial) -> dict[str, Any]:
        result, reports = trial.user_attrs.get("result", NOTHING), trial.intermediate_values
        failed = result["error"] is not None
        state = STATES.get(trial.state, "going on" if reports else "waiting")
        return {
            "trial": trial.number,
            **picked(self.facts["space"], trial.params),
            "state": "failed" if failed else state,
            "rung": len(reports) - (not failed) if result["steps"] else None,
            "steps": result["steps"],
            "metric": None if failed or not reports else reports[max(reports)],
            **{name: result[name] for name in ("error", "seconds", "peak_bytes")},
            "run": str(self.run_of(trial.number)),
        }


def _distribution(dimension: Dimension) -> BaseDistribution:
    """A list is a choice of places in it: its values may be any objects."""
    if isinstance(dimension, tuple):
        return CategoricalDistribution(range(len(dimension)))
    if isinstance(dimension, IntUniform):
        return IntDistribution(int(dimension.low), int(dimension.high))
    return FloatDistribution(dimension.low, dimension.high, log=isinstance(dimension, LogUniform))


def _sampler(asked: Asked, number: int) -> BaseSampler:
    """The sampler of one trial. Its seed is the trial's own, so that a search goes on without its state."""
    seed = int(np.random.SeedSequence([asked.seed, number]).generate_state(1)[0])
    if asked.sampler == "optuna":
        return TPESampler(seed=seed)
    picks = listed(asked.space)
    if picks is None or (asked.sampler == "random" and prod(map(len, picks.values())) > MOST_LISTED):
        return RandomSampler(seed=seed)
    return GridSampler(picks, seed=asked.seed)
