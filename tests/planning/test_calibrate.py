"""Measuring a machine, in small, and the cache of what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.cli import app
from oocdl.engines.engine import get_engine
from oocdl.errors import ResourceError
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import ProgramScratch
from oocdl.graph.ir.speed import RateTable, Scale, Streaming
from oocdl.ops import RULES
from oocdl.planning import calibrate
from oocdl.planning.calibrate import cache_path, disk_rates, load_rates, measure_rates, rates_for, store_rates
from oocdl.planning.cost_model import BFLOAT16_SUFFIX, NOMINAL, Rates, program_seconds
from oocdl.planning.probes import computing_probes, overhead_program
from oocdl.planning.task_graph import UnitCall
from oocdl.planning.task_key import TaskKey
from oocdl.presets.unets import write_unet3d
from oocdl.storage.checksums import sealed, unsealed
from tests.kit import nets

ENGINES = ("torch", "onnxruntime")
TINY = {"scale": 1e-4, "disk_bytes": 1 << 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and no long measurements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were measured, in order; nothing really is."""
    asked: list[str] = []

    def measure(engine: str, folder: Path | None = None) -> Rates:
        asked.append(engine)
        return NOMINAL

    monkeypatch.setattr(calibrate, "measure_rates", measure)
    return asked


@pytest.mark.parametrize("engine", ENGINES)
def test_small_probes_run_through_the_engine(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "TIMED_CALLS", 1)
    if engine == "torch":  # the other measures twice, and the better result counts
        monkeypatch.setattr(calibrate, "MEASURE_TWICE_SECONDS", 0)
    probes = tmp_path / "probes"  # ONNX Runtime 1.32 writes into the cache folder when it is imported
    probes.mkdir()
    rates = measure_rates(engine, probes, **TINY)  # type: ignore[arg-type]
    has_bfloat16, thin = get_engine(engine).has_bfloat16, get_engine(engine).thin_slab_elements
    assert set(rates.arithmetic) == {
        kind for kind in NOMINAL.arithmetic if has_bfloat16 or not kind.endswith(BFLOAT16_SUFFIX)
    }
    assert rates.thin_slab_elements == thin > 0
    assert set(rates.memory) == {op for op, rule in RULES.items() if isinstance(rule.speed, Streaming)}
    again = Rates.from_json(rates.to_json())
    assert again == rates and repr(again) == repr(rates), "in the same order"
    assert 1e-9 < program_seconds(overhead_program(3), RULES, rates) < 1
    assert not list(probes.iterdir()), "the disk's files are gone"


class HalfTold:
    """An engine whose tables are of another build of its library: it takes twice what it tells."""

    def __init__(self, share: float) -> None:
        self.inner, self.share = get_engine("torch"), share

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        told = self.inner.scratch_of(program, rules)
        return told._replace(scratch_bytes=int(told.scratch_bytes * self.share))


@pytest.mark.slow  # of pages that the system counts: other processes disturb it
def test_scratch_is_measured_beside_what_is_told() -> None:
    # What pooling takes is made by oocdl itself, of arrays that are as large on any processor.
    probes = [one for one in computing_probes(Scale(0.2)) if one[0] == "MaxPoolGrad"]

    def ratios(share: float) -> dict[str, RateTable]:
        bench = calibrate._Bench(HalfTold(share), 1)  # type: ignore[arg-type]
        return calibrate._scratch_ratios(bench, probes)

    def tells(found: dict[str, RateTable]) -> bool:
        # As much as it is told too little by; the heap gives out whole pages and keeps some.
        return list(found) == ["MaxPoolGrad"] and all(2 < ratio < 5 for _, ratio in found["MaxPoolGrad"])

    # A system short of memory takes pages back while they are counted: one look in a few is undisturbed.
    assert any(not ratios(1.0) for _ in range(3))
    assert any(tells(ratios(0.25)) for _ in range(5))


def test_a_plan_reserves_the_scratch_that_was_measured(tmp_path: Path) -> None:
    model = write_unet3d(tmp_path / "unet.onnx", base=4, depth=1, classes=2)
    data = nets.write_data(tmp_path / "data.zarr", nets.volumes(1, 16))

    def scratch() -> dict[TaskKey, tuple[bool, int]]:
        calls = oocdl.plan(model, data, engine="torch", loss="dice_ce", threads=1).compiled.graph.calls
        units = [call for call in calls if isinstance(call, UnitCall)]
        heavy = {c.key: any(i.op.startswith("Conv") for i in c.unit.program.instructions) for c in units}
        return {call.key: (heavy[call.key], call.scratch_bytes) for call in units}

    told = scratch()
    doubled = {kind: ((1, 2.0),) for kind in NOMINAL.arithmetic if kind.startswith("Conv")}
    store_rates("torch", replace(NOMINAL, scratch_ratios=doubled))
    assert scratch() == {key: (heavy, nbytes * (1 + heavy)) for key, (heavy, nbytes) in told.items()}
    assert sum(nbytes > 0 for heavy, nbytes in told.values() if heavy) > 1


def test_disk_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot measure the disk of .*gone"):
        disk_rates(tmp_path / "gone", 1 << 12)


def test_rates_are_measured_once(measured: list[str], cache: Path) -> None:
    assert load_rates("torch") is None
    assert rates_for("torch") == rates_for("torch") == load_rates("torch") == NOMINAL
    assert measured == ["torch"]
    assert [path.name for path in (cache / "oocdl").iterdir()] == [cache_path("torch").name]
    rates_for("onnxruntime")
    rates_for("torch", again=True)
    assert measured == ["torch", "onnxruntime", "torch"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"facts": 1}', "null", "\x00"])
def test_a_damaged_cache_is_measured_anew(damage: str, measured: list[str]) -> None:
    rates_for("torch")
    cache_path("torch").write_text(damage)
    with pytest.warns(UserWarning, match="do not count") as caught:
        assert rates_for("torch") == NOMINAL
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert measured == ["torch", "torch"]
    assert load_rates("torch") == NOMINAL


def test_damaged_numbers_do_not_count(measured: list[str]) -> None:
    path = store_rates("torch", NOMINAL)
    path.write_text(path.read_text().replace("copy_bytes_per_second", "copy_bytes_a_second"))
    with pytest.warns(UserWarning, match="damaged"):
        assert load_rates("torch") is None


@pytest.mark.parametrize("fact", ["format", "host", "processor", "cores", "engine", "torch"])
def test_rates_of_another_machine_do_not_count(fact: str, measured: list[str]) -> None:
    path = store_rates("torch", NOMINAL)
    body = unsealed("rates", path.read_text())
    body["facts"][fact] = "another"
    path.write_text(sealed("rates", body))
    with pytest.warns(UserWarning, match="outdated"):
        assert rates_for("torch") == NOMINAL
    assert measured == ["torch"]


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_path("torch").is_relative_to(Path.home() / ".cache" / "oocdl")


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(ResourceError, match="XDG_CACHE_HOME"):
        store_rates("torch", NOMINAL)


def test_info_shows_the_machine(measured: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--engine", "torch"], [], ["--again"]):
        assert app.run_command(["info", "--machine", *arguments], debug=True) == 0
        out = capsys.readouterr().out
        assert all(word in out for word in ("cores", "memory", "disk reads", "Conv 3d window", "GiB/s"))
    assert measured == ["torch", "torch"], "once, and again"


@pytest.mark.parametrize("arguments", [[], ["x.onnx", "--machine"], ["x.onnx", "--again"]])
def test_info_takes_a_path_or_the_machine(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run_command(["info", *arguments], debug=False) == 2
    assert capsys.readouterr().err.count("\n") == 1
