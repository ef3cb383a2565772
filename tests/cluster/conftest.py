"""A real Slurm and a real Grid Engine, for tests that ask; skipped with a reason where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.kit import sge as real_sge
from tests.kit import slurm as real_slurm
from tests.kit.daemons import alone


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """Three idle nodes, and the variables by which commands of this process find them."""
    yield from running(real_slurm)


@pytest.fixture(scope="session")
def sge() -> Iterator[None]:
    """A host with slots, and the variables by which commands of this process find its Grid Engine."""
    yield from running(real_sge)


def running(system: ModuleType) -> Iterator[None]:
    """A batch system, if this machine can have it."""
    reason = system.missing()
    if reason is not None:
        pytest.skip(reason)
    with alone(system.ROOT, system.start, system.stop), pytest.MonkeyPatch.context() as patch:
        for name, value in system.environment().items():
            patch.setenv(name, value)
        yield
