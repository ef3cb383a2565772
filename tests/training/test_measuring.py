"""This machine is measured before a long run, and only then; and it is said."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import oocdl
from oocdl.events import Notice
from oocdl.planning.calibrate import known_rates, store_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.training import trainer
from tests.kit import nets
from tests.kit.settings import QUICK


class Stop(Exception):
    """Ends a run at its first step."""


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``fit`` of a tiny network until its first step; returns the lines that were said."""
    job = nets.write_job(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OOCDL_MEASURE")

    def call(**options: Any) -> list[str]:
        said: list[str] = []

        def listen(event: object) -> None:
            if isinstance(event, Notice):
                said.append(event.text)
            elif isinstance(event, oocdl.events.RunStarted):
                raise Stop

        with pytest.raises(Stop):
            oocdl.fit(*job, workdir=tmp_path / "run", callbacks=[listen], resume="restart",
                      **{**QUICK, **options})  # fmt: skip
        return said

    return call


@pytest.mark.slow
def test_a_long_run_is_measured_before_once(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = trainer.CODE.replace("m(sys.argv[1])", "").replace(
        "from oocdl.planning.calibrate import rates_for as m;",
        "from oocdl.planning.calibrate import measure_rates, store_rates;"
        "store_rates(sys.argv[1], measure_rates(sys.argv[1], scale=0.01, disk_bytes=1 << 20))",
    )
    monkeypatch.setattr(trainer, "CODE", code)
    assert fit(steps=10) == [] and known_rates("onnxruntime") is NOMINAL
    (said,) = fit(steps=10**8)
    assert "by nominal rates; measuring this machine first, once" in said
    assert known_rates("onnxruntime") is not NOMINAL
    assert fit(steps=10**8) == []


@pytest.mark.parametrize(
    ("budget_bytes", "told"), [(8 << 30, "no room to measure: oocdl info --machine"), (1, None)]
)
def test_it_is_left_out_where_there_is_no_room_or_if_asked(
    fit: Any, monkeypatch: pytest.MonkeyPatch, budget_bytes: int, told: str | None
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing is measured")

    monkeypatch.setattr(subprocess, "run", never)
    monkeypatch.setattr(trainer, "MEASURING_BYTES", budget_bytes)
    if told is None:
        monkeypatch.setenv("OOCDL_MEASURE", "off")
        assert fit(steps=10**8) == []
    else:
        assert told in fit(steps=10**8)[0]


def test_what_goes_wrong_is_said_and_rates_that_are_known_are_enough(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CODE", "raise SystemExit('no clock')")
    said = fit(steps=10**8)
    assert said[1] == "this machine could not be measured, the plan is by nominal rates: no clock"
    store_rates("onnxruntime", NOMINAL)
    assert fit(steps=10**8) == []
