"""``run_graph`` runs any graph on arrays through the whole machine, for tests.

It cuts, plans and executes a graph exactly as training does, and joins the pieces of its outputs. It is
public so that whoever adds an operator can check it with one call, as the tests of oocdl do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.graph import Array, Graph, Role
from oocdl.graph.ir.index import Region, as_slices, region_shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.transforms import channels_last as layout
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.factorize import Factored, factorize
from oocdl.graph.transforms.verify import verify, verify_factored
from oocdl.host.heap import Heap, MemoryGuard
from oocdl.planning.pass_plan import PassPlan, plan_pass
from oocdl.planning.passes import PassInfo
from oocdl.planning.task_graph import expand_pass, versioned_pieces
from oocdl.planning.task_key import TaskKey, stored_key
from oocdl.planning.tile_search import Layering, Limits
from oocdl.runtime import execute
from oocdl.runtime.dask_private import DataNode
from oocdl.runtime.inputs import Feed, Sources, own_regions
from oocdl.runtime.scheduler import get
from oocdl.storage.cache.chunk import Chunk
from oocdl.storage.cache.memory_tier import Tier
from oocdl.storage.cache.spill_store import SpillStore
from oocdl.storage.dataset.data_array import DataArray
from oocdl.storage.dataset.dataset import open_given


def array_reader(name: str, data: Array) -> DataArray:
    """Read a NumPy array as an array of a dataset."""
    ((array,), _) = open_given({name: data}, [name])
    return array


def whole_array(factored: Factored, name: str, made: Sequence[tuple[Region, Array]]) -> Array:
    """Join the pieces of a value to one array of its own shape; NaN where no piece is."""
    value = factored.graph.values[name]
    out = np.full(value.shape, np.nan if value.dtype.startswith("float") else 0, value.dtype)
    for region, array in made:
        for box, place in own_regions(factored.factors[name], region):
            out[as_slices(box)] = array[place].reshape(region_shape(box))
    return out


@dataclass(frozen=True, eq=False)
class Ran:
    """Results of ``run_graph``: arrays by name, the plan, bytes moved by units, the tier's peak in bytes."""

    outputs: Mapping[str, Array]
    plan: PassPlan
    read_bytes: int
    made_bytes: int
    peak_bytes: int


def _adopted(
    tier: Tier, factored: Factored, pieces: Mapping[str, Sequence[Region]], arrays: Mapping[str, Array]
) -> Iterator[tuple[TaskKey, Chunk]]:
    """Put the pieces of weights and state into the tier, one at a time."""
    for name, regions in pieces.items():
        stored = arrays[name].reshape(factored.shapes[name])
        for number, region in enumerate(regions):
            piece = np.array(stored[as_slices(region)], order="C")
            yield stored_key(name, number), tier.adopt(piece, region, ())


def run_graph(
    graph: Graph,
    rules: Rules,
    arrays: Mapping[str, Array],
    *,
    engine: str = "torch",
    parallel: Mapping[str, Any] | None = None,
    cuts: Mapping[int, int] | None = None,
    unit_bytes: int = 1 << 40,
    capacity_bytes: int = 1 << 33,
    threads: int = 1,
    workers: int = 2,
    seed: int = 0,
    step: int = 0,
    scalars: Mapping[str, float] | None = None,
    scheduler: Any = None,
    channels_last: bool = False,
) -> Ran:
    """Plan and run one pass of ``graph``; returns its outputs and updated values, whole, by name.

    ``arrays`` holds the values of roles INPUT, TARGET, WEIGHT and STATE by name. ``cuts`` asks for pieces
    by number of cut class, ``parallel`` by name. ``unit_bytes`` limits one unit, ``capacity_bytes`` the RAM
    tier. The pass is planned for ``threads``, and ``workers`` programs may run at once.
    ``channels_last`` stores values around convolutions channels last.
    """
    small = canonicalize(graph, rules)
    verify(small, rules, "canonicalize")
    factored = factorize(small, rules)
    if channels_last:
        factored = layout.channels_last(factored, rules)
    verify_factored(factored, "channels last" if channels_last else "factorize")
    limits = Limits(unit_bytes, threads, parallel, cuts)
    loaded = get_engine(engine)
    plan = plan_pass(Layering(factored, rules, partial(loaded.scratch_of, rules=rules)), limits)
    pieces = versioned_pieces(plan)
    task_graph = expand_pass(plan, pieces)
    batch = next((v.shape[0] for v in small.of_role(Role.INPUT, Role.TARGET) if v.shape), 1)
    read = [value.name for value in small.of_role(Role.INPUT, Role.TARGET)]
    feeds = {name: Feed(array_reader(name, arrays[name])) for name in read}
    info = PassInfo(step, seed, tuple(range(batch)), scalars or {})
    with TemporaryDirectory() as folder, Tier(capacity_bytes, SpillStore(Path(folder) / "spill")) as tier:
        context = execute.Context(
            {"main": task_graph},
            {"main": Sources(factored, feeds)},
            loaded,
            tier,
            Heap(workers, 1 << 40, lambda: tier, MemoryGuard(1 << 40)),
        )
        execute.register("test", context)
        adopted = _adopted(tier, factored, pieces, arrays)
        inputs: dict[Any, Any] = {key: DataNode(key, chunk) for key, chunk in adopted}
        dsk = inputs | execute.pass_tasks(task_graph, "test", "main", info)
        chunks = (scheduler or get)(dsk, list(task_graph.outputs))
        by_key: dict[Any, Chunk] = dict(zip(task_graph.outputs, chunks, strict=True))
        outputs = {}
        for name in (*small.outputs, *small.updates.values()):
            held = [(region, by_key[key].copy()) for region, key in task_graph.pieces[factored.stored(name)]]
            outputs[name] = whole_array(factored, name, held)
        peak = tier.stats.peak_bytes
        del by_key, chunks, inputs, dsk
        execute.forget("test")
    return Ran(outputs, plan, context.measured.read_bytes, context.measured.made_bytes, peak)
