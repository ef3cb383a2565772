"""One call of ``search``, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from oocdl.config import Settings, differences, make_settings, plain
from oocdl.config import whole as whole_number
from oocdl.config.option_checks import one_of
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.param_groups import lasting_groups, rates_of, step_scalars
from oocdl.ops.schedules import Lasting, WarmUp, lasting
from oocdl.planning.binding import Binding, bind
from oocdl.planning.passes import Course
from oocdl.planning.sample_sizes import sized
from oocdl.space import IntUniform
from oocdl.storage.dataset.dataset import Dataset, open_dataset
from oocdl.storage.dataset.identity import compare, identity
from oocdl.tuning.trial import Measure
from oocdl.tuning.values import Dimension, checked_space, corners, with_values

SEARCH_FILE = "search.json"
"""The file that makes a folder that of a search."""
DEFAULT_TRIALS = 16
"""Trials of a search if the caller does not say."""
LEAST = {"rungs": 1, "eta": 2, "seed": 0, "trials_per_round": 1}
ANY_TIME = ("memory", "disk", "spill", "threads", "commit_seconds", "strict")
"""Options that may be others when a search goes on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Asked:
    """A space, and how trials of it train; made by ``asked_of``."""

    space: Mapping[str, Dimension]
    options: Mapping[str, Any]
    """Options of ``fit`` that the space does not vary."""
    length: Mapping[str, int]
    """``steps`` or ``epochs`` of the first rung."""
    trials: int
    measure: Measure
    rungs: int
    eta: int
    sampler: str
    trials_per_round: int
    seed: int
    mode: str

    def fit_options(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of ``fit`` for a trial, without ``steps``."""
        return with_values({"seed": self.seed, **self.options}, values)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings of a trial in the first rung. Raises InputError."""
        return make_settings(**self.fit_options(values), **self.length)

    def total_steps(self, data: Data, values: Mapping[str, Any], rung: int) -> int:
        """Return the total of steps that a trial trains to in a rung."""
        course = Course(data.samples, self.settings(values), labels=data.labels)
        return int(course.total_steps * self.eta**rung)

    def check_schedule(self, data: Data, values: Mapping[str, Any]) -> None:
        """Raise InputError if a learning rate ends before the last rung, or is another in later ones."""
        settings, first = self.settings(values), self.total_steps(data, values, 0)
        *earlier, last = [first * self.eta**rung for rung in range(self.rungs)]
        rate = settings.optimizer.lr
        while isinstance(rate, WarmUp):
            rate = rate.after
        if earlier and isinstance(rate, Lasting) and rate.steps is not None and rate.steps < last:
            raise InputError(
                f"the learning rate, a {type(rate).__name__} of {rate.steps} steps, ends before the last "
                f"rung at {last} steps: a run that goes on cannot have another; give it steps={last}"
            )
        for steps in earlier:
            if (name := _changed_rate(settings, steps, last)) is not None:
                group = name.partition("/")[2]
                which = f" of group {group} of param_groups" if group else ""
                raise InputError(
                    f"the learning rate{which} lasts as long as a run, and would be another where a trial of "
                    f"{steps} steps goes on to the last rung at {last}; give its schedule steps=, or the "
                    "search rungs=1"
                )

    def facts(self) -> dict[str, Any]:
        """Return as plain data what a search that goes on must have in common with what it began with."""
        metric = self.measure.metric
        name = getattr(metric, "__qualname__", type(metric).__name__)
        alike = ("rungs", "eta", "sampler", "seed", "mode")
        return {
            "space": {name: plain(dimension) for name, dimension in self.space.items()},
            "options": plain({name: held for name, held in self.options.items() if name not in ANY_TIME}),
            "length": dict(self.length),
            **{name: getattr(self, name) for name in alike},
            "trials_per_round": self.trials_per_round if self.sampler == "optuna" else None,
            "metric": metric if isinstance(metric, str) else f"function {name}",
            "last_steps": self.measure.last_steps,
        }


def asked_of(
    space: Any, options: Mapping[str, Any], measure: Measure, mode: str, *, sampler: str, **given: Any
) -> Asked:
    """Check the arguments of ``search``. Raises InputError."""
    length = {name: given[name] for name in ("steps", "epochs") if given[name] is not None}
    length = {name: whole_number(name, count) for name, count in length.items()}
    if len(length) == 2:
        raise InputError("give steps or epochs of the first rung, not both")
    counts: dict[str, Any] = {name: whole_number(name, given[name], least) for name, least in LEAST.items()}
    whole_number("last_steps", measure.last_steps)
    one_of("random", "grid", "optuna")("sampler", sampler)
    one_of("min", "max")("mode", mode)
    if not isinstance(measure.metric, str) and not callable(measure.metric):
        raise InputError(f"metric takes 'loss' or a function of the run, got {measure.metric!r}")
    if callable(measure.metric) and measure.validation is not None:
        raise InputError(
            "validation= is what the loss of trials is taken of, and metric= is a function of the run: have "
            "the function evaluate it, and leave validation= out"
        )
    trials = given["trials"] if given["trials"] is None else whole_number("trials", given["trials"])
    checked = checked_space(space, options)
    return Asked(
        space=checked,
        options=options,
        length=length or {"epochs": 1},
        trials=trial_count(sampler, checked, trials),
        measure=measure,
        sampler=sampler,
        mode=mode,
        **counts,
    )


def _changed_rate(settings: Settings, steps: int, last: int) -> str | None:
    """Return the first learning rate that a run of ``last`` steps has otherwise in its first ``steps``."""
    rate, groups = settings.optimizer.lr, settings.param_groups
    courses = [(lasting(rate, count), lasting_groups(groups, count)) for count in (steps, last)]
    if courses[0] == courses[1]:
        return None
    for step in range(steps):
        was, now = (
            rates_of(step_scalars(replace(settings.optimizer, lr=lr), held, None, step))
            for lr, held in courses
        )
        for name in was:
            if was[name] != now[name]:
                return name
    return None


def listed(space: Mapping[str, Dimension]) -> dict[str, range] | None:
    """Return the picks that each name of a space may have; None if one of them has too many to list."""
    picks = {
        name: range(len(held)) if isinstance(held, tuple) else range(int(held.low), int(held.high) + 1)
        for name, held in space.items()
        if isinstance(held, tuple | IntUniform)
    }
    return picks if len(picks) == len(space) else None


def trial_count(sampler: str, space: Mapping[str, Dimension], trials: int | None) -> int:
    """Return how many trials a search has. Raises InputError if the space does not have as many."""
    picks = listed(space)
    size = prod(map(len, picks.values())) if picks else None
    if size is None:
        if sampler == "grid":
            raise InputError("sampler='grid' takes lists of values and IntUniform; else sampler='random'")
        return trials or DEFAULT_TRIALS
    if sampler == "grid" and trials not in (None, size):
        raise InputError(
            f"a grid has all {size} combinations, got trials={trials}; leave it out, or draw some with "
            "sampler='random'"
        )
    if sampler == "random" and trials is not None and trials > size:
        raise InputError(
            f"the space has {size} combinations, fewer than trials={trials}; use sampler='grid' for all"
        )
    return size if sampler == "grid" else trials or min(DEFAULT_TRIALS, size)


@dataclass(frozen=True, eq=False)
class Data:
    """The model and the datasets of a search, opened."""

    model: Path
    dataset: Dataset
    validation: Dataset | None
    samples: int
    held_out: int
    """Samples of the validation dataset; 0 if there is none."""
    labels: Sequence[str]
    """The label of each sample's size; empty where all have one size."""

    def facts(self) -> dict[str, Any]:
        """Return what tells them from others, as plain data."""
        known = {"dataset": self.dataset, "validation": self.validation}
        sets = {
            part: data and {name: identity(array) for name, array in data.arrays.items()}
            for part, data in known.items()
        }
        return {"model": inspect_onnx(self.model).fingerprint(), **sets}

    def changed(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        """Yield in words how facts of a search differ from what they were."""
        sets = {"dataset": self.dataset, "validation": self.validation}
        yield from differences({**then, **dict.fromkeys(sets)}, {**now, **dict.fromkeys(sets)})
        for part, data in sets.items():
            before, after = then[part] or {}, now[part] or {}
            if before.keys() != after.keys():
                yield f"{part} is another"
            elif data is not None:
                compared = (compare(array, before[n], after[n]) for n, array in data.arrays.items())
                yield from (f"{part}: {found.changed}" for found in compared if found.changed)


def opened(asked: Asked, model: Path, dataset: Any) -> Data:
    """Open model and datasets, and check trials against them. Raises what ``fit`` raises for them."""
    first = next(values for _, values in corners(asked.space))
    settings = asked.settings(first)
    data = open_dataset(dataset, settings.allow_missing_chunks)
    network = inspect_onnx(model)
    binding = bind(network, data, settings)
    _check_metric(asked.measure.metric, binding)
    validation, held_out = None, 0
    if asked.measure.validation is not None:
        validation = open_dataset(asked.measure.validation, settings.allow_missing_chunks)
        validation = validation.only(binding.used)
        held_out = bind(network, validation, replace(settings, batch_size=1, scale=None)).samples
    data, samples = data.only(binding.used), binding.samples
    labels = sized(network, data, binding, settings, range(samples)).labels
    found = Data(model, data, validation, samples, held_out, labels)
    for _, values in corners(asked.space):
        asked.check_schedule(found, values)
    return found


def _check_metric(metric: Any, binding: Binding) -> None:
    heads = [target.output for target in binding.targets]
    known = ["loss", *(f"loss/{head}" for head in heads if len(heads) > 1)]
    if isinstance(metric, str) and metric not in known:
        raise InputError(
            f"there is no metric '{metric}'; there is {', '.join(known)}, or a function of the run"
        )
