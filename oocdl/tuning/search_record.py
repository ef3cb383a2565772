"""The folder of a search: what it is, which values its trials have, and what has become of each.

    search/  search.json  LOCK  model/  trials/0007-lr=0.003/ (a run)  results/0007-rung0.json

A worker writes the result of a trial as soon as there is one; nothing else has to survive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oocdl.config import plain
from oocdl.errors import CorruptError, StoreError
from oocdl.report.search_view import value_text
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import reporting, write_text
from oocdl.tuning.halving import Result, ranked, survivors
from oocdl.tuning.values import Picks

SEARCH_FILE = "search.json"
SEARCH_FORMAT = 1
MOST_NAME_CHARACTERS = 80


@dataclass(frozen=True)
class Trial:
    """A combination of values, and the folder of its run below that of the search."""

    number: int
    picks: Picks
    values: Mapping[str, Any]
    """As plain data, by the names of the space."""
    folder: str


def trial_of(number: int, picks: Picks, values: Mapping[str, Any]) -> Trial:
    """Return a trial with a folder that says what it is.

    >>> trial_of(7, {"lr": 0.003}, {"lr": 0.003}).folder
    'trials/0007-lr=0.003'
    """
    known = {name: plain(value) for name, value in values.items()}
    words = ",".join(f"{name}={value_text(value)}" for name, value in known.items())
    words = re.sub(r"[^A-Za-z0-9=.,+-]+", "_", words)[:MOST_NAME_CHARACTERS]
    return Trial(number, picks, known, f"trials/{number:04d}-{words}")


@dataclass(frozen=True)
class Record:
    """What ``search.json`` holds."""

    facts: Mapping[str, Any]
    """What never changes: model, datasets, space, options, as plain data by name."""
    memory_bytes: int
    """The budget of a trial, where the call does not give one."""
    threads: int | None
    """Compute threads of a trial, where the call does not say."""
    rungs: int
    trials: tuple[Trial, ...]

    @property
    def eta(self) -> int:
        """One of so many trials goes on from a rung."""
        return int(self.facts["eta"])

    @property
    def mode(self) -> str:
        """ "min" or "max": which metric is better."""
        return str(self.facts["mode"])


def write_record(folder: Path, record: Record) -> None:
    """Write ``search.json``, all of it or nothing."""
    with reporting(folder):
        body = {"format": SEARCH_FORMAT, **asdict(record)}
        write_text(folder / SEARCH_FILE, sealed("search", body))


def read_record(folder: Path) -> Record | None:
    """Read what ``write_record`` wrote; None if it is not there. Raises CorruptError, StoreError."""
    path = folder / SEARCH_FILE
    if not path.is_file():
        return None
    try:
        body = unsealed("search", path.read_text())
        if body.pop("format") != SEARCH_FORMAT:
            raise StoreError(f"the search in {folder} is of another version of oocdl; choose another workdir")
        return Record(**{**body, "trials": tuple(Trial(**found) for found in body["trials"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def result_path(folder: Path, trial: int, rung: int) -> Path:
    """Return the file of what has become of a trial in a rung."""
    return folder / "results" / f"{trial:04d}-rung{rung}.json"


def write_result(folder: Path, result: Result) -> None:
    """Write what has become of a trial in a rung, all of it or nothing."""
    path = result_path(folder, result.trial, result.rung)
    with reporting(path):
        path.parent.mkdir(exist_ok=True)
        write_text(path, sealed("result", asdict(result)))


def read_results(folder: Path, record: Record) -> list[dict[int, Result]]:
    """Read the results of each rung, by trial: of those only that have entered it. Raises CorruptError."""
    entered, found = [trial.number for trial in record.trials], list[dict[int, Result]]()
    for rung in range(record.rungs):
        results = {n: read for n in entered if (read := read_result(folder, n, rung)) is not None}
        found.append(results)
        entered = survivors(entered, results, record.eta, record.mode) if len(results) == len(entered) else []
    return found


def read_result(folder: Path, trial: int, rung: int) -> Result | None:
    """Read what ``write_result`` wrote; None if it is not there. Raises CorruptError."""
    path = result_path(folder, trial, rung)
    try:
        body = unsealed("result", path.read_text())
        return Result(**{**body, "notes": tuple(body["notes"]), "remarks": tuple(body["remarks"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CorruptError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return CorruptError(f"{path} is damaged ({reason}); restore it, or delete it to have it made again")


def rows_of(folder: Path, record: Record, results: list[dict[int, Result]]) -> list[dict[str, Any]]:
    """Return a row for each trial, best first: by rung, then by metric; those without a metric last."""
    order: list[int] = []
    for rung in reversed(results):
        order += [trial for trial in ranked(rung, record.mode) if trial not in order]
    latest = {n: found for rung in results for n, found in rung.items()}
    order = [n for n in order if latest[n].metric is not None]
    order += [trial.number for trial in record.trials if trial.number not in order]
    by_number = {trial.number: trial for trial in record.trials}
    return [_row(folder, record, by_number[n], results) for n in order]


def _row(folder: Path, record: Record, trial: Trial, results: list[dict[int, Result]]) -> dict[str, Any]:
    mine = [rung[trial.number] for rung in results if trial.number in rung]
    last = mine[-1] if mine else None
    return {
        "trial": trial.number,
        **trial.values,
        "state": _state(record, trial.number, results, last),
        "rung": None if last is None else last.rung,
        "steps": 0 if last is None else last.steps,
        "metric": None if last is None else last.metric,
        "error": None if last is None else last.error,
        "seconds": sum(found.seconds for found in mine),
        "peak_bytes": max((found.peak_bytes for found in mine), default=0),
        "run": str(folder / trial.folder),
    }


def _state(record: Record, trial: int, results: list[dict[int, Result]], last: Result | None) -> str:
    """How a trial stands, in the words of ``Search.table``."""
    if last is None:
        return "waiting"
    if last.metric is None:
        return "failed"
    if last.rung == record.rungs - 1:
        return "finished"
    entered = [found.number for found in record.trials]
    for rung in results[: last.rung + 1]:
        if len(rung) < len(entered):
            return "going on"  # the rung is not decided
        entered = survivors(entered, rung, record.eta, record.mode)
    return "going on" if trial in entered else "stopped"
