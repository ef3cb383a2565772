"""Forward passes of a run's model over a dataset, within a budget, for ``predict`` and ``evaluate``."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore, ZipStore

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings, make_settings
from oocdl.config.options import Metrics, Size
from oocdl.errors import BudgetError, DatasetError, InputError, StoreError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel, inspect_onnx
from oocdl.host.heap import lasting, use_one_heap
from oocdl.host.limits import check_budget
from oocdl.planning.binding import Binding, bind
from oocdl.planning.choice.pass_kinds import compile_within, draft_alike
from oocdl.planning.compiler import CompiledPass, draft_pass
from oocdl.planning.machine import Machine, check_device, machine_for
from oocdl.planning.passes import Course, Kind
from oocdl.planning.predicted import Prediction
from oocdl.planning.recipe import PassKind, Request
from oocdl.planning.sample_sizes import Sized, sized
from oocdl.runtime.session import Session
from oocdl.storage.dataset.dataset import Dataset, open_dataset
from oocdl.storage.dataset.sample_stack import own_sized, samples_of
from oocdl.storage.files import existing, make_private
from oocdl.storage.run.run_store import RunStore
from oocdl.training.metric_values import Gathered, Measured, fold
from oocdl.training.prediction.predictions import Predictions, warn_of_predictions
from oocdl.training.preparing import measured, preparation_of, with_numbers_of
from oocdl.training.resume import identity, same_operators, settings_of
from oocdl.training.signals import Signals


@dataclass(frozen=True, eq=False, kw_only=True)
class BoundRun:
    """A run, its network tied to a dataset."""

    store: RunStore
    model: OnnxModel
    settings: Settings
    sized: Sized
    preparation: Preparation

    def together(self) -> tuple[Any, ...]:
        targets = {output: head["target"] for output, head in self.store.meta["identity"]["loss"].items()}
        return self.settings.precision, targets, self.sized.multiple

    def apart(self, prefix: str) -> BoundRun:
        named, given = prefix.__add__, self.sized.dataset
        arrays = {named(n): replace(a, name=named(a.name), title=a.name) for n, a in given.arrays.items()}
        sized = replace(self.sized.apart(named), dataset=replace(given, arrays=arrays))
        return replace(self, sized=sized, preparation=self.preparation.renamed(named))

    def facts(self) -> dict[str, Any]:
        manifest, instead = self.store.current(), dict(self.store.instead)
        return {
            "version": "" if manifest is None else hashlib.sha256(manifest.dumps().encode()).hexdigest(),
            **({"instead": instead} if instead else {}),
            "scale": self.preparation.scale,
            **identity(self.model, self.sized.bindings[""], self.settings),
        }


class Inference:
    """Forward passes over a dataset, within a budget, of the networks of one run or several."""

    def __init__(
        self,
        members: Sequence[RunStore],
        dataset: Any,
        memory: Size | None,
        batch_size: int,
        inputs: Mapping[str, str] | None,
        spill: str | Path | None,
        with_targets: bool = False,
        targets: Mapping[str, str] | None = None,
        metrics: Metrics = (),
        mirror: bool | Sequence[int] = False,
        probabilities: bool = False,
        threads: int | None = None,
    ) -> None:
        self.store, stored = members[0], settings_of(members[0])
        given = {"inputs": inputs, "targets": targets, "memory": memory, "spill": spill, "metrics": metrics}
        checked = make_settings(batch_size=batch_size, threads=threads, **given)
        kept = {"inputs": inputs, "targets": targets, "memory_bytes": memory}
        names = ["batch_size", "spill", "metrics", "threads"]  # the spill of the run's owner is nothing here
        names += [name for name in kept if kept[name] is not None]
        changes = {name: getattr(checked, name) for name in names}
        of_first = {name: getattr(stored, name) for name in ("memory_bytes", "engine")}
        use_one_heap()
        opened = _opened(dataset, members, inputs or {}, with_targets)
        networks = [_network(one, opened, of_first | changes, with_targets) for one in members]
        for one in networks[1:]:
            if (its := one.together()) != (first := networks[0].together()):
                what = f"run {self.store.path} has {first}, and {one.store.path} {its}"
                raise InputError(f"a mean is of equal precision, targets and multiples of sizes: {what}")
        if len(networks) > 1:  # each normalises samples by its own numbers
            networks = [one.apart(f"/{number}/") for number, one in enumerate(networks)]
        self.networks = networks
        self.model, self.settings, self.sized = networks[0].model, networks[0].settings, networks[0].sized
        self.binding: Binding = self.sized.bindings[""]
        arrays = {name: array for one in networks for name, array in one.sized.dataset.arrays.items()}
        self.dataset: Dataset = replace(self.sized.dataset, arrays=arrays)
        self.preparation = reduce(Preparation.joined, (one.preparation for one in networks))
        self.means: dict[str, Any] = {"mirror": mirror, "probabilities": probabilities}
        self.is_mean = len(networks) > 1 or mirror is not False or probabilities
        check_budget(self.settings.memory_bytes)
        own_bytes, settings = self.preparation.nbytes, replace(self.settings, validation=None)
        self.machine: Machine = machine_for(self.settings, self.dataset, preparing_bytes=own_bytes)
        self.course = Course(0, settings, self.binding.samples, further_labels=self.sized.labels)
        self.kinds = self.course.validation_kinds
        self.image = self.dataset.arrays[next(iter(self.binding.inputs.values()))]
        self.samples = samples_of(self.image)
        """Name of each sample that is a group -> its attributes."""
        limits = self.machine.limits(self.settings, self.machine.unit_bytes)
        self.compiled: dict[str, CompiledPass] = {}
        for plan_id, kind in self.kinds.items():
            request, known = self._request(kind), list(self.compiled.values())
            draft = draft_alike(request, known[0]) if known else draft_pass(request)
            try:
                self.compiled[plan_id] = draft.cut(limits)
            except BudgetError:  # in other units, or in none, which names a budget that would do
                self.compiled[plan_id] = compile_within(draft, self.machine)
            check_device(self.compiled[plan_id].plan, self.machine)
        self.first = next(iter(self.compiled.values()))
        for one in networks:
            warn_of_predictions(self.first.plan.factored.graph, one.model)

    def _request(self, kind: Kind) -> Request:
        how: dict[str, Any] = {"batch": kind.batch, "kind": PassKind.FORWARD}
        members = list[tuple[Request, Mapping[str, Shape]]]()
        for one in self.networks:
            binding, facts = one.sized.bindings[kind.label], one.store.meta["identity"]
            shapes = {name: facts["dataset"][head["target"]]["shape"] for name, head in facts["loss"].items()}
            request = Request(model=one.model, binding=binding, settings=one.settings, **how)
            members.append((request, shapes))
        first = members[0][0]
        return Prediction(**vars(first), members=members, **self.means) if self.is_mean else first

    def extents(self, row: int) -> tuple[int, ...]:
        axes = max(len(port.dims) for port in self.model.inputs) - 2
        return own_sized(self.image, row).shape[-axes:] if axes > 0 else ()

    def outputs_unlike_inputs(self) -> set[str]:
        """Return the outputs whose targets in training had other extents than inputs, such as a class."""
        identity = self.store.meta["identity"]
        return set(identity["loss"]) - _outputs_like_inputs(self.model, identity, resized=True)

    def facts(self) -> dict[str, Any]:
        plans = {name: compiled.plan.numerics() for name, compiled in self.compiled.items()}
        first, *others = (one.facts() for one in self.networks)
        mean = {"others": others, "mirror": self.means["mirror"]} if self.is_mean else {}
        return {**first, **mean, "numerics": plans}

    def reads(self) -> Iterator[Path]:
        """Yield the runs, their models, and arrays and files of the dataset, as far as they are local."""
        for one in self.networks:
            yield from (one.store.path, one.model.path)
            spec = one.sized.dataset.spec
            source: Any = spec.source
            if isinstance(source, LocalStore | ZipStore):
                source = str(source.root if isinstance(source, LocalStore) else source.path)
            if isinstance(source, str) and "://" not in (place := source.removeprefix("file://")):
                # An array that is a folder; else all of it: a file, or samples that are groups.
                found = [path for name in spec.names if (path := Path(place, spec.group, name)).exists()]
                yield from found if len(found) == len(spec.names) else [Path(place)]

    def _read(self, name: str, region: Region, out: Array) -> Array:
        if len(self.networks) == 1:
            return self.store.read(name, region, out)
        _, number, own = name.split("/", 2)
        return self.networks[int(number)].store.read(own, region, out)

    def spill(self) -> Path:
        """Return the folder of the spill: a run that cannot be written is read all the same."""
        inside = self.store.path / "spill"
        if os.access(existing(inside), os.W_OK) and not inside.is_symlink():
            return self.settings.spill_folder(inside)
        other = Path(tempfile.gettempdir()) / f"oocdl-spill-{os.geteuid()}"
        folder = self.settings.spill_folder(other)
        if folder == other:
            make_private(other)
            text = f"the run in {self.store.path} cannot be written; spilling to {other}"
            warnings.warn(text, stacklevel=5)
        return folder

    def run(self, deliver: Any = None, made: Predictions | None = None) -> list[Measured]:
        """Run all batches but those in ``made``, in dataset order; returns the results of each."""
        passes, done = () if deliver is None else self.compiled.values(), set() if made is None else made.done
        gathered, results, signals, spill = Gathered(self.compiled), list[Measured](), Signals(), self.spill()
        watched = gathered.watched
        watched |= {c.plan.factored.stored(name) for c in passes for name in c.outputs.values()}

        def take(*piece: Any) -> None:
            gathered.deliver(*piece)
            if deliver is not None:
                deliver(*piece)

        taker, prepared = take if watched else None, measured(self.preparation, self.dataset)
        session = Session(self.compiled, self.dataset, prepared, self.machine, spill, taker, watched)
        with signals, session, lasting():
            session.load(next(iter(self.compiled)), self._read)
            for plan_id, info in self.course.validation_passes:
                if done.issuperset(info.indices):
                    continue
                with signals.allowed():
                    results.append(gathered.run(session, plan_id, info))
                if made is not None:
                    made.note(info.indices)
                if len(results) > 1:
                    fold(results[0].sums, results[-1].sums)
        return results


def model_path_of(store: RunStore) -> Path:
    """Return the path of a run's model: in the run, if it was made of a module."""
    name: str = store.meta["model"]
    return store.path.absolute() / name


