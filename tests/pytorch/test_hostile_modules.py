"""Modules that a file may not hold: trained as PyTorch does, or refused by name; nothing in between."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from oocdl.pytorch import export as exporting
from oocdl.pytorch.exporters import EXPORTERS
from tests.kit.beside import Course, beside
from tests.kit.hostile_modules import CASES
from tests.kit.turns import some_of


@pytest.mark.parametrize(("name", "exporter"), some_of(CASES, EXPORTERS))
def test_equal_or_refused(name: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    case = CASES[name]
    torch.manual_seed(1)
    x = np.random.default_rng(3).standard_normal((4, *case.shape))
    verdict = beside(case.make().train(), x, tmp_path, Course(batch=case.batch))
    if case.refused:
        assert verdict.word == "refused", verdict
        assert re.search(case.refused, verdict.why), verdict.why
        assert "\n" not in verdict.why
    else:
        assert verdict.word == "equal" or f"{exporter}: " in verdict.why, verdict
