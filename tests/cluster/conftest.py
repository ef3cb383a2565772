"""A real Slurm, for tests that ask for it; skipped with a reason where it cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import slurm as real


@pytest.fixture(scope="session")
def slurm() -> Iterator[None]:
    """Three idle nodes, and the variables by which commands of this process find them."""
    reason = real.missing()
    if reason is not None:
        pytest.skip(reason)
    with real.running(), pytest.MonkeyPatch.context() as patch:
        for name, value in real.environment().items():
            patch.setenv(name, value)
        yield