def model_of(store: RunStore) -> OnnxModel:
    """Open the model of a run. Raises StoreError if it has changed."""
    model = inspect_onnx(model_path_of(store))
    if model.fingerprint() != store.meta["identity"]["model"]:
        raise StoreError(f"{model.path} is no longer the file this run was started with; restore it")
    return model


def _opened(
    dataset: Any, members: Sequence[RunStore], inputs: Mapping[str, str], with_targets: bool
) -> Dataset:
    """Open a dataset; without targets, what only some of its samples have does no harm beside the inputs."""
    allows = settings_of(members[0]).allow_missing_chunks
    try:
        return open_dataset(dataset, allows)
    except DatasetError:
        if not with_targets:
            names = set[str]()
            for one in members:
                known = {**(settings_of(one).inputs or {}), **inputs}
                names |= {known.get(port, port) for port in one.meta["identity"]["inputs"]}
            with suppress(DatasetError):
                return open_dataset(dataset, allows, sorted(names))
        raise


def _network(store: RunStore, dataset: Dataset, changes: Mapping[str, Any], with_targets: bool) -> BoundRun:
    """Tie the network of a run to a dataset, with other settings than it was trained with."""
    facts, model = store.meta["identity"], model_of(store)
    same_operators(store.path, facts, digests(model.nodes))
    stored = settings_of(store)
    known = {port: name for port, name in facts["inputs"].items() if name in dataset.arrays}
    settings = replace(stored, **{"scale": None, "inputs": known | dict(stored.inputs or {}), **changes})
    binding = bind(model, dataset, settings, with_targets=with_targets)
    used, whole, least = dataset.only(binding.used), range(binding.samples), facts.get("multiple", ())
    alike = _outputs_like_inputs(model, facts)
    made = sized(model, used, binding, settings, whole, least=least, alike=alike)
    preparation = _preparation(model, made, settings, store)
    return BoundRun(store=store, model=model, settings=settings, sized=made, preparation=preparation)


