"""What tests of clusters begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import nets


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Convolutions and three volumes, on disk."""
    folder = tmp_path_factory.mktemp("job")
    return nets.write_conv(folder / "conv.onnx"), nets.write_data(folder / "data.zarr", nets.volumes(3, 8))
