"""Decides whether a run may go on: compares it with what began it, and keeps its plan and its settings.

Facts of the run (model, data, loss, ...) stand in ``run.json`` and never change. Facts of its plan
(engine, cuts, ...) stand in ``plan.json``; ``replan`` may change them, and with them rounding. Settings stand
in ``run.json``, too, as they were at first; a commit of steps that were done with others has these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from oocdl import transforms
from oocdl.config.settings import SAMPLED_STEPS, Settings, differences, make_settings, plain, setting_names
from oocdl.errors import CorruptError, InputError, StoreError
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.paths import path_of
from oocdl.ops.loss_functions import Loss
from oocdl.ops.metric_functions import METRICS
from oocdl.ops.optimizers import LAMB, SGD, Adam, AdamW, Lion, Own, RMSprop
from oocdl.ops.own_loss import OwnMetric
from oocdl.ops.param_groups import rates_of, step_scalars
from oocdl.ops.schedules import Scaling, Then, WarmUp
from oocdl.planning.binding import Binding
from oocdl.planning.choice.pass_kinds import own_plans
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.pass_plan import frozen_cuts
from oocdl.planning.sample_sizes import Sized
from oocdl.report.plan_view import Plan
from oocdl.storage.dataset.dataset import DataArray, Dataset, DatasetSpec
from oocdl.storage.dataset.identity import compare
from oocdl.storage.dataset.identity import identity as dataset_identity
from oocdl.storage.run.run_store import RunStore
from oocdl.storage.run.sealed_files import understood

RUN_FORMAT = 3
MOST_LISTED = 6
"""Maximum number of differences that an error lists."""
ANEW = "choose another workdir, or resume='restart'"


def identity(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    validation: Binding | None = None,
    sizes: Sized | None = None,
) -> dict[str, Any]:
    """Return the facts of a run, as plain data by name."""
    own = digests(model.nodes)
    read = {name: one.arrays[name] for one in (binding, validation) if one for name in one.used}
    return {
        "model": model.fingerprint(),
        **({"operators": own} if own else {}),
        "inputs": dict(binding.inputs),
        "loss": {
            t.output: {"loss": plain(t.spec), "weight": t.weight, "target": t.array, **t.further}
            for t in binding.targets
        },
        "dataset": {name: dataset_identity(array) for name, array in sorted(read.items())},
        **({} if settings.validation is None else {"validation": plain(settings.held_out) or "a dataset"}),
        **({"sizes": list(sizes.labels), "multiple": list(sizes.multiple)} if sizes and sizes.labels else {}),
        **({"metrics": {one.name: plain(one) for one in settings.metrics}} if settings.metrics else {}),
        **fixed(settings, "run"),
    }


def source_of(dataset: Dataset) -> list[Any] | None:
    """Return where a dataset is, and its arrays, as plain data; None for a store that was open."""
    specs = [one for one in (dataset.spec, dataset.spec.validation) if one is not None]
    if not all(isinstance(one.source, str) for one in specs):
        return None
    return [part for one in specs for part in (one.source, one.group, list(one.names))]


def spec_of(source: Sequence[Any], allow_missing_chunks: bool) -> DatasetSpec:
    """Return the dataset of which ``source_of`` has returned ``source``."""
    place, group, names, *further = source
    validation = spec_of(further, allow_missing_chunks) if further else None
    return DatasetSpec(place, group, tuple(names), allow_missing_chunks, validation=validation)


def check_run(
    store: RunStore, facts: Mapping[str, Any], arrays: Mapping[str, DataArray], settings: Settings
) -> None:
    """Check that a run may go on with these facts, arrays, and learning rates of the steps that are done.

    Warns of a copy of the dataset. Raises InputError with what differs, StoreError for another version.
    """
    folder = store.path
    known = store.meta.get("identity")
    if store.meta.get("format") != RUN_FORMAT or not isinstance(known, Mapping):
        raise StoreError(f"the run in {folder} is of another version of oocdl; choose another workdir")
    before, now = known["dataset"], facts["dataset"]
    found = [compare(arrays[name], before[name], now[name]) for name in before if name in now]
    changed = [one.changed for one in found if one.changed]
    same_operators(folder, known, facts.get("operators", {}))
    others = differences(_compared(known), _compared(facts))
    others += _rate_differences(store, settings)
    manifest = store.current()
    done = 0 if manifest is None else min(int(manifest.meta[name]) for name in ("step", "steps"))
    way_out = ANEW if done else "no step of it is committed, so resume='restart' loses nothing"
    refuse_if(f"the run in {folder} was started differently", [*others, *changed], way_out)
    for one in found:
        if one.copied:
            warnings.warn(f"the run in {folder} goes on: {one.copied}", stacklevel=2)


def _compared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that have to be equal: learning rates are compared by themselves."""
    optimizer, *groups = (
        {**one, **dict.fromkeys(one.keys() & {"lr"})} if isinstance(one, Mapping) else one
        for one in (facts.get("optimizer"), *(facts.get("param_groups") or ()))
    )
    return {**facts, "dataset": None, "optimizer": optimizer, "param_groups": groups}


