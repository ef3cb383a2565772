"""Lists the facts of a run that all members of a crew are told, before the first pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.augmentation.preparation import Preparation
from oocdl.config import Settings
from oocdl.graph.ir.index import Region
from oocdl.graph.transforms.factorize import Factored
from oocdl.ops.gather import Rows
from oocdl.ops.loss_functions import Labels
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.exchange import Exchange
from oocdl.planning.task_key import TaskKey
from oocdl.runtime.session import scalar_keys
from oocdl.storage.dataset.dataset import DatasetSpec


@dataclass(frozen=True, eq=False, kw_only=True)
class PassSetup:
    """The facts of one kind of pass that all members need."""

    factored: Factored
    """The graph that the pass runs."""
    peak_unit_bytes: int
    versioned_bytes: int
    """Bytes of weights and state; both numbers are as in ``PassPlan``."""
    crossing_bytes: int
    """Bytes of the largest bundle."""
    homes: Mapping[TaskKey, int]
    renewed: Mapping[TaskKey, TaskKey]
    """Stored piece -> the chunk that replaces it; both mappings are as in ``Exchange``."""
    feeds: Mapping[str, str]
    labels: Mapping[str, Labels | Rows]
    pieces: Mapping[str, tuple[Region, ...]]
    scalars: Mapping[str, TaskKey]
    """Keys of the outputs of shape (), by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Setup:
    """The facts of a run that all workers need. Each also gets its ``Share`` of each kind of pass."""

    run_id: str
    owner: str
    """Name of the session: what it has left on a worker makes room for its next crew."""
    addresses: tuple[str, ...]
    """Address of each member, by number."""
    passes: Mapping[str, PassSetup]
    dataset: DatasetSpec
    identities: Mapping[str, Mapping[str, Any]]
    """Identity of each array of the dataset, as the driver has found it."""
    settings: Settings
    preparation: Preparation
    watched: Mapping[str, frozenset[TaskKey]]
    """Plan id -> keys of the results that the driver wants."""
    run: Path
    """The run directory, where the driver sees it."""
    mark: str
    """A digest of its ``run.json``: another folder of that name is another run."""
    threads: int
    """Number of programs that a member runs at once."""


def pass_setup(compiled: CompiledPass, going: Exchange) -> PassSetup:
    """Return the facts of a kind of pass that all members are told."""
    return PassSetup(
        factored=compiled.plan.factored,
        peak_unit_bytes=compiled.plan.peak_unit_bytes,
        versioned_bytes=compiled.plan.versioned_bytes,
        crossing_bytes=going.crossing_bytes,
        homes=going.homes,
        renewed=going.graph.replaced,
        feeds=dict(compiled.feeds),
        labels=dict(compiled.labels),
        pieces=compiled.pieces,
        scalars=scalar_keys(compiled),
    )
