"""Which cases are tried in which of several slow ways: all of them with ``--slow``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def some_of(names: Iterable[str], ways: Iterable[str]) -> list[Any]:
    """Return (name, way) of all, for ``parametrize``.

    Quick is each name by TorchScript, which is fast, and every eighth in each of the other ways.
    """
    names = list(names)
    fast, *others = sorted(ways, key=lambda way: way.lower() != "torchscript")
    turns = itertools.cycle((*others, *[fast] * (8 - len(others))))
    quick = {(name, fast) for name in names} | set(zip(names, turns, strict=False))
    pairs = itertools.product(names, (fast, *others))
    return [pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]
