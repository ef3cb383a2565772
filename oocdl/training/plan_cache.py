"""Plans that were found before: in the user's cache, so that the search for cuts is made once.

An entry holds what ``plan.json`` of a run holds: the cuts of each kind of pass, and the digest of the
numerics that they gave. Its name is a digest of all that the search depends on, oocdl's own code among it. It
names a second file, which holds the passes as they were compiled (``stored_passes``); where that is gone, or
of another version of Python, they are made again from the cuts. Either counts only if all of it fits this
machine and has these numerics. A file that is damaged, or that another user may have written, does not
count: the plan is searched for anew. Files are replaced whole, and passes are named by their digest, so any
number of processes may write.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from oocdl.config import Settings, plain
from oocdl.errors import OocdlError
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.code import code_digest
from oocdl.host.paths import cache_folder
from oocdl.planning.binding import Binding
from oocdl.planning.calibrate import known_rates
from oocdl.planning.machine import Machine
from oocdl.planning.machine_facts import machine_facts
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.dataset.dataset import DataArray
from oocdl.storage.files import write_bytes
from oocdl.training.stored_passes import versions

COUNTS = ("slots", "workers", "hosts")
"""What cuts may have beside: see ``pass_plan.frozen_cuts``."""
VARIABLE = "OOCDL_PLAN_CACHE"
"""Environment variable: ``off`` keeps plans from being stored, and from being taken from the cache."""
MOST_ENTRIES = 50
"""With more entries, those that were used longest ago are removed."""
MOST_ENTRY_BYTES = 8 << 20
"""An entry that is larger is damaged."""
MOST_PASSES_BYTES = 64 << 20
"""Passes that take more are not kept; their cuts are."""
MOST_FOLDER_BYTES = 512 << 20
"""With more bytes of passes, those that were used longest ago are removed."""
LEAST_CAPACITY_SHARE, MOST_CAPACITY_SHARE = 1 - 1 / 64, 1 + 1 / 16
"""A process is not equally large each time. A plan counts where the capacity is from this to that share of
the one that it was found for."""
OF_THE_RUN = (
    "epochs", "steps", "seed", "shuffle", "commit_seconds", "spill", "disk_bytes", "strict",
    "allow_missing_chunks",
)  # fmt: skip
"""Settings that no plan depends on."""


def plan_key(model: OnnxModel, binding: Binding, settings: Settings, machine: Machine) -> str:
    """Return a digest, in hexadecimal, of all that a plan depends on but the machine's exact capacity."""
    names = [field.name for field in fields(Settings) if field.name not in OF_THE_RUN]
    facts = {
        "code": code_digest(),
        "model": model.fingerprint(),
        "operators": digests(model.nodes),
        "inputs": plain(binding.inputs),
        "targets": [[t.output, t.read, t.weight, plain(t.spec)] for t in binding.targets],
        "arrays": {name: _array_facts(binding.arrays[name]) for name in sorted(binding.used)},
        "settings": {name: plain(getattr(settings, name)) for name in names},
        "machine": [machine.threads, machine.workers, machine.shares, machine.device_unit_bytes],
        "host": machine_facts(machine.engine),
        "engine": machine.engine,
        "rates": known_rates(machine.engine).to_json(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A plan that was found before."""

    frozen: Mapping[str, Any]
    """Its cuts, and the digests of its numerics."""
    passes: Path | None
    """The file of its compiled passes; None: they cannot be kept."""
    versions: str
    """Those that it was written by."""

    def read_passes(self) -> bytes | None:
        """What ``stored_passes.to_bytes`` gave; None if it is not there, or not for these versions.

        Warns in one line if the file is there and cannot be used.
        """
        if self.passes is None or self.versions != versions():
            return None
        try:
            data = _trusted(self.passes, MOST_PASSES_BYTES)
            if data is not None and hashlib.sha256(data).hexdigest() != self.passes.stem:
                raise ValueError("its digest does not match")
        except (OSError, ValueError) as error:
            warn_of(self.passes, error)
            return None
        return data


def load(key: str, machine: Machine) -> Entry | None:
    """Return a plan that was found before for about this capacity; None if there is none.

    Warns in one line if there is an entry that cannot be used.
    """
    path = _path_of(key)
    try:
        data = _trusted(path, MOST_ENTRY_BYTES)
        if data is None:
            return None
        body = unsealed("plans", data.decode())
        _check(body)
    except (OSError, ValueError, RecursionError) as error:
        warn_of(path, error)
        return None
    share = machine.capacity_bytes / body["capacity_bytes"]
    if body["key"] != key or not LEAST_CAPACITY_SHARE <= share <= MOST_CAPACITY_SHARE:
        return None
    digest = body["passes"]
    return Entry(
        body["frozen"], None if digest is None else _passes_of(path.parent, digest), body["versions"]
    )


def store(key: str, machine: Machine, frozen: Mapping[str, Any], passes: bytes | None) -> None:
    """Keep what ``frozen`` says of the cuts of a plan, and its ``passes`` if they are not too large.

    Warns in one line if that cannot be written.
    """
    path = _path_of(key)
    if passes is not None and len(passes) > MOST_PASSES_BYTES:
        passes = None
    digest = None if passes is None else hashlib.sha256(passes).hexdigest()
    body = {"key": key, "capacity_bytes": machine.capacity_bytes, "frozen": frozen}
    body |= {"passes": digest, "versions": versions()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if passes is not None and digest is not None:
            _write(_passes_of(path.parent, digest), passes)
        _write(path, sealed("plans", body).encode())
        _remove_oldest(path.parent)
    except (OSError, OocdlError) as error:
        warnings.warn(f"plans cannot be kept in {path.parent}: {error}", stacklevel=2)


def warn_of(path: Path, error: Exception) -> None:
    """Say in one line that a file does not count."""
    reason = " ".join(str(error).split()) or type(error).__name__
    warnings.warn(f"the plan in {path} does not count, and is made anew: {reason}", stacklevel=3)


def is_on() -> bool:
    """Whether plans are kept."""
    return os.environ.get(VARIABLE, "") != "off"


def _path_of(key: str) -> Path:
    return cache_folder() / "plans" / f"{key}.json"


def _passes_of(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.passes"


def _trusted(path: Path, most_bytes: int) -> bytes | None:
    """Read a file that only this user can have written, and mark it as used; None if there is none."""
    if not path.is_file():
        return None
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ValueError("another user may have written it")
    if status.st_size > most_bytes:
        raise ValueError("it is too large")
    data = path.read_bytes()
    os.utime(path)
    return data


def _write(path: Path, data: bytes) -> None:
    write_bytes(path, data)
    path.chmod(0o600)


def _remove_oldest(folder: Path) -> None:
    """Remove those entries, and those passes, that were used longest ago, where there are too many."""
    ages: dict[bool, list[tuple[float, int, Path]]] = {True: [], False: []}
    for path in folder.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # another process has removed it
        ages[path.suffix == ".passes"].append((status.st_mtime, status.st_size, path))
    for _, _, path in sorted(ages[False])[:-MOST_ENTRIES]:
        path.unlink(missing_ok=True)
    total = 0
    for number, (_, nbytes, path) in enumerate(sorted(ages[True], reverse=True)):
        total += nbytes
        if number >= MOST_ENTRIES or total > MOST_FOLDER_BYTES:
            path.unlink(missing_ok=True)


def _array_facts(array: DataArray) -> list[Any]:
    return [str(array.dtype), *map(int, array.shape)]


def _check(body: Any) -> None:
    """Raise ValueError for what ``store`` does not write."""

    def need(holds: bool) -> None:
        if not holds:
            raise ValueError("it is not in the form in which this version of oocdl writes it")

    def is_count(value: Any, least: int) -> bool:
        return type(value) is int and least <= value < 1 << 63

    need(isinstance(body, dict))
    need(set(body) == {"key", "capacity_bytes", "frozen", "passes", "versions"})
    need(isinstance(body["versions"], str))
    need(body["passes"] is None or re.fullmatch("[0-9a-f]{64}", str(body["passes"])) is not None)
    need(is_count(body["capacity_bytes"], 1) and isinstance(body["frozen"], dict))
    plans = dict(body["frozen"])
    numerics = plans.pop("numerics", None)
    need(isinstance(numerics, dict) and set(numerics) == set(plans))
    for plan in plans.values():
        need(isinstance(plan, dict) and set(plan) - set(COUNTS) == {"cuts", "grids", "rounded"})
        need(all(is_count(plan.get(many, 1), 1) for many in COUNTS))
        need(all(isinstance(plan[part], list) for part in ("cuts", "grids", "rounded")))
        need(
            all(is_count(cut, 0) for cut in plan["cuts"]) and all(isinstance(n, str) for n in plan["rounded"])
        )
        for grid in plan["grids"]:
            need(isinstance(grid, dict))
            need(all(cut.isdecimal() and is_count(count, 1) for cut, count in grid.items()))
