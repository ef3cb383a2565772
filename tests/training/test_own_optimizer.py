"""Optimizers of a user's own, against ones written by hand for PyTorch; weights that have no gradient."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.errors import InputError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.graph import Role
from oocdl.ops import RULES
from oocdl.ops.optimizers import OPTIMIZERS
from oocdl.ops.update_rules import add_updates
from oocdl.optim import SGD, AdamW, Builder, Own, register
from oocdl.storage.run.run_store import RunStore
from tests.kit import jobs, nets
from tests.kit.nets import write_data
from tests.kit.settings import EXACT, QUICK
from tests.kit.torch_modules import Case, check, vectors

Names = Mapping[str, str]
DECAY = 0.9


def gathered(build: Builder, weight: str, gradient: str, state: Names, scalars: Names) -> tuple[str, Names]:
    """State of all kinds: one starts as 2, one is the weight before, one the new weight, one stays."""
    speed = build("Add", build("Mul", state["speed"], build.like(DECAY, weight)), gradient)
    rate = build("Div", scalars["lr"], scalars["step"])
    back = build("Mul", build("Sub", weight, state["before"]), build.like(0.1, weight))
    new = build("Add", build("Sub", weight, build("Mul", speed, rate)), back)
    return new, {"speed": speed, "before": build("Identity", weight), "now": new, "same": state["same"]}


class Gathered(torch.optim.Optimizer):
    """The same by hand."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for weight in (w for w in group["params"] if w.grad is not None):
                held = self.state[weight]
                before = held.get("before", torch.zeros_like(weight))
                held["speed"] = DECAY * held.get("speed", torch.full_like(weight, 2.0)) + weight.grad
                held["before"] = weight.clone()
                weight += 0.1 * (weight - before) - group["lr"] / self.count * held["speed"]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The optimizer "gathered", registered for one test."""
    monkeypatch.setattr("oocdl.ops.optimizers.KNOWN", {})
    before = dict(OPTIMIZERS)
    state = {"speed": 2.0, "before": 0.0, "now": 0.0, "same": 0.25}
    assert register("gathered", state=state)(gathered) is gathered
    yield "gathered"
    OPTIMIZERS.clear()
    OPTIMIZERS.update(before)


CUTS: dict[str, Any] = {"whole": "auto", "batch": {"batch": 2}, "channels": {"channels": 2}}


@pytest.mark.parametrize("cut", CUTS)
def test_is_exact_whole_and_cut(own: str, cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.prepare(jobs.NETS["mlp"], tmp_path)
    monkeypatch.setitem(jobs.OPTIMIZERS, own, (None, lambda weights: Gathered(weights, lr=0.01)))
    run = job.fit(tmp_path / "run", optimizer=own, lr=0.01, parallel=CUTS[cut])
    jobs.check(run, *jobs.train(job, own), 1e-10)
    with RunStore.open(run.path) as store:
        for weight in dict(job.module.named_parameters()):
            np.testing.assert_array_equal(store.array(f"{weight}/now")[...], run.weights[weight][...])
            assert (store.array(f"{weight}/same")[...] == 0.25).all()


def fit(folder: Path, **options: Any) -> oocdl.Run:
    model = nets.write_two_heads(folder / "net.onnx")
    arrays = {"x": nets.vectors()["x"], "kind": nets.vectors()["y"]}
    data = nets.write_data(folder / "data.zarr", arrays)
    given = {"targets": {"kind": "kind"}, "loss": {"kind": "cross_entropy"}, "batch_size": 5, **options}
    return oocdl.fit(model, data, workdir=folder / "run", **{**QUICK, **given})


DECAYING = (SGD(lr=0.1, momentum=0.9, weight_decay=0.5), AdamW(lr=0.1))


@pytest.mark.parametrize(("accumulate", "optimizer"), [(1, None), (2, None), *((1, one) for one in DECAYING)])
def test_a_weight_without_a_gradient_stays_as_it_is(
    own: str, accumulate: int, optimizer: Any, tmp_path: Path
) -> None:
    """PyTorch's optimizers skip it: it does not decay, either."""
    optimizer = optimizer or Own(own, lr=0.1, clip_norm=1.0)
    run = fit(tmp_path, optimizer=optimizer, steps=2, accumulate=accumulate)
    tensors = onnx.load(tmp_path / "net.onnx").graph.initializer
    before = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
    np.testing.assert_array_equal(run.weights["s"][...], before["s"])
    assert all((run.weights[name][...] != before[name]).any() for name in "wk")


