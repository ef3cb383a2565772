"""Plans that were found before: in the user's cache, so that the search for cuts is made once.

An entry holds what ``plan.json`` of a run holds: the cuts of each kind of pass, and the digest of the
numerics that they gave. Its name is a digest of all that the search depends on, oocdl's own code among it.
Passes are compiled again from the cuts, and count only if they fit this machine and have these numerics.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from oocdl.config import Settings, plain
from oocdl.config.settings import setting_names
from oocdl.errors import BudgetError, InputError
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import OnnxModel
from oocdl.host.limits import code_digest
from oocdl.host.user_cache import UserCache
from oocdl.planning.binding import Binding
from oocdl.planning.calibrate import known_rates
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.machine import Machine, machine_facts
from oocdl.planning.passes import Course
from oocdl.training.resume import freeze, numerics_of

VARIABLE = "OOCDL_PLAN_CACHE"
"""Environment variable: ``off`` keeps plans from being stored, and from being taken from the cache."""
KEPT = UserCache("plans", most_entries=50)
LEAST_CAPACITY_SHARE, MOST_CAPACITY_SHARE = 1 - 1 / 64, 1 + 1 / 16
"""Bounds of the capacity, as shares of the one a plan was found for, within which the plan counts: a process
is not equally large each time."""


def plan_key(
    model: OnnxModel,
    binding: Binding,
    settings: Settings,
    machine: Machine,
    course: Course,
    validation: Binding | None,
) -> str:
    """Return a digest, in hexadecimal, of all that a plan depends on but the machine's exact capacity."""
    names = set(setting_names(lambda option: option.changes == "plan")) - {"validation"}
    further = {} if validation is None else {name: validation.arrays[name] for name in validation.used}
    arrays = {name: binding.arrays[name] for name in binding.used} | further
    facts = {
        "code": code_digest(),
        "model": model.fingerprint(),
        "operators": digests(model.nodes),
        "inputs": plain(binding.inputs),
        "targets": [[t.output, t.read, t.weight, plain(t.spec)] for t in binding.targets],
        "arrays": {name: [str(one.dtype), *map(int, one.shape)] for name, one in sorted(arrays.items())},
        "kinds": [[name, kind.batch] for name, kind in {**course.kinds, **course.validation_kinds}.items()],
        "passes": course.passes,
        "settings": {name: plain(getattr(settings, name)) for name in names},
        "machine": [machine.threads, machine.workers, machine.shares, machine.device_unit_bytes],
        "host": machine_facts(machine.engine),
        "engine": machine.engine,
        "rates": known_rates(machine.engine).to_json(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def cached_passes(
    key: str, machine: Machine, cut: Callable[[Mapping[str, Any]], dict[str, CompiledPass]]
) -> dict[str, CompiledPass]:
    """Return passes by the cuts in the cache; else those that are searched for, whose cuts are put there.

    ``cut`` compiles passes by cuts, or searches for those that are not given. Warns in one line if an entry
    cannot be used, or written.
    """
    frozen = _read(key, machine)
    if frozen is not None:
        with suppress(BudgetError, InputError):  # they do not fit what this process has left
            passes = cut(frozen)
            machine.room_bytes(one.plan for one in passes.values())
            if numerics_of(passes) == frozen["numerics"]:
                return passes
    passes = cut({})
    body = {"capacity_bytes": machine.capacity_bytes, "frozen": freeze(passes)}
    KEPT.write(key, json.dumps(body).encode())
    return passes


def _read(key: str, machine: Machine) -> Mapping[str, Any] | None:
    """Return cuts that were found before for about this capacity; None if there are none."""
    entry = KEPT.read(key)
    if entry is None:
        return None
    body = json.loads(entry)
    share = machine.capacity_bytes / body["capacity_bytes"]
    frozen: Mapping[str, Any] = body["frozen"]
    return frozen if LEAST_CAPACITY_SHARE <= share <= MOST_CAPACITY_SHARE else None


def is_on() -> bool:
    """Whether plans are kept."""
    return os.environ.get(VARIABLE, "") != "off"
