"""Signatures of public functions: every option has one record, which all of them follow; hints for words."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import oocdl
from oocdl.cli import verbs
from oocdl.config import OPTIONS, Settings, make_settings
from oocdl.errors import InputError
from oocdl.training import signature
from oocdl.training.call import ALL_OPTIONS, Call
from oocdl.training.signature import entries, records_of
from tests.kit.code import ROOT

PUBLIC = (oocdl.fit, oocdl.plan, oocdl.search, oocdl.simulate, oocdl.predict, oocdl.Run.evaluate)
named = pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)


def explicit(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = inspect.signature(function).parameters
    return {n: p for n, p in found.items() if p.kind is not p.VAR_KEYWORD and n != "self"}


def names(function: Callable[..., Any]) -> set[str]:
    return records_of(function).keys() - {"self"}


@named
def test_every_parameter_is_typed_and_described(function: Callable[..., Any]) -> None:
    assert all(p.annotation is not p.empty for p in explicit(function).values())
    told = entries(function)
    assert [name for name in told if name in explicit(function)] == list(explicit(function)), "in their order"
    for name, record in records_of(function).items():
        assert name == "self" or record.doc.endswith("."), f"nothing is said of {name}"


def test_the_signature_of_fit_is_that_of_the_records() -> None:
    hints = get_type_hints(oocdl.fit)
    for name, parameter in explicit(oocdl.fit).items():
        if name not in ("model", "dataset"):
            assert (parameter.default, hints[name]) == (ALL_OPTIONS[name].default, ALL_OPTIONS[name].type)
    assert len(explicit(oocdl.fit)) <= 20
    assert names(oocdl.fit) == names(oocdl.plan) == {"model", "dataset", *ALL_OPTIONS}


def test_settings_and_calls_are_made_of_the_options() -> None:
    other = {"memory_bytes": "memory", "disk_bytes": "disk"}
    assert {other.get(field.name, field.name) for field in fields(Settings)} == OPTIONS.keys() - {"lr"}
    assert {field.name for field in fields(Call)} == ALL_OPTIONS.keys() - OPTIONS.keys()
    assert make_settings(**{name: option.default for name, option in OPTIONS.items()}) == make_settings()


def test_what_several_functions_take_is_the_same() -> None:
    apart = {oocdl.search: {"epochs", "callbacks", "validation"}, oocdl.simulate: set[str]()}
    for function, own in apart.items():
        records = records_of(function)
        shared = {name for name in records.keys() & ALL_OPTIONS.keys()}
        assert {n for n in shared if records[n].default != ALL_OPTIONS[n].default} == own & {"epochs"}
        assert {n for n in shared if records[n].type != ALL_OPTIONS[n].type} == own
    often = {"validation_freq", "validation_steps", "metrics"}
    assert OPTIONS.keys() - names(oocdl.search) == often
    assert OPTIONS.keys() - names(oocdl.simulate) == {"threads", "accumulate", "validation", *often}


def test_the_command_line_has_the_same_options_defaults_and_words() -> None:
    for function, command in ((oocdl.fit, verbs.fit), (oocdl.simulate, verbs.simulate)):
        asked = inspect.signature(command).parameters
        for name, record in records_of(function).items():
            if name in asked and name in OPTIONS:
                assert asked[name].default == (record.default or asked[name].default)
                told = asked[name].annotation.__metadata__[0].help
                assert told.removesuffix("; may be repeated.").rstrip(".") + "." == record.first_sentence
    assert inspect.signature(verbs.fit).parameters["memory"].annotation.__metadata__[0].help == (
        'Memory budget of the process, such as "2GiB"; default: a safe share of what it may use.'
    )


def test_the_page_of_options_is_that_of_the_records() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "write_options.py"))
    assert written["PAGE"].read_text() == written["page"](), "python docs/write_options.py"


CALLS = """
import oocdl
oocdl.fit("net.onnx", "data.zarr", threads=2, spill="/scratch", parallel={"space": (2, 1, 1)}, trace="t.json")
oocdl.plan("net.onnx", "data.zarr", epochs=2, precision="float64", keep=["grad/w"])
oocdl.simulate("net.onnx", "data.zarr", hosts=[1, 2], batch_size=4)
oocdl.search("net.onnx", "data.zarr", space={}, accumulate=2, disk="1TB")
oocdl.fit("net.onnx", "data.zarr", epochs="2")  # wrong
oocdl.fit("net.onnx", "data.zarr", spill=2)  # wrong
oocdl.fit("net.onnx", "data.zarr", spil="/scratch")  # wrong
oocdl.plan("net.onnx", "data.zarr", precision="float8")  # wrong
oocdl.simulate("net.onnx", "data.zarr", threads=2)  # wrong
oocdl.search("net.onnx", "data.zarr", space={}, trace="t.json")  # wrong
"""


SIGNATURES_ONLY = """
[mypy]
follow_imports = skip
[mypy-oocdl,oocdl.config.*,oocdl.training.*,oocdl.tuning.*]
follow_imports = normal
"""
"""Whether the rest of oocdl, and what it imports, is typed is asked elsewhere, and takes 30 s."""


def test_a_type_checker_sees_wrong_names_and_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    calls, config = tmp_path / "calls.py", tmp_path / "mypy.ini"
    calls.write_text(CALLS)
    config.write_text(SIGNATURES_ONLY)
    words = ("--no-error-summary", "--config-file", config, "--cache-dir", tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, calls],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    wrong = [number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# wrong")]
    lines = [line for line in done.stdout.splitlines() if "calls.py:" in line and ": error: " in line]
    assert sorted({int(line.split(":")[1]) for line in lines}) == wrong, done.stdout + done.stderr


def test_help_names_what_the_signature_does_not() -> None:
    text = " ".join((oocdl.fit.__doc__ or "").split())
    assert "spill_dtype" in text and "docs/reference/options.md" in text
    for name, option in ALL_OPTIONS.items():
        assert f"{name} {option.doc}" in " ".join((oocdl.Options.__doc__ or "").split())


@pytest.mark.parametrize(
    ("function", "word", "said"),
    [
        (oocdl.fit, "learning_rate", "it is called 'lr' here"),
        (oocdl.plan, "epochz", "did you mean 'epochs'"),
        (oocdl.fit, "spil", "did you mean 'spill'"),
        (oocdl.fit, "validation_data", "it is called 'validation' here"),
        (oocdl.search, "validation_data", "it is called 'validation' here"),
        (oocdl.plan, "n_jobs", "it is called 'threads' here"),
        (oocdl.simulate, "threads", "takes cores="),
        (oocdl.fit, "weight_decay", "optimizer=oocdl.optim.AdamW("),
        (oocdl.plan, "max_grad_norm", "clip_norm=1.0"),
        (oocdl.fit, "transforms", "it is called 'augment' here"),
        (oocdl.fit, "patience", "oocdl.callbacks.EarlyStopping("),
        (oocdl.fit, "ema_decay", "it is called 'ema' here"),
        (oocdl.plan, "clipvalue", "clip_value=1.0"),
        (oocdl.fit, "sample_weights", "sample_weights='weight'"),
        (oocdl.fit, "wxyz", "nothing like it"),
        (oocdl.Run.evaluate, "wxyz", "; it takes dataset, memory, "),
    ],
)
def test_a_wrong_word_gets_a_short_hint(function: Callable[..., Any], word: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^{function.__name__} takes no '{word}'") as caught:
        function("net.onnx", "data.zarr", **{word: 1})
    assert said in str(caught.value) and len(str(caught.value)) < 200


def test_what_hints_lead_to_is_there() -> None:
    """Each word that stands for another is an option somewhere, or is explained."""
    options = {name for function in PUBLIC for name in names(function)}
    assert set(signature.WORDS.values()) <= options | signature.OTHERWISE.keys()
    assert not signature.WORDS.keys() & names(oocdl.fit)


def test_what_is_missing_or_too_much_is_python_s_own_error() -> None:
    for call in (oocdl.fit, oocdl.plan):
        with pytest.raises(TypeError):
            call("net.onnx")  # type: ignore[call-arg]
