"""Forward passes of a run's model over a dataset, within a budget, for ``predict`` and ``evaluate``."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings, make_settings
from oocdl.config.options import Metrics, Size
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.index import Region
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.heap import use_one_heap
from oocdl.host.limits import check_budget
from oocdl.planning.binding import Binding, bind
from oocdl.planning.choice.pass_kinds import draft_alike
from oocdl.planning.compiler import CompiledPass, draft_pass
from oocdl.planning.machine import Machine, check_device, machine_for
from oocdl.planning.passes import Course, Kind
from oocdl.planning.predicted import Member, Prediction, network_of
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
from oocdl.training.resume import identity, same_operators
from oocdl.training.signals import Signals

ONCE = ("memory_bytes", "engine", "threads")
"""Settings that the networks of several runs have from the first of them."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A run whose weights are read."""

    path: Path
    store: RunStore
    settings: Settings
    """Settings that it was trained with."""
    model: Callable[[], OnnxModel]
    """Opens its model. Raises StoreError if that has changed."""


@dataclass(frozen=True)
class Means:
    """Means that are predicted instead of outputs."""

    mirror: bool | Sequence[int] = False
    """The spatial axes that samples are mirrored along; True: all of them."""
    probabilities: bool = False
    """Whether outputs have to be probabilities."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Network:
    """A run's network, tied to a dataset."""

    trained: Trained
    model: OnnxModel
    settings: Settings
    sized: Sized
    preparation: Preparation
    labels: Mapping[str, Shape]
    """Output -> the shape of its labels in training; empty if they had the extents of the inputs."""

    @property
    def targets(self) -> dict[str, str]:
        """Output -> the array that it was compared with in training."""
        heads = self.trained.store.meta["identity"]["loss"]
        return {output: head["target"] for output, head in heads.items()}

    def apart(self, prefix: str) -> Network:
        """Return the same with a prefix before all names of arrays."""
        named, arrays = prefix.__add__, self.sized.dataset.arrays
        dataset = replace(self.sized.dataset, arrays={named(name): its for name, its in arrays.items()})
        sized = replace(self.sized.apart(named), dataset=dataset)
        return replace(self, sized=sized, preparation=self.preparation.renamed(named))

    def facts(self) -> dict[str, Any]:
        """Return what predictions depend on, but for plans, as plain data."""
        store = self.trained.store
        manifest = store.current()
        version = "" if manifest is None else hashlib.sha256(manifest.dumps().encode()).hexdigest()
        return {
            "version": version,
            **({"instead": dict(store.instead)} if store.instead else {}),
            "scale": self.preparation.scale,
            **identity(self.model, self.sized.bindings[""], self.settings),
        }


