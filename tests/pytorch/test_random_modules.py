"""Random modules: three steps, state, predictions at two sizes and the reloaded module are PyTorch's.

``OOCDL_MODULES=1000:2000`` tries those seeds, each of them a module, instead of a few. What fails is shrunk,
and told as a ``Spec``. Each three hundredth goes through dynamo, which takes twenty seconds, the others
through TorchScript.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from oocdl.pytorch import export as exporting
from oocdl.pytorch.exporters import EXPORTERS
from tests.kit import beside, random_modules
from tests.kit.beside import Verdict
from tests.kit.random_modules import Spec, shrunk, spec_of

FEW = (2, 4, 6, 7, 10, 12, 13, 21, 23, 28, 29, 30, 37, 39, 40, 41, 52, 66, 74, 76, 78, 79)
"""Of the first 80 seeds: every step, layer and course among them, and all options of layers but five."""
SEEDS = range(*map(int, os.environ["OOCDL_MODULES"].split(":"))) if "OOCDL_MODULES" in os.environ else FEW
TOGETHER = 11
"""Modules a test."""
IDLE_AT_MOST = 0.3
"""Of all modules: a search that is refused, or of which rounding decides, finds nothing."""
IN_FLOAT32 = (0, 4, 12, 43, 70)
"""Seeds of modules with many channels, whose volumes lie with these last in memory, as none in float64 do."""
BY_DYNAMO = 300
COURTESY_SECONDS = 10
"""Of a processor, for a file of any size; with more, dynamo has tens of seconds for some modules."""


def verdict_of(spec: Spec, folder: Path) -> Verdict:
    """Train a module in both ways; what PyTorch cannot call is no case.

    ``folder``: where its files stay. A file system that has just deleted hundreds makes new ones slowly.
    """
    x, other = spec.arrays()
    name = "TorchScript" if spec.seed % BY_DYNAMO else "dynamo"
    try:
        spec.module().double()(torch.as_tensor(x[: spec.batch]))
    except Exception as error:
        return Verdict("none", str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "EXPORTERS", {name: EXPORTERS[name]})
        patch.setattr(exporting, "COURTESY_SECONDS", COURTESY_SECONDS)
        try:
            return beside.beside(spec.module(), x, Path(tempfile.mkdtemp(dir=folder)), spec.course(), [other])
        except Exception as error:
            return Verdict("different", f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("first", range(0, len(SEEDS), TOGETHER))
def test_modules_train_as_in_pytorch(first: int, tmp_path: Path) -> None:
    found = {seed: verdict_of(spec_of(seed), tmp_path) for seed in SEEDS[first : first + TOGETHER]}
    wrong = {seed: one for seed, one in found.items() if one.word == "different"}
    if wrong:
        seed, verdict = next(iter(wrong.items()))
        least = shrunk(spec_of(seed), lambda spec: verdict_of(spec, tmp_path).word == "different")
        raise AssertionError(
            f"{len(wrong)} differ; {seed} ({verdict.why}) is {least}: {verdict_of(least, tmp_path).why}"
        )
    idle = [one for one in found.values() if one.word in ("refused", "none")]
    assert len(idle) <= max(1, IDLE_AT_MOST * len(found)), idle


@pytest.mark.parametrize("seed", IN_FLOAT32)
def test_modules_of_many_channels_train_in_float32(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays are large enough for loops."""
    monkeypatch.setattr(random_modules, "CHANNELS", 8)
    monkeypatch.setattr(random_modules, "SIZES", {0: (), 1: (300,), 2: (16, 18), 3: (6, 7, 9)})
    monkeypatch.setattr(random_modules, "ELSEWHERE", {0: (), 1: (46,), 2: (16, 13), 3: (8, 7, 10)})
    monkeypatch.setattr(beside, "EXACT", {**beside.EXACT, "precision": "float32"})
    monkeypatch.setattr(beside, "TOLERANCE", 2e-5)
    monkeypatch.setattr(beside, "NOISE", 3e8)  # roundings of float32 among those of float64
    assert verdict_of(spec_of(seed), tmp_path) == Verdict("equal")
