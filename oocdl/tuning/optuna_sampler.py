"""Values by Optuna's tree-structured Parzen estimator, through its ask-and-tell interface.

Trials are asked for in rounds: all of a round know the results of the rounds before it, and none of its own.
So what is asked for does not depend on how many workers there are, nor on which is the fastest. The sampler
is seeded anew for each trial, so that a search goes on without the state of one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oocdl.errors import InputError
from oocdl.space import Distribution, IntUniform, LogUniform
from oocdl.tuning.halving import Result
from oocdl.tuning.values import Picks


def optuna() -> Any:
    """Import Optuna. Raises InputError where it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise InputError("sampler='optuna' needs Optuna: pip install 'oocdl[optuna]'")
    return importlib.import_module("optuna")


def asked(
    space: Mapping[str, tuple[Any, ...] | Distribution],
    earlier: Sequence[tuple[Picks, Result | None]],
    seed: int,
    mode: str,
) -> Picks:
    """Return the picks of the next trial, after ``earlier`` ones, in their order.

    A result is that of the first rung; it is None where the trial is of the same round.
    """
    library = optuna()
    library.logging.set_verbosity(library.logging.WARNING)
    known = library.distributions
    distributions = {name: _distribution(known, dimension) for name, dimension in space.items()}
    mixed = int(np.random.SeedSequence([seed, len(earlier)]).generate_state(1)[0])
    study = library.create_study(
        direction="minimize" if mode == "min" else "maximize", sampler=library.samplers.TPESampler(seed=mixed)
    )
    for picks, result in earlier:
        state = library.trial.TrialState.RUNNING if result is None else library.trial.TrialState.FAIL
        value = None if result is None else result.metric
        if value is not None:
            state = library.trial.TrialState.COMPLETE
        study.add_trial(
            library.trial.create_trial(
                state=state, value=value, params=dict(picks), distributions=distributions
            )
        )
    params = study.ask(distributions).params
    return {name: _plain(params[name]) for name in space}


def _plain(number: Any) -> int | float:
    return float(number) if isinstance(number, float) else int(number)


def _distribution(known: Any, dimension: tuple[Any, ...] | Distribution) -> Any:
    """A list is a choice of places in it: its values may be any objects."""
    if isinstance(dimension, tuple):
        return known.CategoricalDistribution(tuple(range(len(dimension))))
    if isinstance(dimension, IntUniform):
        return known.IntDistribution(int(dimension.low), int(dimension.high))
    ends = float(dimension.low), float(dimension.high)
    return known.FloatDistribution(*ends, log=isinstance(dimension, LogUniform))
