"""What one call of ``search`` asks for, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.config import Settings, make_settings, plain
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.schedules import Cosine, OneCycle, Polynomial, WarmUp
from oocdl.planning.binding import Binding, bind
from oocdl.planning.passes import Course
from oocdl.space import Distribution
from oocdl.storage.dataset.dataset import Dataset, open_dataset
from oocdl.storage.dataset.identity import compare, identity
from oocdl.training.arguments import whole_number
from oocdl.tuning import optuna_sampler
from oocdl.tuning.halving import Result
from oocdl.tuning.samplers import drawn, grid, trial_count
from oocdl.tuning.trial import Measure
from oocdl.tuning.values import Picks, checked_space, corners, value_of, with_values

SAMPLERS = ("random", "grid", "optuna")


@dataclass(frozen=True, eq=False)
class Asked:
    """A space, and how trials of it train; made by ``asked_of``."""

    space: Mapping[str, tuple[Any, ...] | Distribution]
    options: Mapping[str, Any]
    """Options of ``fit`` that the space does not vary."""
    length: Mapping[str, int]
    """``steps`` or ``epochs`` of the first rung."""
    trials: int
    rungs: int
    eta: int
    sampler: str
    trials_per_round: int
    seed: int
    measure: Measure
    mode: str

    def values(self, picks: Picks) -> dict[str, Any]:
        """Return the values that picks stand for."""
        return {name: value_of(self.space[name], pick) for name, pick in picks.items()}

    def fit_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of ``fit`` for a trial, without ``steps``."""
        return with_values({"seed": self.seed, **self.options}, values)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a trial in the first rung. Raises InputError."""
        return make_settings(**self.fit_options(values), **self.length)

    def picks(self, earlier: Sequence[tuple[Picks, Result | None]]) -> list[Picks]:
        """Return the picks of the trials that come next: all of them, or with Optuna those of a round.

        ``earlier``: trials that were picked before, with their results of the first rung.
        """
        if self.sampler == "grid":
            return grid(self.space)[len(earlier) :]
        if self.sampler == "random":
            return drawn(self.space, self.trials, self.seed)[len(earlier) :]
        begun = len(earlier) // self.trials_per_round * self.trials_per_round
        known = [*earlier[:begun], *((picks, None) for picks, _ in earlier[begun:])]
        new: list[Picks] = []
        while len(earlier) + len(new) < min(begun + self.trials_per_round, self.trials):
            found = optuna_sampler.asked(self.space, known, self.seed, self.mode)
            new.append(found)
            known.append((found, None))
        return new

    def facts(self) -> dict[str, Any]:
        """Return as plain data what a search that goes on must have in common with what it began with."""
        alike = {name: value for name, value in self.options.items() if name not in ANY_TIME}
        metric = self.measure.metric
        name = getattr(metric, "__qualname__", type(metric).__name__)
        return {
            "space": {name: plain(dimension) for name, dimension in self.space.items()},
            "options": plain(alike),
            "length": dict(self.length),
            "eta": self.eta,
            "sampler": self.sampler,
            "trials_per_round": self.trials_per_round if self.sampler == "optuna" else None,
            "seed": self.seed,
            "metric": metric if isinstance(metric, str) else f"function {name}",
            "mode": self.mode,
            "last_steps": self.measure.last_steps,
        }


ANY_TIME = ("memory", "disk", "spill", "threads", "commit_seconds", "strict")
"""Options that may be others when a search goes on."""


def asked_of(space: Any, options: Mapping[str, Any], measure: Measure, mode: str, **given: Any) -> Asked:
    """Check the arguments of ``search``. Raises InputError."""
    length = {name: given.pop(name) for name in ("steps", "epochs")}
    length = {name: whole_number(name, count) for name, count in length.items() if count is not None}
    if len(length) == 2:
        raise InputError("give steps or epochs of the first rung, not both")
    least = {"rungs": 1, "eta": 2, "seed": 0, "trials_per_round": 1}
    counts = {name: whole_number(name, given[name], most_low) for name, most_low in least.items()}
    whole_number("last_steps", measure.last_steps)
    for name, value, known in (("sampler", given["sampler"], SAMPLERS), ("mode", mode, ("min", "max"))):
        if value not in known:
            raise InputError(f"{name} must be {' or '.join(map(repr, known))}, got {value!r}")
    if not isinstance(measure.metric, str) and not callable(measure.metric):
        raise InputError(f"metric takes 'loss' or a function of the run, got {measure.metric!r}")
    if given["sampler"] == "optuna":
        optuna_sampler.optuna()
    dimensions = checked_space(space, options)
    trials = given["trials"] if given["trials"] is None else whole_number("trials", given["trials"])
    trials = trial_count(given["sampler"], dimensions, trials)
    return Asked(
        dimensions,
        options,
        length or {"epochs": 1},
        trials,
        sampler=given["sampler"],
        measure=measure,
        mode=mode,
        **counts,
    )


@dataclass(frozen=True, eq=False)
class Data:
    """The model and the datasets of a search, opened."""

    model: Path
    dataset: Dataset
    validation: Dataset | None
    samples: int

    def facts(self) -> dict[str, Any]:
        """Return what tells them from others, as plain data."""
        parts = {"dataset": self.dataset, "validation": self.validation}
        return {
            "model": inspect_onnx(self.model).fingerprint(),
            **{
                part: found and {name: identity(array) for name, array in found.arrays.items()}
                for part, found in parts.items()
            },
        }

    def changed(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        """Yield in words how the datasets differ from what they were."""
        for part, found in (("dataset", self.dataset), ("validation", self.validation)):
            if then[part] is None or found is None or then[part].keys() != now[part].keys():
                if then[part] != now[part]:
                    yield f"{part} is another"
                continue
            for name, array in found.arrays.items():
                one = compare(array, then[part][name], now[part][name])
                if one.changed:
                    yield f"{part}: {one.changed}"


def opened(asked: Asked, model: Path, dataset: Any) -> Data:
    """Open model and datasets, and check trials against them. Raises what ``fit`` raises for them."""
    first = {name: next(corners(dimension)) for name, dimension in asked.space.items()}
    settings = asked.settings(first)
    data = open_dataset(dataset, settings.allow_missing_chunks)
    binding = bind(inspect_onnx(model), data, settings)
    _check_metric(asked.measure.metric, binding)
    validation = None
    if asked.measure.validation is not None:
        validation = open_dataset(asked.measure.validation, settings.allow_missing_chunks)
        validation = validation.only(binding.used)
    for name, dimension in asked.space.items():
        for value in corners(dimension):
            check_schedule(asked, binding.samples, {**first, name: value})
    return Data(model, data.only(binding.used), validation, binding.samples)


def _check_metric(metric: Any, binding: Binding) -> None:
    heads = [target.output for target in binding.targets]
    known = ["loss", *(f"loss/{head}" for head in heads if len(heads) > 1)]
    if isinstance(metric, str) and metric not in known:
        raise InputError(
            f"there is no metric '{metric}'; there is {', '.join(known)}, or a function of the run"
        )


def total_steps(asked: Asked, samples: int, values: Mapping[str, Any], rung: int) -> int:
    """Return the total of steps that a trial trains to in a rung."""
    return int(Course(samples, asked.settings(values)).total_steps * asked.eta**rung)


def check_schedule(asked: Asked, samples: int, values: Mapping[str, Any]) -> None:
    """Raise InputError if a trial's learning rate ends before its last rung does."""
    rate, last = asked.settings(values).optimizer.lr, total_steps(asked, samples, values, asked.rungs - 1)
    while isinstance(rate, WarmUp):
        rate = rate.after
    if isinstance(rate, Cosine | Polynomial | OneCycle) and asked.rungs > 1 and (rate.steps or 0) < last:
        raise InputError(
            f"the learning rate, a {type(rate).__name__} of {rate.steps} steps, ends before the last rung at "
            f"{last} steps: a run that goes on cannot have another; give it steps={last}"
        )
