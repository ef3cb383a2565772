"""Plans that were found before: in the user's cache, so that the search for cuts is made once.

An entry holds what ``plan.json`` of a run holds: the cuts of each kind of pass, and the digest of the
numerics that they gave. Its name is a digest of all that the search depends on, oocdl's own code among it. A
plan is made again from the cuts, and counts only if all of it fits this machine and has these numerics; an
entry that is damaged, or that another user may have written, does not count: the plan is searched for anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from oocdl.config import Settings, plain
from oocdl.errors import OocdlError
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.paths import cache_folder
from oocdl.planning.binding import Binding
from oocdl.planning.calibrate import known_rates
from oocdl.planning.machine import Machine
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.dataset.dataset import DataArray
from oocdl.storage.files import write_text
from oocdl.training.resume import machine_facts

VARIABLE = "OOCDL_PLAN_CACHE"
"""Environment variable: ``off`` keeps plans from being stored, and from being taken from the cache."""
MOST_ENTRIES = 50
"""With more entries, those that were used longest ago are removed."""
MOST_ENTRY_BYTES = 8 << 20
"""An entry that is larger is damaged."""
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
        "code": _code_digest(),
        "model": model.fingerprint(),
        "operators": digests(model.nodes),
        "inputs": plain(binding.inputs),
        "targets": [[t.output, t.read, t.weight, plain(t.spec)] for t in binding.targets],
        "arrays": {name: _array_facts(binding.arrays[name]) for name in sorted(binding.used)},
        "settings": {name: plain(getattr(settings, name)) for name in names},
        "machine": [machine.threads, machine.workers, machine.device_unit_bytes],
        "host": machine_facts(machine.engine),
        "engine": machine.engine,
        "rates": known_rates(machine.engine).to_json(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load(key: str, machine: Machine) -> Mapping[str, Any] | None:
    """Return the cuts of a plan that was found before for about this capacity; None if there is none.

    Warns in one line if there is an entry that cannot be used.
    """
    path = _path_of(key)
    try:
        if not path.is_file():
            return None
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ValueError("another user may have written it")
        if status.st_size > MOST_ENTRY_BYTES:
            raise ValueError("it is too large")
        body = unsealed("plans", path.read_text())
        _check(body)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"the plan in {path} does not count, and is made anew: {reason}", stacklevel=2)
        return None
    share = machine.capacity_bytes / body["capacity_bytes"]
    if body["key"] != key or not LEAST_CAPACITY_SHARE <= share <= MOST_CAPACITY_SHARE:
        return None
    os.utime(path)
    found: Mapping[str, Any] = body["frozen"]
    return found


def store(key: str, machine: Machine, frozen: Mapping[str, Any]) -> None:
    """Keep what ``frozen`` says of the cuts of a plan; warns in one line if it cannot be written."""
    path = _path_of(key)
    body = {"key": key, "capacity_bytes": machine.capacity_bytes, "frozen": frozen}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, sealed("plans", body))
        path.chmod(0o600)
        _remove_oldest(path.parent)
    except (OSError, OocdlError) as error:
        warnings.warn(f"plans cannot be kept in {path.parent}: {error}", stacklevel=2)


def is_on() -> bool:
    """Whether plans are kept."""
    return os.environ.get(VARIABLE, "") != "off"


def _path_of(key: str) -> Path:
    return cache_folder() / "plans" / f"{key}.json"


def _remove_oldest(folder: Path) -> None:
    ages = []
    for path in folder.iterdir():
        try:
            ages.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            ages.append((time.time(), path))  # another process has removed it
    for _, path in sorted(ages)[:-MOST_ENTRIES]:
        path.unlink(missing_ok=True)


def _array_facts(array: DataArray) -> list[Any]:
    return [str(array.dtype), *map(int, array.shape)]


@cache
def _code_digest() -> str:
    """A digest of the code of oocdl: plans of another version are searched for anew."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _check(body: Any) -> None:
    """Raise ValueError for what ``store`` does not write."""

    def need(holds: bool) -> None:
        if not holds:
            raise ValueError("it is not in the form in which this version of oocdl writes it")

    def is_count(value: Any, least: int) -> bool:
        return type(value) is int and least <= value < 1 << 63

    need(isinstance(body, dict) and set(body) == {"key", "capacity_bytes", "frozen"})
    need(is_count(body["capacity_bytes"], 1) and isinstance(body["frozen"], dict))
    plans = dict(body["frozen"])
    numerics = plans.pop("numerics", None)
    need(isinstance(numerics, dict) and set(numerics) == set(plans))
    for plan in plans.values():
        need(isinstance(plan, dict) and set(plan) == {"cuts", "grids", "rounded"})
        need(all(isinstance(part, list) for part in plan.values()))
        need(
            all(is_count(cut, 0) for cut in plan["cuts"]) and all(isinstance(n, str) for n in plan["rounded"])
        )
        for grid in plan["grids"]:
            need(isinstance(grid, dict))
            need(all(cut.isdecimal() and is_count(count, 1) for cut, count in grid.items()))
