"""Signatures of public functions: every option stands there, typed and described; wrong words get a hint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import oocdl
from oocdl.cli import verb_options as cli
from oocdl.config import OPTIONS, Settings, make_settings
from oocdl.errors import InputError
from oocdl.training import signature
from oocdl.training.signature import entries, first_sentence, hint

PUBLIC = (oocdl.fit, oocdl.plan, oocdl.search, oocdl.simulate, oocdl.Run.predict, oocdl.Run.evaluate)
named = pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(function).parameters)
    found.pop("self", None)
    return found


@named
def test_every_option_is_explicit_typed_and_described(function: Callable[..., Any]) -> None:
    found = parameters(function)
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in found.values())
    assert all(p.annotation is not inspect.Parameter.empty for p in found.values())
    assert list(entries(function)) == list(found), "one entry each, in the order of the signature"
    for name, text in entries(function).items():
        assert len(text.splitlines()) > 1, f"nothing is said of {name}"


def test_options_are_those_of_settings() -> None:
    taken = {p.name: p.default for p in parameters(oocdl.fit).values() if p.name in OPTIONS}
    assert taken.keys() == OPTIONS
    assert make_settings(**taken) == make_settings() == Settings()
    other = {"memory_bytes": "memory", "disk_bytes": "disk"}
    assert {other.get(field.name, field.name) for field in fields(Settings)} == OPTIONS - {"lr"}


def test_what_several_functions_take_is_the_same() -> None:
    assert parameters(oocdl.plan) == parameters(oocdl.fit)
    assert entries(oocdl.plan) == entries(oocdl.fit)
    own = {oocdl.search: {"epochs", "callbacks"}, oocdl.simulate: set()}
    for function, apart in own.items():
        found, known = parameters(function), parameters(oocdl.fit)
        differing = {name for name in found.keys() & known.keys() if found[name] != known[name]}
        assert differing == apart, function
    assert OPTIONS - parameters(oocdl.search).keys() == set()
    assert OPTIONS - parameters(oocdl.simulate).keys() == {"threads", "accumulate"}


def test_the_command_line_has_the_same_defaults_and_words() -> None:
    asked = inspect.signature(cli.training_options, eval_str=True).parameters
    known = parameters(oocdl.fit)
    assert asked.keys() >= OPTIONS - {"commit_seconds"}
    lists = {"freeze", "keep"}
    for name in asked.keys() & OPTIONS - lists:
        assert asked[name].default == known[name].default, name
    helps = {name: p.annotation.__metadata__[0].help for name, p in asked.items()}
    for name in ("epochs", "memory", "precision", "accumulate"):
        assert helps[name] == first_sentence(oocdl.fit, name)
    assert helps["memory"].endswith("default: a safe share of what it may use.")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("learning_rate", "it is called 'lr' here"),
        ("epochz", "did you mean 'epochs'"),
        ("validation_data", "oocdl.search(validation=)"),
        ("n_jobs", "it is called 'threads' here"),
        ("weight_decay", "optimizer=oocdl.optim.AdamW("),
        ("max_grad_norm", "clip_norm=1.0"),
        ("wxyz", "nothing like it"),
    ],
)
def test_words_of_others_get_a_hint(word: str, said: str) -> None:
    for function in (oocdl.fit, oocdl.plan):
        with pytest.raises(InputError, match=f"takes no '{word}'") as caught:
            function("net.onnx", "data.zarr", **{word: 1})
        assert said in str(caught.value)


def test_a_hint_names_what_the_function_has() -> None:
    with pytest.raises(InputError, match="it is called 'validation' here"):
        oocdl.search("net.onnx", "data.zarr", space={}, validation_data="v.zarr")  # type: ignore[call-arg]
    with pytest.raises(InputError, match="takes cores="):
        oocdl.simulate("net.onnx", "data.zarr", threads=2)  # type: ignore[call-arg]
    assert hint("lrr", ["lr"]) == " (did you mean 'lr'?)"


def test_what_hints_lead_to_is_there() -> None:
    """Each word that stands for another is an option somewhere, or is explained."""
    options = {name for function in PUBLIC for name in parameters(function)}
    assert set(signature.WORDS.values()) <= options
    assert not signature.WORDS.keys() & parameters(oocdl.fit).keys()
    assert set(signature.SAME.values()) <= signature.OTHERWISE.keys()


def test_what_is_missing_or_too_much_is_python_s_own_error() -> None:
    for call in (oocdl.fit, oocdl.plan):
        with pytest.raises(TypeError):
            call("net.onnx")  # type: ignore[call-arg]


def test_a_method_does_not_take_itself() -> None:
    with pytest.raises(InputError, match="^evaluate takes no 'wxyz'; it takes dataset, memory, "):
        oocdl.Run.evaluate(object(), "data.zarr", wxyz=1)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("word", ["augment", "transforms", "early_stopping", "patience", "ema", "wxyz"])
def test_what_there_is_not_is_told_shortly(word: str) -> None:
    with pytest.raises(InputError, match=f"fit takes no '{word}'") as caught:
        oocdl.fit("net.onnx", "data.zarr", **{word: 1})
    assert len(str(caught.value)) < 200
