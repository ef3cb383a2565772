"""Groups of weights and averages, typed and from a file, in a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import oocdl
from oocdl.optim import AdamW, Cosine
from tests.kit import nets
from tests.kit.commands import run

QUICK = ("--memory", "2GiB", "--threads", "1", "--engine", "onnxruntime", "--steps", "2", "--no-progress")
GROUPS = ({"params": ("w1", "b1"), "lr": 0.1, "betas": (0.5, 0.5)}, "no_decay_1d")


@pytest.mark.parametrize("way", ["typed", "file"])
def test_groups_and_averages_reach_the_run(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nets.write_job(tmp_path)
    words: list[object] = ["--param-groups", "params=w1|b1,lr=0.1,betas=0.5|0.5"]
    words += ["--param-groups", "no_decay_1d", "--ema", 0.9, "--optimizer", "adamw", "--schedule", "cosine"]
    if way == "file":
        (config := tmp_path / "run.toml").write_text(
            'ema = 0.9\noptimizer = "adamw"\nschedule = "cosine"\n'
            'param_groups = [{params = ["w1", "b1"], lr = 0.1, betas = [0.5, 0.5]}, "no_decay_1d"]\n'
        )
        words = ["--config", config]
    code, _, err = run(capsys, "fit", *job, *QUICK, *words)
    assert code == 0, err
    made = oocdl.open(tmp_path / "net.run")
    assert made.settings.param_groups == GROUPS and made.settings.ema == 0.9
    assert made.settings.optimizer == AdamW(lr=Cosine(0.001, 2))
    assert [row["lr/1"] for row in made.history] == pytest.approx([Cosine(0.1, 2)(step) for step in range(2)])


def test_what_is_no_group_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = nets.write_job(tmp_path)
    for words, said in (("nodecay", "got nodecay"), ("params=w9,lr=1", "'w9', which matches no trained")):
        code, _, err = run(capsys, "fit", *job, *QUICK, "--param-groups", words)
        assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("word", ["true", "false"])
def test_what_is_on_or_off_in_a_file_is_so_in_the_run(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = nets.write_job(tmp_path)
    (config := tmp_path / "run.toml").write_text(
        f'optimizer = "sgd"\nmomentum = 0.9\nparam_groups = [{{params = "w1", nesterov = {word}}}]\n'
    )
    code, _, err = run(capsys, "fit", *job, *QUICK, "--config", config)
    assert code == 0, err
    made = oocdl.open(tmp_path / "net.run")
    assert made.settings.param_groups == ({"params": ("w1",), "nesterov": word == "true"},)
