"""One call of ``search``, checked before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from oocdl.config import Settings, differences, make_settings, plain
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.param_groups import lasting_groups
from oocdl.ops.schedules import Lasting, WarmUp, lasting
from oocdl.planning.binding import bind
from oocdl.planning.passes import Course
from oocdl.planning.sample_sizes import sized
from oocdl.space import IntUniform
from oocdl.storage.dataset.dataset import DataArray, Dataset, open_dataset
from oocdl.storage.dataset.identity import compare, identity
from oocdl.tuning.trial import Measure
from oocdl.tuning.values import Dimension, checked_space, corners, with_values

SEARCH_FILE = "search.json"
DEFAULT_TRIALS = 16
ALIKE = ("rungs", "eta", "sampler", "seed", "mode")
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
        return with_values({"seed": self.seed, **self.options}, values)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        return make_settings(**self.fit_options(values), **self.length)

    def total_steps(self, data: Data, values: Mapping[str, Any], rung: int) -> int:
        course = Course(data.samples, self.settings(values), labels=data.labels)
        return int(course.total_steps * self.eta**rung)

    def check_schedule(self, data: Data, values: Mapping[str, Any]) -> None:
        settings, first = self.settings(values), self.total_steps(data, values, 0)
        last, rate = self.total_steps(data, values, self.rungs - 1), settings.optimizer.lr
        while isinstance(rate, WarmUp):
            rate = rate.after
        if last > first and isinstance(rate, Lasting) and rate.steps is not None and rate.steps < last:
            raise InputError(
                f"the learning rate, a {type(rate).__name__} of {rate.steps} steps, ends before the last "
                f"rung at {last} steps: a run that goes on cannot have another; give it steps={last}"
            )
        lr, groups = settings.optimizer.lr, settings.param_groups
        was, now = ([lasting(lr, n), *(lasting_groups(groups, n) or ())] for n in (first, last))
        for group in (at for at in range(len(was)) if was[at] != now[at]):
            which = f" of group {group} of param_groups" if group else ""
            raise InputError(
                f"the learning rate{which} lasts as long as a run, and would be another where a trial of "
                f"{first} steps goes on to the last rung at {last}; give its schedule steps=, or the search "
                "rungs=1"
            )

    def facts(self) -> dict[str, Any]:
        metric = self.measure.metric
        function = f"function {getattr(metric, '__qualname__', type(metric).__name__)}"
        return {
            "space": {name: plain(dimension) for name, dimension in self.space.items()},
            "options": plain({name: held for name, held in self.options.items() if name not in ANY_TIME}),
            "length": dict(self.length),
            **{name: getattr(self, name) for name in ALIKE},
            "trials_per_round": self.trials_per_round if self.sampler == "optuna" else None,
            "metric": metric if isinstance(metric, str) else function,
            "last_steps": self.measure.last_steps,
        }


def asked_of(space: Any, options: Mapping[str, Any], own: Mapping[str, Any]) -> Asked:
    """Check what ``search`` was given; its ``own`` options were checked by themselves. Raises InputError."""
    length = {name: own[name] for name in ("steps", "epochs") if own[name] is not None}
    if len(length) == 2:
        raise InputError("give steps or epochs of the first rung, not both")
    if not isinstance(metric := own["metric"], str) and not callable(metric):
        raise InputError(f"metric takes 'loss' or a function of the run, got {metric!r}")
    if callable(metric) and own["validation"] is not None:
        raise InputError(
            "validation= is what the loss of trials is taken of, and metric= is a function of the run: have "
            "the function evaluate it, and leave validation= out"
        )
    checked = checked_space(space, options)
    return Asked(
        space=checked,
        options=options,
        length=length or {"epochs": 1},
        trials=trial_count(own["sampler"], checked, own["trials"]),
        measure=Measure(metric, own["validation"], own["last_steps"]),
        **{name: own[name] for name in ("trials_per_round", *ALIKE)},
    )


def listed(space: Mapping[str, Dimension]) -> dict[str, range] | None:
    """Return the picks that each name of a space may have; None if one of them has too many to list."""
    picks = dict[str, range]()
    for name, held in space.items():
        if not isinstance(held, tuple | IntUniform):
            return None
        ends = (0, len(held)) if isinstance(held, tuple) else (int(held.low), int(held.high) + 1)
        picks[name] = range(*ends)
    return picks


def trial_count(sampler: str, space: Mapping[str, Dimension], trials: int | None) -> int:
    """Return how many trials a search has. Raises InputError if the space does not have as many."""
    picks = listed(space)
    if picks is None:
        if sampler == "grid":
            raise InputError("sampler='grid' takes lists of values and IntUniform; else sampler='random'")
        return trials or DEFAULT_TRIALS
    size = prod(map(len, picks.values()))
    if sampler == "grid" and trials not in (None, size):
        way_out = "leave it out, or draw some with sampler='random'"
        raise InputError(f"a grid has all {size} combinations, got trials={trials}; {way_out}")
    if sampler == "random" and trials is not None and trials > size:
        way_out = "use sampler='grid' for all"
        raise InputError(f"the space has {size} combinations, fewer than trials={trials}; {way_out}")
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

    @property
    def sets(self) -> dict[str, Mapping[str, DataArray] | None]:
        further = None if self.validation is None else self.validation.arrays
        return {"dataset": self.dataset.arrays, "validation": further}

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"model": inspect_onnx(self.model).fingerprint()}
        for part, arrays in self.sets.items():
            facts[part] = arrays and {name: identity(one) for name, one in arrays.items()}
        return facts

    def changed(self, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        without = dict.fromkeys(self.sets)
        yield from differences({**then, **without}, {**now, **without})
        for part, arrays in self.sets.items():
            before, after = then[part] or {}, now[part] or {}
            if before.keys() != after.keys():
                yield f"{part} is another"
                continue
            compared = [compare(one, before[name], after[name]) for name, one in (arrays or {}).items()]
            yield from (f"{part}: {found.changed}" for found in compared if found.changed)


def opened(asked: Asked, model: Path, dataset: Any) -> Data:
    """Open model and datasets, and check trials against them. Raises what ``fit`` raises for them."""
    first = next(values for _, values in corners(asked.space))
    settings = asked.settings(first)
    data = open_dataset(dataset, settings.allow_missing_chunks)
    network = inspect_onnx(model)
    binding = bind(network, data, settings)
    heads = [target.output for target in binding.targets]
    known = ["loss", *(f"loss/{head}" for head in heads if len(heads) > 1)]
    if isinstance(metric := asked.measure.metric, str) and metric not in known:
        others = f"{', '.join(known)}, or a function of the run"
        raise InputError(f"there is no metric '{metric}'; there is {others}")
    validation, held_out = None, 0
    if (given := asked.measure.validation) is not None:
        validation = open_dataset(given, settings.allow_missing_chunks).only(binding.used)
        held_out = bind(network, validation, replace(settings, batch_size=1, scale=None)).samples
    data, samples = data.only(binding.used), binding.samples
    labels = sized(network, data, binding, settings, range(samples)).labels
    found = Data(model, data, validation, samples, held_out, labels)
    for _, values in corners(asked.space):
        asked.check_schedule(found, values)
    return found
