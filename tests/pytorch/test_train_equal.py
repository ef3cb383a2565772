"""Modules trained by ``fit(module)`` are what PyTorch makes of them: losses, state_dict, predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.torch_modules import CASES, check

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.parametrize("name", CASES)
def test_trains_as_pytorch_does(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)
