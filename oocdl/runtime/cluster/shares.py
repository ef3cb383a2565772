"""Moves weights and state between the run and the members of a crew, each of which holds a share.

Members that see the run directory read and write there, all at once. The driver does it for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from oocdl.graph.ir.index import region_shape
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.task_key import TaskKey, stored_key
from oocdl.runtime import weight_io
from oocdl.runtime.cluster import worker_tasks
from oocdl.runtime.cluster.watch import Watch
from oocdl.storage.run.commit import Commit
from oocdl.storage.run.manifest import TensorSpec
from oocdl.storage.run.run_store import RunStore


@dataclass(frozen=True, eq=False, kw_only=True)
class Shares:
    """The members of a crew, and the stored pieces that each of them holds."""

    watch: Watch
    run_id: str
    addresses: tuple[str, ...]
    """Address of each member, by number."""
    apart: tuple[str, ...]
    """Addresses of members that do not see the run directory."""
    homes: Mapping[TaskKey, int]
    """Stored piece -> the member that holds it."""

    @property
    def seeing(self) -> list[str]:
        """Addresses of the members that see the run directory."""
        return [address for address in self.addresses if address not in self.apart]

    def ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Call a function on members, with the id of the run first: see ``Watch.ask``."""
        return self.watch.ask(function, self.run_id, *arguments, **options)

    def load(self, compiled: CompiledPass, plan_id: str, read: weight_io.Read) -> None:
        """Have members load their shares, by ``read`` where they do not see the run. Raises WorkersLost."""
        if self.seeing:
            self.ask(worker_tasks.load, plan_id, only=self.seeing)
        for address in self.apart:
            number = self.addresses.index(address)
            mine = [key for key, home in self.homes.items() if home == number]
            self.ask(worker_tasks.hold, {}, False, only=[address])
            for key in mine:  # one at a time: all of them may be more than this process has room for
                piece = weight_io.read_piece(compiled.pieces, compiled.plan.factored, read, key)
                if piece is not None:
                    self.ask(worker_tasks.hold, {key: piece}, True, only=[address], nbytes=piece.nbytes)

    def commit(
        self, compiled: CompiledPass, plan_id: str, store: RunStore, meta: Mapping[str, object]
    ) -> None:
        """Write all weights and state as a new version of the run. Raises WorkersLost."""
        tensors = weight_io.specs(compiled)
        with weight_io.new_version(store, compiled, meta) as writing:
            by_piece = [one for one in tensors if weight_io.by_piece(one, compiled.pieces[one.name])]
            names = [one.name for one in by_piece]
            if self.seeing:
                written = self.ask(worker_tasks.write, plan_id, writing.writer(), names, only=self.seeing)
                for found in written.values():
                    for name, records in found.items():
                        writing.record(name, records)
            for name in names if self.apart else ():
                self._write_pieces(writing, compiled, name)
            for spec in tensors:
                if spec not in by_piece:
                    self._write_whole(writing, compiled, spec)

    def _write_pieces(self, writing: Commit, compiled: CompiledPass, name: str) -> None:
        """Write here the pieces of an array that are with members which do not see the run."""
        factored = compiled.plan.factored
        for number, region in enumerate(compiled.pieces[name]):
            key = stored_key(name, number)
            address = self.addresses[self.homes[key]]
            if address not in self.apart:
                continue
            nbytes = prod(region_shape(region)) * np.dtype(factored.graph.values[name].dtype).itemsize
            found = self.ask(worker_tasks.held, [key], only=[address], nbytes=nbytes)
            writing.write(name, *weight_io.box_of(factored, name, region, found[address][key].copy()))

    def _write_whole(self, writing: Commit, compiled: CompiledPass, spec: TensorSpec) -> None:
        """Put an array together here, and write it, as its pieces are no whole chunks."""
        regions, factored = compiled.pieces[spec.name], compiled.plan.factored
        keys = [stored_key(spec.name, number) for number in range(len(regions))]
        full = np.empty(spec.shape, spec.dtype)
        found = self.ask(worker_tasks.held, keys, nbytes=full.nbytes).values()
        chunks = {key: chunk for one in found for key, chunk in one.items()}
        pieces = ((region, chunks[key].copy()) for region, key in zip(regions, keys, strict=True))
        weight_io.write_whole(writing, factored, spec, pieces, full)
