"""The threads of PyTorch's kernels: how many a program uses, and the team that loops share with them."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from oocdl.fusion.team import Team, openmp

_told = threading.local()


def use_threads(count: int) -> None:
    """Let kernels called from this thread use so many: programs run beside each other, or on all of them."""
    if getattr(_told, "threads", 0) != count:
        torch.set_num_threads(count)
        _told.threads = count


def team_of(threads: int) -> Team:
    """Return the team of so many threads that PyTorch's own kernels have, so that no others are started."""
    return Team(threads, openmp(Path(torch.__file__).parent / "lib") if threads > 1 else None)
