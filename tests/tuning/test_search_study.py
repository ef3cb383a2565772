"""Which values a run can take, and which trials have: a seed's own, the same however many are drawn."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

import pytest

from oocdl.config import make_settings
from oocdl.errors import InputError
from oocdl.losses import Dice
from oocdl.optim import SGD, Adam, Cosine
from oocdl.space import IntUniform, LogUniform, Uniform
from oocdl.tuning.asked import DEFAULT_TRIALS, Asked, asked_of, checked_space, with_values
from oocdl.tuning.search import OWN_OPTIONS
from oocdl.tuning.search_study import SearchStudy
from oocdl.tuning.trial import Result
from tests.kit.commands import python

LISTS = {"optimizer": ["sgd", "adam"], "batch_size": [1, 2, 4], "accumulate": IntUniform(1, 2)}
MIXED = {**LISTS, "lr": LogUniform(1e-4, 1.0)}
GIVEN = {**{name: one.default for name, one in OWN_OPTIONS.items()}, "trials_per_round": 4}


def asked(space: Any, **given: Any) -> Asked:
    return asked_of(space, {}, {**GIVEN, **given})


def begun(folder: Path, space: Any, **given: Any) -> SearchStudy:
    folder.mkdir(parents=True)
    wanted = asked(space, **given)
    study = SearchStudy(folder, wanted)
    study.begin(wanted.facts(), (1, None))
    return study


def drawn(folder: Path, space: Any, **given: Any) -> list[dict[str, Any]]:
    """Picks of all trials, each of which is the better the closer its rate is to 0.01, by logarithms."""
    study, picks = begun(folder, space, **given), []
    while new := study.ask():
        for number, _ in new:
            picks.append(dict(study.trials[number].params))
            metric = None if number % 7 == 6 else abs(log10(picks[-1].get("lr", 1.0) / 0.01))
            study.tell(Result(number, 0, 1, metric, None if metric is not None else "an error"))
    return picks


def test_a_grid_has_every_combination(tmp_path: Path) -> None:
    found = drawn(tmp_path / "s", {"optimizer": ["sgd", "adam"], "batch_size": [1, 2, 3]}, sampler="grid")
    assert sorted((picks["optimizer"], picks["batch_size"]) for picks in found) == [
        (a, b) for a in range(2) for b in range(3)
    ]


def test_draws_differ_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    every = drawn(tmp_path / "all", LISTS, trials=12)
    assert len({tuple(sorted(picks.items())) for picks in every}) == 12
    assert drawn(tmp_path / "few", LISTS, trials=5) == every[:5]
    assert drawn(tmp_path / "turned", dict(reversed(LISTS.items())), trials=5) == every[:5]
    assert drawn(tmp_path / "other", LISTS, trials=5, seed=6) != every[:5]
    assert drawn(tmp_path / "three", MIXED, trials=3) == drawn(tmp_path / "nine", MIXED, trials=9)[:3]


def test_draws_are_spread_over_the_space(tmp_path: Path) -> None:
    rates = [picks["lr"] for picks in drawn(tmp_path / "s", MIXED, trials=50)]
    assert 17 <= sum(rate < 1e-2 for rate in rates) <= 33  # half of the powers of ten
    assert all(1e-4 <= rate <= 1.0 for rate in rates)


def test_optuna_draws_by_earlier_results(tmp_path: Path) -> None:
    space = {"lr": LogUniform(1e-4, 1.0), "batch_size": [1, 2]}
    given = {"sampler": "optuna", "trials": 30}
    first = drawn(tmp_path / "s", space, **given)
    assert drawn(tmp_path / "few", space, **given | {"trials": 16}) == first[:16]
    assert drawn(tmp_path / "other", space, **given | {"trials": 4, "seed": 1}) != first[:4]
    away = [abs(log10(picks["lr"] / 0.01)) for picks in first]
    assert sum(away[15:]) < sum(away[:15])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_trials_go_on_that_are_among_the_best_so_far(tmp_path: Path, mode: str) -> None:
    sign = 1 if mode == "min" else -1
    given = {"trials": 6, "rungs": 2, "eta": 2, "mode": mode}
    study = begun(tmp_path / "s", MIXED, **given)
    study.ask()
    goes_on = [study.tell(Result(n, 0, 1, sign * metric)) for n, metric in enumerate((5, 6, 4, 4.5, 3, 7))]
    assert goes_on == [True, False, True, True, True, False]
    again = SearchStudy(tmp_path / "s", asked(MIXED, **given))
    assert again.unfinished() == [(n, 1) for n, on in enumerate(goes_on) if on]
    assert not again.tell(Result(4, 1, 2, sign * 2.0))
    best = again.rows()[0]
    assert (best["trial"], best["state"], best["rung"], best["metric"]) == (4, "finished", 1, sign * 2.0)


def test_how_many_trials_there_are() -> None:
    assert asked({"batch_size": [1, 2], "accumulate": [1, 2, 3]}, sampler="grid").trials == 6
    assert asked(LISTS).trials == 12 and asked(MIXED).trials == DEFAULT_TRIALS
    assert asked(LISTS, sampler="optuna", trials=40).trials == 40
    with pytest.raises(InputError, match="12 combinations, fewer than trials=13"):
        asked(LISTS, trials=13)
    with pytest.raises(InputError, match="takes lists of values and IntUniform"):
        asked({"batch_size": [1, 2], "lr": LogUniform(0.1, 1)}, sampler="grid")
    with pytest.raises(InputError, match="all 2 combinations, got trials=1"):
        asked({"batch_size": [1, 2]}, sampler="grid", trials=1)


def test_optuna_is_imported_by_a_search_alone_and_named_where_it_is_missing(tmp_path: Path) -> None:
    program = (
        "import sys, oocdl\n"
        "assert not {'optuna', 'distributed'} & sys.modules.keys()\n"
        "sys.modules['optuna'] = None\n"
        "try:\n"
        "    oocdl.search('net.onnx', 'data.zarr', space={'lr': [0.1]}, workdir='s')\n"
        "except oocdl.errors.InputError as error:\n"
        "    print(error)\n"
    )
    told = python("-c", program, folder=tmp_path)
    assert told.stdout == "search needs optuna, which is not installed; pip install 'oocdl[search]'\n", told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("space", "options", "told"),
    [
        ({}, {}, "space takes a mapping"),
        ([("lr", [1])], {}, "space takes a mapping"),
        ({"lr": 0.1}, {}, r"space\['lr'\] takes a list of values or one of oocdl.space"),
        ({"lr": []}, {}, r"space\['lr'\] takes a list"),
        ({"loss": "dice"}, {}, r"space\['loss'\] takes a list"),
        ({"lr": [0.1, -1.0]}, {}, r"space\['lr'\] has -1.0: lr must not be negative"),
        ({"lr": Uniform(-0.5, 1.0)}, {}, r"space\['lr'\] has -0.5: lr must not be negative"),
        ({"batch_size": IntUniform(0, 4)}, {}, r"space\['batch_size'\] has 0: batch_size must be at least 1"),
        ({"learning_rate": [0.1]}, {}, "unknown option 'learning_rate'"),
        ({"steps": [1, 2]}, {}, "space cannot have 'steps': rungs= says how long"),
        ({"memory": ["1GiB"]}, {}, "space cannot have 'memory': it is the same for all trials"),
        ({"lr": [0.1]}, {"lr": 0.2}, "'lr' is given twice"),
        ({"optimizer.lr": [0.1]}, {"lr": 0.2}, "'optimizer.lr' is given twice"),
        ({"optimizer.lr": [0.1], "lr": [0.2]}, {}, "'optimizer.lr' is given twice"),
        ({"freeze.x": [1]}, {}, "only optimizer and loss have fields"),
        ({"optimizer.beta": [0.9]}, {}, r"optimizer, a Adam, has no 'beta' \(did you mean 'betas'\?\)"),
        ({"optimizer.momentum": [0.9], "optimizer": ["sgd", "adam"]}, {}, "has no 'momentum'"),
        ({"optimizer.momentum": [-0.9]}, {"optimizer": "sgd"}, "momentum must not be negative"),
        ({"optimizer.weight_decay": ["x"]}, {}, r"space\['optimizer.weight_decay'\] has 'x'"),
        ({"optimizer.lr.steps": [5]}, {}, "optimizer.lr is 0.001, which has no fields"),
        (
            {"optimizer.lr": [0.1], "optimizer.lr.steps": [5]},
            {"optimizer": SGD(Cosine(0.1, 4))},
            "varied as a whole and by its fields",
        ),
        ({"lr": [0.1]}, {"optimizer": SGD(0.1)}, "lr goes with an optimizer given by name"),
    ],
)
def test_what_a_run_cannot_take_is_refused(space: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        checked_space(space, options)


@pytest.mark.parametrize("kind", [Uniform, LogUniform, IntUniform])
@pytest.mark.parametrize("ends", [(2, 1), (1, 1), (1, float("nan")), ("1", 2), (True, 2)])
def test_distributions_have_two_ends_in_order(kind: Any, ends: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match=kind.__name__):
        kind(*ends)


def test_ends_that_a_distribution_does_not_have() -> None:
    with pytest.raises(InputError, match="above 0"):
        LogUniform(0.0, 1.0)
    with pytest.raises(InputError, match="whole numbers"):
        IntUniform(1, 2.5)  # type: ignore[arg-type]


def test_dotted_names_change_fields() -> None:
    options = {"optimizer": SGD(Cosine(0.1, 9), momentum=0.0), "loss": "dice"}
    values = {
        "optimizer.momentum": 0.9, "optimizer.nesterov": True, "optimizer.lr.lr": 0.5, "loss.smooth": 1.0
    }  # fmt: skip
    made = make_settings(**with_values(options, values))
    # Nesterov without a momentum would be refused: fields change together.
    assert made.optimizer == SGD(Cosine(0.5, 9), momentum=0.9, nesterov=True)
    assert made.loss == Dice(smooth=1.0)


def test_an_optimizer_by_name_keeps_its_rate() -> None:
    made = make_settings(**with_values({"optimizer": "adam", "lr": 0.25}, {"optimizer.eps": 1e-3}))
    assert made.optimizer == Adam(0.25, eps=1e-3)
    made = make_settings(**with_values({}, {"lr": 0.5, "optimizer.eps": 1e-3}))
    assert made.optimizer == Adam(0.5, eps=1e-3)
