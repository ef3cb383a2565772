"""The threads that run compiled loops together: those of PyTorch's kernels, so that no others are started."""

from __future__ import annotations

from pathlib import Path

import torch

from oocdl.fusion.team import Team, openmp


def team_of(threads: int) -> Team:
    """Return the team of so many threads; it has no OpenMP where PyTorch brings none of its own."""
    return Team(threads, openmp(Path(torch.__file__).parent / "lib") if threads > 1 else None)
