"""Which cases are tried in which of several slow ways: all of them where there is time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable


def some_of(names: Iterable[str], ways: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, way): each name by TorchScript, which is fast, and every fourth in each of the others.

    OOCDL_LONG=1 takes them all.
    """
    names = list(names)
    fast, *others = sorted(ways, key=lambda way: way.lower() != "torchscript")
    if os.environ.get("OOCDL_LONG"):
        return list(itertools.product(names, (fast, *others)))
    turns = itertools.cycle((*others, *[fast] * (4 - len(others))))
    pairs = [pair for name, turn in zip(names, turns, strict=False) for pair in ((name, fast), (name, turn))]
    return list(dict.fromkeys(pairs))
