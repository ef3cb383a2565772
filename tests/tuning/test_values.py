"""Spaces: names and values that a run can take, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from oocdl.config import make_settings
from oocdl.errors import InputError
from oocdl.losses import Dice
from oocdl.optim import SGD, Adam, Cosine
from oocdl.space import IntUniform, LogUniform, Uniform
from oocdl.tuning.values import checked_space, with_values


@pytest.mark.parametrize(
    ("space", "options", "told"),
    [
        ({}, {}, "space takes a mapping"),
        ([("lr", [1])], {}, "space takes a mapping"),
        ({"lr": 0.1}, {}, r"space\['lr'\] takes a list of values or one of oocdl.space"),
        ({"lr": []}, {}, r"space\['lr'\] takes a list"),
        ({"loss": "dice"}, {}, r"space\['loss'\] takes a list"),
        ({"lr": [0.1, -1.0]}, {}, r"space\['lr'\] has -1.0: lr must not be negative"),
        ({"lr": Uniform(-0.5, 1.0)}, {}, r"space\['lr'\] has -0.5: lr must not be negative"),
        ({"batch_size": IntUniform(0, 4)}, {}, r"space\['batch_size'\] has 0: batch_size must be at least 1"),
        ({"learning_rate": [0.1]}, {}, "unknown option 'learning_rate'"),
        ({"steps": [1, 2]}, {}, "space cannot have 'steps': rungs= says how long"),
        ({"memory": ["1GiB"]}, {}, "space cannot have 'memory': it is the same for all trials"),
        ({"lr": [0.1]}, {"lr": 0.2}, "'lr' is given twice"),
        ({"optimizer.lr": [0.1]}, {"lr": 0.2}, "'optimizer.lr' is given twice"),
        ({"optimizer.lr": [0.1], "lr": [0.2]}, {}, "'optimizer.lr' is given twice"),
        ({"freeze.x": [1]}, {}, "only optimizer and loss have fields"),
        ({"optimizer.beta": [0.9]}, {}, r"optimizer, a Adam, has no 'beta' \(did you mean 'betas'\?\)"),
        ({"optimizer.momentum": [0.9], "optimizer": ["sgd", "adam"]}, {}, "has no 'momentum'"),
        ({"optimizer.momentum": [-0.9]}, {"optimizer": "sgd"}, "momentum must not be negative"),
        ({"optimizer.weight_decay": ["x"]}, {}, r"space\['optimizer.weight_decay'\] has 'x'"),
        ({"optimizer.lr.steps": [5]}, {}, "optimizer.lr is 0.001, which has no fields"),
        (
            {"optimizer.lr": [0.1], "optimizer.lr.steps": [5]},
            {"optimizer": SGD(Cosine(0.1, 4))},
            "varied as a whole and by its fields",
        ),
        ({"lr": [0.1]}, {"optimizer": SGD(0.1)}, "lr goes with an optimizer given by name"),
    ],
)
def test_what_a_run_cannot_take_is_refused(space: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        checked_space(space, options)


@pytest.mark.parametrize("kind", [Uniform, LogUniform, IntUniform])
@pytest.mark.parametrize("ends", [(2, 1), (1, 1), (1, float("nan")), ("1", 2), (True, 2)])
def test_distributions_have_two_ends_in_order(kind: Any, ends: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match=kind.__name__):
        kind(*ends)


def test_ends_that_a_distribution_does_not_have() -> None:
    with pytest.raises(InputError, match="above 0"):
        LogUniform(0.0, 1.0)
    with pytest.raises(InputError, match="whole numbers"):
        IntUniform(1, 2.5)  # type: ignore[arg-type]


def test_dotted_names_change_fields() -> None:
    options = {"optimizer": SGD(Cosine(0.1, 9), momentum=0.0), "loss": "dice"}
    values = {
        "optimizer.momentum": 0.9, "optimizer.nesterov": True, "optimizer.lr.lr": 0.5, "loss.smooth": 1.0
    }  # fmt: skip
    made = make_settings(**with_values(options, values))
    # Nesterov without a momentum would be refused: fields change together.
    assert made.optimizer == SGD(Cosine(0.5, 9), momentum=0.9, nesterov=True)
    assert made.loss == Dice(smooth=1.0)


def test_an_optimizer_by_name_keeps_its_rate() -> None:
    made = make_settings(**with_values({"optimizer": "adam", "lr": 0.25}, {"optimizer.eps": 1e-3}))
    assert made.optimizer == Adam(0.25, eps=1e-3)
    made = make_settings(**with_values({}, {"lr": 0.5, "optimizer.eps": 1e-3}))
    assert made.optimizer == Adam(0.5, eps=1e-3)
