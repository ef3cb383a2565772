"""Optimizers and schedules: five steps against ``torch.optim``."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.ops import RULES
from oocdl.ops.optimizers import LAMB, OPTIMIZERS, SGD, Adam, AdamW, Lion, Optimizer, RMSprop, scalars
from oocdl.ops.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    Exponential,
    MultiStep,
    OneCycle,
    Polynomial,
    Step,
    Then,
    WarmUp,
    base_of,
    rate,
    rebased,
)
from oocdl.ops.update_rules import add_updates
from tests.kit import by_hand
from tests.kit.interpret import evaluate

SHAPES = {"w": (3, 4), "b": (4,), "s": ()}


def ours(optimizer: Optimizer, steps: int, dtype: str = "float64") -> dict[str, torch.Tensor]:
    """Weights after some steps."""
    build = Builder(RULES)
    weights = {name: build.value(name, shape, dtype, Role.WEIGHT) for name, shape in SHAPES.items()}
    grads = {n: build.value(f"g/{n}", s, dtype, Role.INPUT) for n, s in SHAPES.items()}
    add_updates(build, optimizer, {weights[name]: grads[name] for name in SHAPES})
    graph = canonicalize(build.graph(), RULES)
    states, kind = graph.of_role(Role.STATE), getattr(torch, dtype)
    kept = {one.name: torch.zeros(one.shape, dtype=kind) for one in states} | start(dtype)
    assert set(graph.updates) == set(kept)
    for step in range(steps):
        given = {f"g/{name}": grad for name, grad in gradient(step, dtype).items()}
        numbers = {n: torch.tensor(v, dtype=kind) for n, v in scalars(optimizer, step).items()}
        assert set(numbers) == {value.name for value in graph.of_role(Role.SCALAR)}
        found = evaluate(graph, {**kept, **given, **numbers})
        kept = {name: found[graph.updates[name]] for name in kept}
    return {name: kept[name] for name in SHAPES}


def start(dtype: str) -> dict[str, torch.Tensor]:
    return gradient(-1, dtype)


def gradient(step: int, dtype: str) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(step + 1)
    return {n: torch.as_tensor(np.asarray(random.normal(size=s), dtype)) for n, s in SHAPES.items()}


def theirs(
    kind: Any, options: dict[str, Any], lr: Any, clip: dict[str, float], steps: int, dtype: str = "float64"
) -> dict[str, torch.Tensor]:
    """Weights after some steps of PyTorch."""
    weights = {name: torch.nn.Parameter(value) for name, value in start(dtype).items()}
    optimizer = kind(weights.values(), lr=rate(lr, 0), foreach=False, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(lr, step)
        for name, grad in gradient(step, dtype).items():
            weights[name].grad = grad.clone()
        if "clip_norm" in clip:
            torch.nn.utils.clip_grad_norm_(weights.values(), clip["clip_norm"])
        if "clip_value" in clip:
            torch.nn.utils.clip_grad_value_(weights.values(), clip["clip_value"])
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


KINDS = {SGD: torch.optim.SGD, Adam: torch.optim.Adam, AdamW: torch.optim.AdamW, RMSprop: torch.optim.RMSprop}
KINDS |= {Lion: by_hand.Lion, LAMB: by_hand.LAMB}


OPTIONS: dict[Any, list[dict[str, Any]]] = {
    SGD: [
        {}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
    ],
    Adam: [{}, {"weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}],
    AdamW: [{}, {"weight_decay": 0.2, "betas": (0.4, 0.95)}, {"weight_decay": 0.0}],
    RMSprop: [
        {}, {"alpha": 0.9, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9},
        {"alpha": 0.9, "centered": True, "momentum": 0.5}, {"centered": True, "eps": 0.1},
    ],
    Lion: [{}, {"betas": (0.7, 0.9), "weight_decay": 0.3}],
    LAMB: [
        {}, {"betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.3}, {"weight_decay": 0.0},
        {"weight_decay": 0.0, "always_adapt": True},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("lr", "clip", "dtype"),
    [(0.05, {}, "float64"), (Cosine(0.1, 5), {"clip_norm": 1.5}, "float64"),
     (Cosine(0.1, 5), {"clip_value": 0.3}, "float32"), (0.05, {"clip_norm": 1e6}, "float32")],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "options"), [(kind, one) for kind, some in OPTIONS.items() for one in some])
def test_five_steps_are_torchs(kind: Any, options: dict[str, Any], lr: Any, clip: Any, dtype: str) -> None:
    found = ours(kind(lr=lr, **clip, **options), 5, dtype)
    expected = theirs(KINDS[kind], options, lr, clip, 5, dtype)
    tolerance = 1e-12 if dtype == "float64" else 1e-6
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_torchs(kind: Any) -> None:
    defaults = KINDS[kind]([torch.zeros(1)]).defaults
    mine = kind()
    names = "lr weight_decay momentum dampening nesterov betas eps alpha centered"
    for name in names.split():
        if hasattr(mine, name):
            assert getattr(mine, name) == defaults[name], name


def test_mixed_dtypes_share_a_norm_and_a_rate() -> None:
    build = Builder(RULES)
    for name, dtype in (("a", "float32"), ("b", "float64")):
        build.value(name, (2,), dtype, Role.WEIGHT)
        build.value(f"g{name}", (2,), dtype, Role.INPUT)
    add_updates(build, SGD(lr=1.0, clip_norm=1.0), {"a": "ga", "b": "gb"})
    one = torch.ones(2)
    given = {"a": one, "ga": one, "b": one.double(), "gb": one.double(), "lr": torch.tensor(1.0)}
    found = evaluate(build.graph(), given)
    half = torch.full((2,), 0.5).double()
    torch.testing.assert_close(found[build.updates["b"]], half, rtol=1e-5, atol=1e-5)


def test_optimizers_are_values() -> None:
    one, two = (AdamW(WarmUp(Cosine(0.1, 9), 3), betas) for betas in ([0.9, 0.99], (0.9, 0.99)))
    assert one == two == pickle.loads(pickle.dumps(one)) and hash(one) == hash(two)
    assert Adam() != AdamW(weight_decay=0.0)
    assert list(OPTIMIZERS) == ["sgd", "adam", "adamw", "rmsprop", "lion", "lamb"]


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (Constant(0.1), lambda o: SCHEDULERS.ConstantLR(o, 1.0)),
        (Step(0.1, 3, 0.5), lambda o: SCHEDULERS.StepLR(o, 3, 0.5)),
        (Cosine(0.1, 10, 0.01), lambda o: SCHEDULERS.CosineAnnealingLR(o, 10, 0.01)),
        (MultiStep(0.1, (2, 3, 7), 0.5), lambda o: SCHEDULERS.MultiStepLR(o, [2, 3, 7], 0.5)),
        (Exponential(0.1, 0.9), lambda o: SCHEDULERS.ExponentialLR(o, 0.9)),
        (CosineRestarts(0.1, 4), lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 4)),
        (CosineRestarts(0.1, 2, 2, 0.01), lambda o: SCHEDULERS.CosineAnnealingWarmRestarts(o, 2, 2, 0.01)),
        (Polynomial(0.1, 10), lambda o: SCHEDULERS.PolynomialLR(o, 10, 0.9)),
        (OneCycle(0.1, 10), lambda o: SCHEDULERS.OneCycleLR(o, 0.1, 10)),
        (OneCycle(0.1, 20, 0.25), lambda o: SCHEDULERS.OneCycleLR(o, 0.1, 20, pct_start=0.25)),
        (WarmUp(0.1, 4), lambda o: SCHEDULERS.LinearLR(o, total_iters=4)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_schedules_are_torchs(schedule: Any, make: Any) -> None:
    """In a group with another rate, too, which a scheduler of PyTorch scales from where it begins."""
    w, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [w]}, {"params": [other], "lr": 0.03}], lr=0.1)
    scheduler = make(optimizer)
    of_group = rebased(schedule, base_of(schedule) or 0.0, 0.03)
    for step in range(10):
        assert rate(schedule, step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        if not isinstance(schedule, OneCycle):  # PyTorch takes a list of peaks there
            assert rate(of_group, step) == pytest.approx(optimizer.param_groups[1]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_parts_of_schedules_are_rebased_together() -> None:
    schedule = Then(WarmUp(Cosine(0.1, 9), 3), 9, 0.05)
    assert base_of(schedule) == 0.1
    assert rebased(schedule, 0.1, 0.01) == Then(WarmUp(Cosine(0.01, 9), 3), 9, 0.005)
    with pytest.raises(InputError, match="function of your own"):
        rebased(WarmUp(lambda step: 0.1, 3), 0.1, 0.01)


BAD: Any = None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(lr=-1.0), "lr"),
        (lambda: SGD(nesterov=True), "nesterov"),
        (lambda: SGD(weight_decay=-1.0), "weight_decay"),
        (lambda: SGD(momentum=-0.1), "momentum"),
        (lambda: SGD(clip_norm=0.0), "clip_norm"),
        (lambda: SGD(clip_value=0.0), "clip_value"),
        (lambda: SGD(clip_value=1.0, clip_norm=1.0), "clip"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: RMSprop(alpha=2.0), "alpha"),
        (lambda: CosineRestarts(0.1, 4, 0), "times of the schedule CosineRestarts must be at least 1, got 0"),
        (lambda: OneCycle(0.1, start=0), "start of the schedule OneCycle divides, and must be positive"),
        (lambda: MultiStep(0.1, BAD or 3), "milestones of the schedule MultiStep must be several .*, got 3"),
        (lambda: Cosine(BAD or "0.1"), "lr of the schedule Cosine must be a finite number, got '0.1'"),
        (lambda: WarmUp(BAD, 3), "after of the schedule WarmUp must be a finite number, got None"),
    ],
)
def test_wrong_settings_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("schedule", "step"),
    [(Exponential(0.1, 10), 400), (Step(0.1, 1, 10.0), 400), (Polynomial(0.1, 9, -1.0), 9)],
)
def test_a_rate_beyond_all_numbers_is_refused(schedule: Any, step: int) -> None:
    with pytest.raises(InputError, match=f"the learning rate of step {step + 1} must be a finite number"):
        schedule(step)
