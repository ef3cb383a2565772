"""Options of ``fit`` in random combinations, beside a loop in PyTorch, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import oocdl
from oocdl.optim import average_of
from oocdl.storage.run.run_store import RunStore
from tests.kit.random_courses import Course, Net
from tests.kit.runs import broken_after, losses_of
from tests.kit.settings import EXACT


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    torch.manual_seed(1)
    module = Net().double()
    example = torch.zeros(2, 2, 6, 8).double(), torch.zeros(2, 6, 8, dtype=torch.int64)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    return oocdl.from_torch(module, example, path, outputs=["seg", "edge"]), module


@pytest.mark.parametrize("seed", range(6))
def test_a_course_is_pytorchs(seed: int, net: tuple[Path, Net], tmp_path: Path) -> None:
    path, module = net
    course, twin = Course(seed), Net().double()
    twin.load_state_dict(module.state_dict())
    samples = course.write(tmp_path / "data.zarr")
    how = {**EXACT, **course.options, "workdir": tmp_path / "run"}
    if course.breaks:
        with pytest.raises(RuntimeError):
            oocdl.fit(path, tmp_path / "data.zarr", callbacks=[broken_after(course.breaks)], **how)
    run = oocdl.fit(path, tmp_path / "data.zarr", **how)
    history, averages = course.train(twin, samples)
    np.testing.assert_allclose(losses_of(run), [loss for loss, _ in history], rtol=1e-9)
    found = [row.get("val_loss", np.nan) for row in run.history]
    np.testing.assert_allclose(found, [loss for _, loss in history], rtol=1e-9)
    for name, tensor in twin.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(run.weights[name][...], tensor, rtol=1e-7, atol=1e-9, err_msg=name)
    with RunStore.open(run.path) as store:
        for name, average in averages.items() if course.options["ema"] else ():
            np.testing.assert_allclose(store.array(average_of(name))[...], average, rtol=1e-7, atol=1e-9)