class Inference:
    """Forward passes over a dataset, within a budget, of the networks of one run or several."""

    def __init__(
        self,
        members: Sequence[Trained],
        dataset: Any,
        memory: Size | None,
        batch_size: int,
        inputs: Mapping[str, str] | None,
        spill: str | Path | None,
        with_targets: bool = False,
        targets: Mapping[str, str] | None = None,
        metrics: Metrics = (),
        means: Means = Means(),
    ) -> None:
        trained = self.trained = members[0]
        given = {"inputs": inputs, "targets": targets, "memory": memory, "spill": spill, "metrics": metrics}
        checked = make_settings(batch_size=batch_size, **given)
        kept = {"inputs": inputs, "targets": targets, "memory_bytes": memory}
        # Where the run's owner spilled is nothing to the caller.
        names = ["batch_size", "spill", "metrics", *(name for name in kept if kept[name] is not None)]
        changes = {name: getattr(checked, name) for name in names}
        use_one_heap()
        changes |= {name: getattr(replace(trained.settings, **changes), name) for name in ONCE}
        opened = open_dataset(dataset, trained.settings.allow_missing_chunks)
        networks = [_network(one, opened, changes, with_targets) for one in members]
        self.means = means if len(networks) > 1 or means.mirror is not False or means.probabilities else None
        self.networks = networks = _apart(networks)
        first, *others = networks
        self.model, self.settings, self.sized = first.model, first.settings, first.sized
        self.mirror = _mirrored_axes(means.mirror, _spatial_axes(self.model))
        arrays = {name: array for one in networks for name, array in one.sized.dataset.arrays.items()}
        self.dataset: Dataset = replace(self.sized.dataset, arrays=arrays)
        self.binding: Binding = self.sized.bindings[""]
        self.preparation = first.preparation
        for one in others:
            self.preparation = self.preparation.joined(one.preparation)
        check_budget(self.settings.memory_bytes)
        self.machine: Machine = machine_for(
            self.settings, self.dataset, preparing_bytes=self.preparation.nbytes
        )
        settings = replace(self.settings, validation=None)
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
            self.compiled[plan_id] = draft.cut(limits)
            check_device(self.compiled[plan_id].plan, self.machine)
        self.first = next(iter(self.compiled.values()))
        for one in networks:
            warn_of_predictions(self.first.plan.factored.graph, one.model)

    def _request(self, kind: Kind) -> Request:
        """Return the request of a kind of passes, for means or for outputs as they are."""
        parts: list[dict[str, Any]] = [
            {
                "model": one.model,
                "binding": one.sized.bindings[kind.label],
                "settings": one.settings,
                "batch": kind.batch,
                "kind": PassKind.FORWARD,
            }
            for one in self.networks
        ]
        if self.means is None:
            return Request(**parts[0])
        members = [Member(**part, labels=one.labels) for part, one in zip(parts, self.networks, strict=True)]
        wanted = self.means.probabilities
        return Prediction(**parts[0], members=members, mirror=self.mirror, probabilities=wanted)

    def extents(self, row: int) -> tuple[int, ...]:
        """Return the spatial extents of a sample, of which there may be none."""
        axes = _spatial_axes(self.model)
        return own_sized(self.image, row).shape[-axes:] if axes > 0 else ()

    def facts(self) -> dict[str, Any]:
        """Return what predictions depend on, as plain data."""
        plans = {name: compiled.plan.numerics() for name, compiled in self.compiled.items()}
        first, *others = (one.facts() for one in self.networks)
        means = {"others": others, "mirror": self.mirror, "probabilities": True}
        return {**first, "numerics": plans, **({} if self.means is None else means)}

    def _read(self, name: str, region: Region, out: Array) -> Array:
        """Read a weight of a network."""
        number = 0
        if len(self.networks) > 1:
            number, name = network_of(name)
        return self.networks[number].trained.store.read(name, region, out)

    def spill(self) -> Path:
        """Return the folder of the spill: a run that cannot be written is read all the same."""
        inside = self.trained.path / "spill"
        if os.access(existing(inside), os.W_OK) and not inside.is_symlink():
            return self.settings.spill_folder(inside)
        other = Path(tempfile.gettempdir()) / f"oocdl-spill-{os.geteuid()}"
        folder = self.settings.spill_folder(other)
        if folder == other:
            make_private(other)
            text = f"the run in {self.trained.path} cannot be written; spilling to {other}"
            warnings.warn(text, stacklevel=5)
        return folder

    def run(self, deliver: Any = None, made: Predictions | None = None) -> list[Measured]:
        """Run all batches in dataset order; returns the losses of each, and the sums of its metrics.

        Batches whose samples are all in ``made`` are left out.
        """
        passes = () if deliver is None else self.compiled.values()
        watched = frozenset(c.plan.factored.stored(name) for c in passes for name in c.outputs.values())
        gathered, results = Gathered(self.compiled), list[Measured]()
        watched |= gathered.watched
        done = set() if made is None else made.done
        signals, spill = Signals(), self.spill()

        def take(*piece: Any) -> None:
            gathered.deliver(*piece)
            if deliver is not None:
                deliver(*piece)

        taker, prepared = take if watched else None, measured(self.preparation, self.dataset)
        session = Session(self.compiled, self.dataset, prepared, self.machine, spill, taker, watched)
        with signals, session:
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


