"""One call of ``search``, checked before anything is made: its space, counts, model, datasets, schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from oocdl.config import Settings, differences, make_settings, nearest, plain
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops.param_groups import lasting_groups
from oocdl.ops.schedules import Lasting, WarmUp, lasting
from oocdl.planning.binding import bind
from oocdl.planning.passes import Course
from oocdl.planning.sample_sizes import sized
from oocdl.space import Distribution, IntUniform
from oocdl.storage.dataset.dataset import DataArray, Dataset, open_dataset
from oocdl.storage.dataset.identity import compare, identity
from oocdl.tuning.trial import Measure

SEARCH_FILE = "search.json"
Dimension = tuple[Any, ...] | Distribution
WITH_FIELDS = ("optimizer", "loss")
"""Options whose fields may be varied, as in ``optimizer.weight_decay``."""
NOT_VARIED = dict.fromkeys(("steps", "epochs"), "rungs= says how long trials train")
NOT_VARIED |= dict.fromkeys(
    ("memory", "disk", "spill", "threads", "commit_seconds", "keep"), "it is the same for all trials"
)
DEFAULT_TRIALS = 16
ALIKE = ("rungs", "eta", "sampler", "seed", "mode")
ANY_TIME = ("memory", "disk", "spill", "threads", "commit_seconds", "strict")
"""Options that may be others when a search goes on."""


def checked_space(space: Any, options: Mapping[str, Any]) -> dict[str, Dimension]:
    """Return a space, lists as tuples, all of whose values runs can take. InputError names a wrong entry."""
    if not isinstance(space, Mapping) or not space:
        raise InputError("space takes a mapping such as {'lr': oocdl.space.LogUniform(1e-5, 1e-2)}")
    checked = {name: _dimension(name, given) for name, given in space.items()}
    for name in checked:
        root, dot, _ = name.partition(".")
        if root in NOT_VARIED:
            raise InputError(f"space cannot have '{name}': {NOT_VARIED[root]}")
        if dot and root not in WITH_FIELDS:
            raise InputError(f"space has '{name}', but only {' and '.join(WITH_FIELDS)} have fields to vary")
        if name in options or (name == "optimizer.lr" and ("lr" in options or "lr" in checked)):
            raise InputError(f"'{name}' is given twice; leave it to the space alone")
    for name, values in corners(checked):
        try:
            make_settings(**with_values(options, values))
        except InputError as error:
            raise InputError(f"space['{name}'] has {values[name]!r}: {error}") from error
    return checked


def _dimension(name: Any, given: Any) -> Dimension:
    if not isinstance(name, str):
        raise InputError(f"space takes names of options, got {name!r}")
    if isinstance(given, Distribution):
        return given
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence) or not given:
        raise InputError(f"space['{name}'] takes a list of values or one of oocdl.space, got {given!r}")
    return tuple(given)


def corners(space: Mapping[str, Dimension]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name with values of a trial for each of its values, or ends; others have their first ones."""
    ends = {name: held if isinstance(held, tuple) else (held.low, held.high) for name, held in space.items()}
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        yield from ((name, {**first, name: value}) for value in values)


def picked(space: Mapping[str, Any], picks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a trial's picks stand for: of a list that is the place in it."""
    listed = {name for name, held in space.items() if isinstance(held, tuple | list)}
    return {name: held[picks[name]] if name in listed else picks[name] for name, held in space.items()}


def with_values(options: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``fit`` with a trial's values, by the names of the space. Raises InputError.

    >>> with_values({"optimizer": "sgd"}, {"optimizer.momentum": 0.9, "batch_size": 2})["optimizer"].momentum
    0.9
    """
    varied = {**options, **{name: value for name, value in values.items() if "." not in name}}
    for root in WITH_FIELDS:
        if changes := _below(root, values):
            goes_with = ("optimizer", "lr") if root == "optimizer" else (root,)
            known = {name: varied.pop(name) for name in goes_with if name in varied}
            varied[root] = _changed(root, getattr(make_settings(**known), root), changes)
    return varied


def _below(root: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{root}."): v for name, v in values.items() if name.startswith(f"{root}.")}


def _changed(name: str, record: Any, changes: Mapping[str, Any]) -> Any:
    if not is_dataclass(record) or isinstance(record, type):
        raise InputError(f"{name} is {record!r}, which has no fields to vary")
    known, varied = [field.name for field in fields(record) if field.init], dict[str, Any]()
    for field_name in dict.fromkeys(path.partition(".")[0] for path in changes):
        if field_name not in known:
            hint = nearest(field_name, known) or f"; it has {', '.join(known) or 'none'}"
            raise InputError(f"{name}, a {type(record).__name__}, has no '{field_name}'{hint}")
        further = _below(field_name, changes)
        if further and field_name in changes:
            raise InputError(f"{name}.{field_name} is varied as a whole and by its fields; choose one")
        before = getattr(record, field_name)
        below = f"{name}.{field_name}"
        varied[field_name] = _changed(below, before, further) if further else changes[field_name]
    try:
        return replace(record, **varied)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be a {type(record).__name__} with {varied}: {error}") from error


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
