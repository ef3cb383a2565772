"""``oocdl.simulate``: rows for numbers of hosts, as table and picture, from Python and the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from PIL import Image

import oocdl
from oocdl.errors import InputError
from oocdl.presets.unets import write_unet3d
from oocdl.report import scaling as scaling_view
from oocdl.report.scaling import CERTAINTY, NOMINAL_CERTAINTY


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("scaling")
    group = zarr.open_group(folder / "data.zarr", mode="w")
    group.create_array("image", shape=(2, 1, 32, 32, 32), chunks=(1, 1, 32, 32, 32), dtype="float32")
    group.create_array("logits", shape=(2, 32, 32, 32), chunks=(1, 32, 32, 32), dtype="uint8")
    return write_unet3d(folder / "net.onnx", base=8, depth=2, size=(32, 32, 32)), folder / "data.zarr"


def scaling(files: tuple[Path, Path], **options: Any) -> oocdl.Scaling:
    words = {"cores": 2, "memory": "4GiB", "engine": "torch", "loss": "cross_entropy", **options}
    return oocdl.simulate(*files, **words)


def test_weak_scaling_grows_the_batch_and_strong_does_not(files: tuple[Path, Path]) -> None:
    """Cuts are asked for: of so small a network one host would do all."""
    cuts = {"batch": 4, "space": [2, 2]}
    weak, strong = (scaling(files, hosts=[1, 4], weak=is_weak, parallel=cuts) for is_weak in (True, False))
    assert [row.batch for row in weak.rows] == [1, 4] and [row.batch for row in strong.rows] == [1, 1]
    for found in (weak, strong):
        first, last = found.rows
        assert first.speedup == first.efficiency == 1.0 and first.traffic_bytes == 0
        assert last.speedup == pytest.approx(last.batch * first.seconds / last.seconds)
        assert last.efficiency == pytest.approx(last.speedup / 4) and last.traffic_bytes > 0
        assert sum(last.details.sent_bytes) == sum(last.details.received_bytes)
    assert weak.rows[1].efficiency > strong.rows[1].efficiency


def test_hosts_without_work_are_told(files: tuple[Path, Path]) -> None:
    """So small a network is done by one."""
    found = scaling(files, hosts=[1, 4])
    assert [(row.hosts, row.working) for row in found.rows] == [(1, 1), (4, 1)]
    assert "at work" in str(found)
    assert "at work" not in str(scaling(files, hosts=[1]))


def test_numbers_of_hosts_may_be_those_of_numpy(files: tuple[Path, Path]) -> None:
    assert [row.hosts for row in scaling(files, hosts=np.array([2, 1])).rows] == [2, 1]


def test_a_slower_network_limits(files: tuple[Path, Path]) -> None:
    cut = {"hosts": [2], "parallel": {"space": [2]}}
    fast, slow = (scaling(files, network=rate, **cut).rows[0] for rate in ("10Gbit", "1Mbit"))
    assert slow.seconds > 3 * fast.seconds and slow.limit == "network"


def test_as_many_cores_count_as_one_as_there_are_too_many(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose cores are counted as one of their speed is about as fast as with all of them."""
    each = scaling(files, hosts=[2], cores=4, weak=True).rows[0]
    monkeypatch.setattr("oocdl.training.simulation.MOST_LANES", 2)
    together = scaling(files, hosts=[2], cores=4, weak=True).rows[0]
    assert together.details.tasks <= each.details.tasks
    assert together.seconds == pytest.approx(each.seconds, rel=0.5)


def test_the_table_fits_a_terminal_and_the_picture_is_drawn(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scaling(files, hosts=[1, 2])
    *lines, said = str(found).splitlines()
    assert said == found.certainty and max(len(CERTAINTY), len(NOMINAL_CERTAINTY)) <= 80
    assert replace(found, nominal=True).certainty == NOMINAL_CERTAINTY
    assert replace(found, nominal=False).certainty == CERTAINTY
    assert max(map(len, lines)) <= 80
    assert all(row.limit in str(found) for row in found.rows)
    pytest.importorskip("matplotlib")
    with Image.open(found.plot(tmp_path / "scaling.png")) as picture:
        assert picture.size[0] > 500
    monkeypatch.setattr(scaling_view, "empty_figure", None)  # it is refused before it is drawn
    with pytest.raises(InputError, match="PNG|png"):
        found.plot(tmp_path / "scaling.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": [0]}, "hosts"),
        ({"hosts": []}, "hosts"),
        ({"hosts": 4}, r"hosts takes a list of numbers of hosts, such as \[1, 4\], got 4"),
        ({"hosts": np.array(4)}, "hosts"),
        ({"hosts": "1,2"}, "hosts"),
        ({"hosts": [True]}, "hosts"),
        ({"hosts": [[1], [1, 2]]}, "hosts"),
        ({"hosts": np.array([0.5])}, "hosts"),
        ({"threads": 2}, "cores"),
        ({"accumulate": 2}, "accumulate"),
        ({"network": "fast"}, "network"),
        ({"disk_rate": "-1"}, "disk_rate"),
    ],
)
def test_what_cannot_be_is_refused(files: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scaling(files, **{"hosts": [1], **options})