def _preparation(model: OnnxModel, found: Sized, settings: Settings, store: RunStore) -> Preparation:
    """Return what is done to samples of a dataset: what is done to those of each input in training."""
    identity, stored, binding = store.meta["identity"], settings_of(store), found.bindings[""]
    arrays = {array: identity["inputs"][name] for name, array in binding.inputs.items()}
    losses, targets = identity["loss"], binding.targets
    heads = {one.array: losses[one.output]["target"] for one in targets if one.output in losses}
    factors, asked = stored.scale or {}, stored.normalize
    further = {name: name for target in targets for name in target.further.values()}
    pairs = [*arrays.items(), *heads.items(), *further.items()]
    scale = {now: factors[then] for now, then in pairs if then in factors}
    if isinstance(asked, Mapping):
        asked = {now: asked[then] for now, then in arrays.items() if then in asked}
    made = preparation_of(model, found, replace(settings, scale=scale, normalize=asked))
    return with_numbers_of(made, store, arrays)


def _outputs_like_inputs(model: OnnxModel, identity: Mapping[str, Any], resized: bool = False) -> set[str]:
    """Return the outputs whose targets have the extents of inputs: of one target's, the first, or all."""
    arrays, axes = identity["dataset"], max(len(port.dims) for port in model.inputs) - 2
    spaces = [arrays[name]["shape"][1:][-axes:] for name in identity["inputs"].values() if axes > 0]
    named = {port.name: identity["loss"].get(port.name, {}).get("target") for port in model.outputs}
    heads = {output: array for output, array in named.items() if array is not None}
    first = {array: output for output, array in reversed(heads.items())}
    alike = {output for output, array in heads.items() if arrays[array]["shape"][1:][-axes:] in spaces}
    return alike if resized else alike & set(first.values())