def _network(trained: Trained, dataset: Dataset, changes: Mapping[str, Any], with_targets: bool) -> Network:
    """Tie the network of a run to a dataset, with other settings than it was trained with."""
    facts, model = trained.store.meta["identity"], trained.model()
    same_operators(trained.path, facts, digests(model.nodes))
    settings = replace(trained.settings, scale=None, **changes)
    binding = bind(model, dataset, settings, with_targets=with_targets)
    used, whole, alike = (
        dataset.only(binding.used),
        range(binding.samples),
        _outputs_like_inputs(model, facts),
    )
    found = sized(model, used, binding, settings, whole, least=facts.get("multiple", ()), alike=alike)
    heads = {output: facts["dataset"][head["target"]]["shape"] for output, head in facts["loss"].items()}
    return Network(
        trained=trained,
        model=model,
        settings=settings,
        sized=found,
        preparation=_preparation(model, found, settings, trained),
        labels={output: () if output in alike else tuple(shape) for output, shape in heads.items()},
    )


def _preparation(model: OnnxModel, found: Sized, settings: Settings, trained: Trained) -> Preparation:
    """Return what is done to samples of a dataset: what is done to those of each input in training."""
    identity, stored, binding = trained.store.meta["identity"], trained.settings, found.bindings[""]
    arrays = {array: identity["inputs"][name] for name, array in binding.inputs.items()}
    heads = {
        target.array: identity["loss"][target.output]["target"]
        for target in binding.targets
        if target.output in identity["loss"]
    }
    factors, asked = stored.scale or {}, stored.normalize
    pairs = [*arrays.items(), *heads.items()]
    scale = {now: factors[then] for now, then in pairs if then in factors}
    if isinstance(asked, Mapping):
        asked = {now: asked[then] for now, then in arrays.items() if then in asked}
    made = preparation_of(model, found, replace(settings, scale=scale, normalize=asked))
    return with_numbers_of(made, trained.store, arrays)


def _apart(networks: Sequence[Network]) -> Sequence[Network]:
    """Return networks that go together; if they do not all prepare samples alike, each by names of its own.

    Raises InputError, in one line, for runs whose mean is of different things.
    """
    first = networks[0]
    for one in networks[1:]:
        for what, mine, its in (
            ("precision", first.settings.precision, one.settings.precision),
            ("targets", first.targets, one.targets),
            ("samples padded to multiples of", first.sized.multiple, one.sized.multiple),
        ):
            if mine != its:
                raise InputError(
                    f"runs of a mean have one {what}: {first.trained.path} has {mine}, {one.trained.path} "
                    f"{its}; leave it out"
                )
    if all(first.preparation.equals(one.preparation) for one in networks[1:]):
        return networks
    return [one.apart(f"/{number}/") for number, one in enumerate(networks)]


def _spatial_axes(model: OnnxModel) -> int:
    """Return the number of spatial axes of the largest input."""
    return max(max(len(port.dims) for port in model.inputs) - 2, 0)


def _mirrored_axes(asked: bool | Sequence[int], axes: int) -> tuple[int, ...]:
    """Return the spatial axes to mirror along. Raises InputError for others."""
    found = tuple(range(axes)) if asked is True else tuple(asked or ())
    if asked is True and not axes:
        raise InputError(
            "mirror is for samples with spatial axes, and the model has no such input; leave it out"
        )
    if len(set(found)) < len(found) or any(type(one) is not int or not 0 <= one < axes for one in found):
        raise InputError(
            f"mirror takes True or spatial axes, of which there are {axes}, from 0, not {asked!r}"
        )
    return found


def _outputs_like_inputs(model: OnnxModel, identity: Mapping[str, Any]) -> set[str]:
    """Return the outputs that a run has trained on targets with the extents of its inputs.

    Of outputs with one target the first counts: the others may be smaller (``DeepSupervision``).
    """
    arrays, axes = identity["dataset"], _spatial_axes(model)
    shapes = [arrays[name]["shape"] for name in identity["inputs"].values()]
    if axes < 1:
        return set()
    heads = [port.name for port in model.outputs if port.name in identity["loss"]]
    first = {identity["loss"][output]["target"]: output for output in reversed(heads)}
    return {
        output
        for target, output in first.items()
        if any(arrays[target]["shape"][-axes:] == shape[-axes:] for shape in shapes)
    }
