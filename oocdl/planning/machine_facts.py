"""What bits depend on beyond a plan: the kind of machine that computes, and the version of its engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from oocdl.engines.engine import model_of, runtime_of
from oocdl.host.limits import installed_version, processor


def machine_facts(engine: str) -> dict[str, str]:
    """Return what results depend on here: the processor, the engine's version, its device if it has one."""
    model = model_of(engine)
    version = installed_version(runtime_of(engine))
    return {"processor": processor(), engine: version, **({"device": model} if model else {})}


def values_of(machines: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return each value that a fact has on one of these machines, in order, by the fact's name.

    >>> values_of([{"processor": "B", "torch": "2.13"}, {"processor": "A", "torch": "2.13"}])
    {'processor': ['A', 'B'], 'torch': ['2.13']}
    """
    found: dict[str, set[str]] = {}
    for facts in machines:
        for name, value in facts.items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def as_one(machines: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the facts of machines that compute together, in words."""
    return {name: " or ".join(values) for name, values in values_of(machines).items()}
