"""Plans that were found before: in the user's cache, so that the search for cuts is made once.

The name of an entry is a digest of all that the search depends on, oocdl's own code among it. Passes are
compiled again from its cuts, and count only if they fit this machine and have the numerics of then.
"""

from __future__ import annotations

import hashlib
import json
import math
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
"""Bounds of the capacity, as shares of that of the plan: a process is not equally large each time."""


def plan_key(
    model: OnnxModel, binding: Binding, settings: Settings, machine: Machine, course: Course,
    validation: Binding | None,
) -> str:  # fmt: skip
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
    """Return what ``cut`` compiles by the cuts in the cache, or else by those that it searches for."""
    entry = KEPT.read(key)
    found: dict[str, Any] = {"capacity_bytes": math.inf} if entry is None else json.loads(entry)
    if LEAST_CAPACITY_SHARE <= machine.capacity_bytes / found["capacity_bytes"] <= MOST_CAPACITY_SHARE:
        with suppress(BudgetError, InputError):  # they do not fit what this process has left
            passes = cut(found["frozen"])
            machine.room_bytes(one.plan for one in passes.values())
            if numerics_of(passes) == found["frozen"]["numerics"]:
                return passes
    passes = cut({})
    body = {"capacity_bytes": machine.capacity_bytes, "frozen": freeze(passes)}
    KEPT.write(key, json.dumps(body).encode())
    return passes