def _rate_differences(store: RunStore, settings: Settings) -> list[str]:
    for row in store.history():
        now = rates_of(step_scalars(settings.optimizer, settings.param_groups, None, row["step"] - 1))
        for name in now | rates_of(row):  # a group without a rate of its own has that of all others
            before = row.get(f"scheduled_{name}", row.get(name, row["lr"]))
            after = now.get(name, now["lr"])
            if before != after:
                done = max(row["step"] for row in store.history())
                return [
                    f"optimizer.{name} was {before:.6g} at step {row['step']}, is {after:.6g} (where another "
                    f"is to follow, pass lr=oocdl.optim.Then(what it was, {done}, another))"
                ]
    return []


def refuse_if(what: str, differing: Sequence[str], way_out: str = ANEW) -> None:
    """Raise InputError, which lists the first differences, if there are any."""
    if differing:
        more = [f"{len(differing) - MOST_LISTED} more"][: len(differing) > MOST_LISTED]
        raise InputError(f"{what}: {'; '.join([*differing[:MOST_LISTED], *more])}; {way_out}")


def same_operators(folder: Path, facts: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Raise InputError if a user's own operators, by digest, are not those of a run's facts."""
    others = differences(facts.get("operators", {}), now, "operators")
    way_out = "register those of the run with oocdl.ops.register, or choose another workdir"
    refuse_if(f"the run in {folder} has other functions", others, way_out)


def fixed(settings: Settings, what: str) -> dict[str, Any]:
    """Return the settings without which a run, or its plan, cannot go on, as plain data."""
    names = setting_names(lambda option: option.fixed == what)
    return {name: plain(getattr(settings, name)) for name in names}


def read_plan(store: RunStore, facts: Mapping[str, Any], machine: Mapping[str, str]) -> dict[str, Any] | None:
    """Read the plan of a run, if it has one. Warns of another ``machine``; InputError for other ``facts``."""
    path = store.path / "plan.json"
    try:
        body = store.read_sealed(path.name)
    except CorruptError as error:
        raise CorruptError(f"{error}, or pass replan=True (which changes rounding)") from error
    if body is None:
        if store.current() is None:
            return None
        raise StoreError(f"{path} is lost; restore it, or pass replan=True (which changes rounding)")
    way_out = "pass replan=True to change that (which changes rounding), or resume='restart'"
    others = differences(body["facts"], dict(facts))
    refuse_if(f"the run in {store.path} was planned differently", others, way_out)
    if body["machine"] != machine:
        changed = "; ".join(differences(body["machine"], dict(machine)))
        text = f"the run in {store.path} goes on elsewhere, where results are close but not equal: {changed}"
        warnings.warn(text, stacklevel=2)
    return body


def given_plan(name: str, given: Any) -> dict[str, Any]:
    """Return what is needed to make again a ``Plan``, or that of the run in a directory."""
    if isinstance(given, Plan):
        return freeze(given.kinds)
    store = RunStore.open(path_of(name, given))
    body = store.read_sealed("plan.json")
    if body is None:
        raise StoreError(f"the run in {store.path} has no plan yet")
    return body


def check_plan(given: Mapping[str, Any] | None, found: Mapping[str, Any], way_out: str) -> None:
    """Raise InputError unless a plan that was found has the cuts of the one that was given, if one was."""
    if given is not None and given["numerics"] != found["numerics"]:
        raise InputError(f"the run was planned otherwise than plan= gives; {way_out}")


def freeze(kinds: Mapping[str, CompiledPass]) -> dict[str, Any]:
    """Return the data to make plans again, by plan id, and under "numerics" the digests they will have."""
    cuts: dict[str, Any] = {
        name: {**frozen_cuts(compiled.plan), "rounded": sorted(compiled.bfloat16_values)}
        for name, compiled in own_plans(kinds).items()
    }
    return {**cuts, "numerics": numerics_of(kinds)}


def numerics_of(kinds: Mapping[str, CompiledPass]) -> dict[str, str]:
    """Return the digest of the numerics of each plan, by plan id."""
    return {name: compiled.plan.numerics() for name, compiled in own_plans(kinds).items()}


KINDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        *get_args(Loss), *map(type, METRICS.values()), OwnMetric,
        *get_args(Scaling), WarmUp, Then, SGD, Adam, AdamW, RMSprop, Lion, LAMB,
        *(getattr(transforms, name) for name in transforms.__all__),
    )
}  # fmt: skip
"""Type name -> type that plain data may be restored as."""
ALL = setting_names(lambda option: True)
OF_PREDICTIONS = setting_names(lambda option: option.predicts)
"""Settings that a run also predicts and evaluates with."""
BY_NAME = ("inputs", "targets", "dims", "scale", "normalize", "validation")
"""Settings that may be mappings of the user's names, of which "type" may be one, to plain data."""


def _noted(known: Mapping[int, float], step: int) -> float:
    """A learning rate that was a function of the user's own, of which a run has some values."""
    if step not in known:
        raise InputError(f"the learning rate was a function of yours, which was not noted at step {step}")
    return known[step]


def noted_settings(store: RunStore, settings: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return what a commit notes of ``settings`` beside ``run.json``; for None, as the commit before."""
    if settings is not None:
        return settings if settings != store.meta["settings"] else None
    manifest = store.current()
    return None if manifest is None else manifest.meta.get("settings")


def settings_of(store: RunStore, names: Collection[str] = OF_PREDICTIONS) -> Settings:
    """Make the settings of the last step of a version, of others than ``names`` the defaults."""
    with understood(store.path):
        data = noted_settings(store) or store.meta["settings"]
        heads = data["loss"].get("heads")
        asis = BY_NAME if heads is None else (*BY_NAME, "loss")
        held = {name: data[name] for name in ALL if name in names and name in data}
        found: dict[str, Any] = {}
        found |= {n: v if n in asis and isinstance(v, Mapping) else _value(v) for n, v in held.items()}
        if heads is not None:
            found["loss"] = {name: (_value(spec), float(weight)) for name, (spec, weight) in heads.items()}
        return replace(make_settings(), **found)


def _value(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_value, data))
    if not isinstance(data, Mapping):
        return data
    if "type" not in data:
        return {name: _value(held) for name, held in data.items()}
    if "values" in data:
        return partial(_noted, dict(zip(SAMPLED_STEPS, data["values"], strict=False)))
    values = {name: _value(held) for name, held in data.items() if name != "type"}
    if data["type"] != Own.__name__:
        return KINDS[data["type"]](**values)
    made = object.__new__(Own)  # it need not be registered here
    for one in fields(Own):
        object.__setattr__(made, one.name, values[one.name])
    return made
