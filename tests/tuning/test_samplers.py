"""Which values trials have: a seed's own, without repetition, the same however many are drawn."""

from __future__ import annotations

import pytest

from oocdl.errors import InputError
from oocdl.space import IntUniform, LogUniform
from oocdl.tuning.samplers import DEFAULT_TRIALS, drawn, grid, trial_count

LISTS = {"optimizer": ("sgd", "adam"), "batch_size": (1, 2, 4), "accumulate": IntUniform(1, 2)}
MIXED = {**LISTS, "lr": LogUniform(1e-4, 1.0)}


def test_a_grid_has_every_combination_in_order() -> None:
    found = grid({"a": ("x", "y"), "b": (1, 2, 3)})
    assert [tuple(picks.values()) for picks in found] == [(a, b) for a in range(2) for b in range(3)]


def test_draws_differ_and_depend_on_the_seed_alone() -> None:
    all_of_them = drawn(LISTS, 12, 5)
    assert len({tuple(sorted(picks.items())) for picks in all_of_them}) == 12
    assert drawn(LISTS, 5, 5) == all_of_them[:5]
    assert drawn(dict(reversed(LISTS.items())), 5, 5) == all_of_them[:5]
    assert drawn(LISTS, 5, 6) != all_of_them[:5]
    assert drawn(MIXED, 3, 0) == drawn(MIXED, 9, 0)[:3]


def test_draws_are_spread_over_the_space() -> None:
    rates = [picks["lr"] for picks in drawn(MIXED, 200, 0)]
    below = sum(rate < 1e-2 for rate in rates)
    assert 80 <= below <= 120  # half of the powers of ten
    assert all(1e-4 <= rate <= 1.0 for rate in rates)


def test_how_many_trials_there_are() -> None:
    assert trial_count("grid", {"a": (1, 2), "b": (1, 2, 3)}, None) == 6
    assert trial_count("random", LISTS, None) == 12
    assert trial_count("random", MIXED, None) == DEFAULT_TRIALS
    assert trial_count("optuna", LISTS, 40) == 40
    with pytest.raises(InputError, match="12 combinations, fewer than trials=13"):
        trial_count("random", LISTS, 13)
    with pytest.raises(InputError, match="'lr' is a distribution"):
        trial_count("grid", {"a": (1, 2), "lr": LogUniform(0.1, 1)}, None)
    with pytest.raises(InputError, match="all 2 combinations, got trials=1"):
        trial_count("grid", {"a": (1, 2)}, 1)
