"""Optuna: asked in rounds, so that neither workers nor a stop change what it is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.errors import InputError
from oocdl.space import IntUniform, LogUniform
from oocdl.tuning import optuna_sampler
from oocdl.tuning.halving import Result
from oocdl.tuning.optuna_sampler import asked
from tests.kit.searches import OPTIONS, made_of, result_times, workers_in, write_job

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="needs Optuna: pip install 'oocdl[optuna]'"
)
SPACE = {"lr": LogUniform(1e-4, 1.0), "kind": ("a", "b", "c"), "count": IntUniform(1, 9)}
BY_OPTUNA: dict[str, Any] = {**OPTIONS, "sampler": "optuna", "trials": 5, "trials_per_round": 2, "rungs": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_job(tmp_path_factory.mktemp("job"))


def asked_in_turn(count: int, seed: int = 0) -> list[Any]:
    """Picks, each told to be the better the closer its rate is to 0.01 and the larger its count is."""
    known: list[Any] = []
    for number in range(count):
        picks = asked(SPACE, known, seed, "min")
        metric = abs(picks["lr"] - 0.01) * 10 - picks["count"]
        known.append((picks, Result(number, 0, 1, None if number % 7 == 6 else metric)))
    return known


@needs_optuna
def test_what_is_asked_for_follows_from_seed_and_results() -> None:
    first = asked_in_turn(12)
    assert asked_in_turn(12) == first and asked_in_turn(5) == first[:5]
    assert asked_in_turn(5, seed=1) != first[:5]
    assert all(
        1e-4 <= picks["lr"] <= 1.0 and picks["kind"] in (0, 1, 2) and type(picks["count"]) is int
        for picks, _ in first
    )


@needs_optuna
def test_later_trials_are_better_than_the_first() -> None:
    counts = [picks["count"] for picks, _ in asked_in_turn(40)]
    assert sum(counts[20:]) > sum(counts[:20])


@needs_optuna
def test_a_search_goes_on_and_extends(job: tuple[Path, Path], tmp_path: Path) -> None:
    whole = oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "whole")
    seen: list[Any] = []

    def stop(event: Any) -> None:
        seen.append(event)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "s", callbacks=[stop])
    assert [row["trial"] for row in oocdl.Search(tmp_path / "s").table] != []
    before = result_times(oocdl.Search(tmp_path / "s"))
    found = oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "s")
    assert made_of(found) == made_of(whole) and before.items() <= result_times(found).items()
    oocdl.search(*job, **{**BY_OPTUNA, "trials": 3}, workdir=tmp_path / "short")
    assert made_of(oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "short")) == made_of(whole)


@needs_optuna
def test_workers_do_not_change_what_is_asked_for(job: tuple[Path, Path], tmp_path: Path) -> None:
    here = oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "here")
    with workers_in(tmp_path) as client:
        there = oocdl.search(*job, **BY_OPTUNA, client=client, workdir=tmp_path / "there")
    assert made_of(there) == made_of(here)


def test_without_optuna_it_says_what_to_install(
    job: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_sampler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'oocdl\[optuna\]'"):
        oocdl.search(*job, **BY_OPTUNA, workdir=tmp_path / "s")
    assert not (tmp_path / "s").exists()
