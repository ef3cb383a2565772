"""Options of ``fit`` in random combinations, beside a loop in PyTorch, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import oocdl
from oocdl.optim import average_of
from oocdl.planning.passes import FIRST, NEXT, RAGGED, SINGLE_PASS
from oocdl.storage.run.run_store import RunStore
from tests.kit.random_courses import Course, Net
from tests.kit.runs import broken_after, losses_of, same, trained_as
from tests.kit.settings import EXACT

KINDS = {0: {RAGGED}, 3: {FIRST, NEXT, RAGGED}, 8: {FIRST, SINGLE_PASS}}
"""Seed -> kinds of passes that its course has: none goes untested."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Net]:
    torch.manual_seed(1)
    module = Net().double()
    example = torch.zeros(2, 2, 6, 8).double(), torch.zeros(2, 6, 8, dtype=torch.int64)
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    return oocdl.from_torch(module, example, path, outputs=["seg", "edge"]), module


@pytest.mark.parametrize("seed", range(14))
def test_a_course_is_pytorchs_and_goes_on_to_the_same_bits(
    seed: int, net: tuple[Path, Net], tmp_path: Path
) -> None:
    path, module = net
    course, twin = Course(seed), Net().double()
    print(course)
    twin.load_state_dict(module.state_dict())
    samples = course.write(tmp_path / "data.zarr")
    how = {**EXACT, **course.options}
    run = oocdl.fit(path, tmp_path / "data.zarr", workdir=tmp_path / "run", **how)
    assert KINDS.get(seed, set()) <= set(run.plan.kinds)
    history, averages = course.train(twin, samples)
    np.testing.assert_allclose(losses_of(run), [loss for loss, _ in history], rtol=1e-9)
    found = [row.get("val_loss", np.nan) for row in run.history]
    np.testing.assert_allclose(found, [loss for _, loss in history], rtol=1e-9)
    rates = {f"lr/{n}" for n, group in enumerate(course.groups, 1) if "lr" in group}
    assert all({name for name in row if name.startswith("lr/")} == rates for row in run.history)
    trained_as(run, twin)
    with RunStore.open(run.path) as store:
        for name, average in averages.items() if course.options["ema"] else ():
            np.testing.assert_allclose(store.array(average_of(name))[...], average, rtol=1e-9, atol=1e-11)
    if course.breaks:
        again = {**how, "plan": run.path, "workdir": tmp_path / "again", "commit_seconds": 0}
        with pytest.raises(RuntimeError):
            oocdl.fit(path, tmp_path / "data.zarr", callbacks=[broken_after(course.breaks)], **again)
        same(oocdl.fit(path, tmp_path / "data.zarr", **again), run)