def test_a_run_goes_on_with_the_same_function_only(own: str, tmp_path: Path) -> None:
    fit(tmp_path, optimizer=own, steps=1)
    assert fit(tmp_path, optimizer=own, steps=2).steps == 2

    def other(build: Any, weight: str, gradient: str, state: Names, scalars: Names) -> tuple[str, Names]:
        return build("Sub", weight, build("Mul", gradient, scalars["lr"])), state

    old, start = Own(own), dict(Own(own).state)
    register(own, state=start)(other)
    with pytest.raises(InputError, match=r"optimizer\.digest was [0-9a-f]+, is [0-9a-f]+"):
        fit(tmp_path, optimizer=own, steps=3)
    with pytest.raises(InputError, match="'gathered' is another than the run's"):
        add_updates(Builder(RULES), old, {})
    register(own, state=start | {"speed": 3.0})(gathered)
    with pytest.raises(InputError, match=r"optimizer\.state was"):
        fit(tmp_path, optimizer=own, steps=3)
    OPTIMIZERS.pop(own)
    with pytest.raises(InputError, match="no optimizer 'gathered'.*register"):
        fit(tmp_path, optimizer=own, steps=3)


def test_the_digest_knows_the_numbers_that_the_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(gathered)
    assert digest_of(gathered) == before
    monkeypatch.setitem(globals(), "DECAY", 0.8)
    assert digest_of(gathered) != before
    at_a_prompt = []
    # In Python 3.13 this is what ``python -c`` runs, whatever else was made of texts.
    lines = ["def f(x):\n", "    return x\n"]
    monkeypatch.setitem(linecache.cache, "<string>", (20, None, lines, "<string>"))
    for number in (1, 2):
        exec(f"def f(x):\n    return [x + {number} for _ in (1,)]", names := {})
        at_a_prompt.append(digest_of(names["f"]))
    assert len(set(at_a_prompt)) == 2


@pytest.mark.parametrize(
    ("gives", "why"),
    [
        (lambda b, w, g, s, n: w, "has to return"),
        (lambda b, w, g, s, n: (w, {}), r"returned state \[\], but was registered with \['m'\]"),
        (lambda b, w, g, s, n: (n["lr"], s), r"gave float32 \[\] for 'w', which is float32 \[3\]"),
        (lambda b, w, g, s, n: (w, {"m": b("Cast", g, to="float64")}), "gave float64 .* for 'w/m'"),
        (lambda b, w, g, s, n: (None, s), "gave None for 'w', which is no value"),
    ],
)
def test_what_cannot_be_is_refused(own: str, gives: Any, why: str) -> None:
    register("odd", state={"m": 0.0})(gives)
    build = Builder(RULES)
    roles = {"w": Role.WEIGHT, "g": Role.INPUT}
    weight, grad = (build.value(name, (3,), "float32", role) for name, role in roles.items())
    with pytest.raises(InputError, match=why):
        add_updates(build, Own("odd"), {weight: grad})


def test_names_that_cannot_be_are_refused(own: str) -> None:
    for name, state, given, why in (
        ("SGD", {}, gathered, "'SGD' already"),
        ("new", {"a/b": 0.0}, gathered, "state 'a/b'"),
        ("new", {}, np.add, "made by 'def'"),
    ):
        with pytest.raises(InputError, match=why):
            register(name, state=state)(given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'nobody' is not known here.*register"):
        Own("nobody")
    with pytest.raises(InputError, match="lr must not be negative"):
        Own(own, lr=-1.0)


@pytest.mark.parametrize(
    "held", [[1.0, 2.0], {"a": 1.0}, np.array([1.0, 2.0])], ids=["list", "dict", "array"]
)
def test_what_a_function_holds_tells_it_from_another(held: Any) -> None:
    def of(value: Any) -> str:
        def update() -> Any:
            return value

        return digest_of(update)

    other = {"a": 2.0} if isinstance(held, dict) else [1.0, 3.0] if isinstance(held, list) else held + 1
    assert of(held) == of(copy.deepcopy(held)) != of(other)


class Stairs(nn.Module):
    """Linear layers whose gradients are zeros, and one that is only compared, whose gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.stairs = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))
        self.compared = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = (torch.sign, torch.floor, torch.ceil, torch.round, lambda y: y.clamp(2.0, 1.0))
        made: Tensor = self.out(x)
        for step, layer in zip(steps, self.stairs, strict=True):
            made = made + step(layer(x))
        return made + (self.compared(x) > 0).to(x.dtype)


def test_weights_behind_steps_are_decayed_as_pytorch_does(tmp_path: Path) -> None:
    check(Case(Stairs, vectors()), tmp_path)


@pytest.mark.parametrize(
    ("accumulate", "steps", "passes"), [(1, 5, 5), (2, 2, 3), (2, 3, 5), (9, 3, 9)], ids=str
)
def test_batches_are_counted_by_passes(accumulate: int, steps: int, passes: int, tmp_path: Path) -> None:
    """Six samples in batches of two are three passes an epoch, its last step has what is left of them.

    Those of a validation do not count.
    """
    arrays = {"x": np.ones((6, 6)), "target": np.ones((6, 6))}
    data = write_data(tmp_path / "data.zarr", arrays)
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    options = {**EXACT, "loss": "mse", "optimizer": SGD(lr=0.1), "inputs": {"input": "x"}, "validation": data}
    options |= {"batch_size": 2, "accumulate": accumulate, "steps": steps, "targets": {"output": "target"}}
    oocdl.fit(module, data, workdir=tmp_path / "run", **options).load_into(module)
    assert int(module[0].num_batches_tracked) == passes
