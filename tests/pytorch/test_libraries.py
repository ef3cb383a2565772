"""Networks of torchvision and MONAI, trained as PyTorch trains them; skipped where these are not installed.

pip install --no-deps torchvision monai
python -m pytest -q tests/pytorch/test_libraries.py
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.torch_modules import SAMPLES, Arrays, Case, check

pytestmark = pytest.mark.filterwarnings("ignore")


def of(library: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = importlib.import_module(library)
        found: nn.Module = getattr(module, name)(**options)
        return found

    return make


def pictures(size: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda r: {"x": r.normal(size=(SAMPLES, 3, size, size)), "target": r.integers(0, 5, SAMPLES)}


def boxes(extent: int, space: int = 3) -> Callable[[np.random.Generator], Arrays]:
    def arrays(r: np.random.Generator) -> Arrays:
        x = r.normal(size=(SAMPLES, 1, *(extent,) * space))
        return {"x": x, "target": (x[:, 0] > 0.3).astype("u1")}

    return arrays


def labels(y: Any, data: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(y, data["target"].long())


def case(make: Callable[[], nn.Module], arrays: Callable[[np.random.Generator], Arrays]) -> Case:
    return Case(make, arrays, "cross_entropy", labels)


def vision(name: str, size: int, **options: Any) -> Case:
    return case(of("torchvision.models", name, num_classes=5, **options), pictures(size))


def monai(name: str, extent: int = 16, space: int = 3, **options: Any) -> Case:
    both = {"in_channels": 1, "out_channels": 2, "spatial_dims": space, **options}
    return case(of("monai.networks.nets", name, **both), boxes(extent, space))


LEVELS = {"channels": (4, 8), "strides": (2,), "num_res_units": 1, "act": "relu", "norm": "batch"}
CASES: dict[str, Case] = {
    # Smaller pictures end in norms over three numbers: three steps make rounding a million times larger.
    "torchvision resnet18": vision("resnet18", 64),
    "torchvision vit": case(
        of("torchvision.models", "VisionTransformer", image_size=16, patch_size=8, num_layers=2, num_heads=2,
           hidden_dim=8, mlp_dim=16, num_classes=5), pictures(16)),
    "MONAI UNet": monai("UNet", **LEVELS),
    "MONAI UNet in two dimensions": monai("UNet", 16, 2, **LEVELS),
    "MONAI SegResNet": monai(
        "SegResNet", init_filters=8, blocks_down=(1, 1), blocks_up=(1,), upsample_mode="deconv"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_trains_as_pytorch_does(name: str, tmp_path: Path) -> None:
    library = name.split()[0].lower()
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    check(CASES[name], tmp_path)
