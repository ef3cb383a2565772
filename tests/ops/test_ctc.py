"""CTC against ``torch.nn.CTCLoss`` in float64, and against the sum over all ways to emit the labels."""

from __future__ import annotations

from itertools import groupby, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.engines import numpy_ctc
from oocdl.errors import InputError
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops.ctc import CTC
from oocdl.ops.loss_functions import add_loss
from oocdl.testing import run_graph


def by_all_ways(x: Array, labels: list[int], blank: int) -> float:
    """Minus the logarithm of the chances, added up, of all strings of classes that collapse to the labels."""
    chances = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    total = 0.0
    for ways in product(range(x.shape[1]), repeat=len(x)):
        if [one for one, _ in groupby(ways) if one != blank] == labels:
            total += float(np.prod([chances[t, one] for t, one in enumerate(ways)]))
    return float("inf") if total == 0 else -float(np.log(total))


@settings(max_examples=40)
@given(data=st.data(), steps=st.integers(1, 5), classes=st.integers(2, 3), blank=st.integers(0, 1))
def test_the_loss_is_the_sum_over_all_ways(data: Any, steps: int, classes: int, blank: int) -> None:
    others = [one for one in range(classes) if one != blank]
    labels = data.draw(st.lists(st.sampled_from(others), max_size=3))
    x = np.random.default_rng(steps).normal(size=(steps, classes))
    padded = np.array([[*labels, *[-1] * (4 - len(labels))]])
    args = [x[None], padded, np.array([len(labels)]), np.array([steps])]
    found = numpy_ctc.ctc(args, {"blank": blank, "zero_infinity": False})[0]
    np.testing.assert_allclose(found, [by_all_ways(x, labels, blank)], rtol=1e-12)


def graph_of(
    spec: CTC, x: Array, labels: Array, lengths: dict[str, Array]
) -> tuple[Builder, dict[str, Array]]:
    """Loss and gradient of a CTC loss, and what they are computed from."""
    build = Builder(RULES)
    logits = build.value("x", x.shape, x.dtype.name, Role.WEIGHT)
    target = build.value("y", labels.shape, "int64", Role.WEIGHT)
    further = {name: build.value(name, array.shape, "int64", Role.WEIGHT) for name, array in lengths.items()}
    loss = add_loss(build, spec, logits, target, further)
    build.outputs = [loss, differentiate(build, loss, [logits])[logits]]
    return build, {"x": x, "y": labels, **lengths}


def by_torch(spec: CTC, x: Array, labels: Array, counts: Array, frames: Array) -> tuple[Array, Array]:
    """Loss and gradient by ``torch.nn.CTCLoss`` in float64."""
    at = torch.tensor(x, requires_grad=True)
    chances = at.log_softmax(-1).transpose(0, 1) if spec.batch_first else at.log_softmax(-1)
    loss = torch.nn.CTCLoss(spec.blank, spec.reduction, spec.zero_infinity)
    made = loss(chances, torch.tensor(labels).clamp(0), torch.tensor(frames), torch.tensor(counts))
    made.backward()
    assert at.grad is not None
    return made.detach().numpy(), at.grad.numpy()


@pytest.mark.parametrize("engine", ["torch", "numpy"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "spec", [CTC(), CTC(blank=4, reduction="sum"), CTC(zero_infinity=True), CTC(batch_first=False)], ids=str
)
def test_loss_and_gradient_are_torchs(spec: CTC, pieces: int, engine: str) -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=(3, 9, 5)) * 3
    labels = random.integers(1, 4, (3, 4))
    counts, frames = np.array([4, 0, 2]), np.array([9, 5, 3 if spec.zero_infinity else 8])
    if spec.zero_infinity:
        labels[2], counts[2] = 1, 3  # three equal labels take five frames
    given = np.ascontiguousarray(x.swapaxes(0, 1)) if not spec.batch_first else x
    build, arrays = graph_of(spec, given, labels, {"target_lengths": counts, "input_lengths": frames})
    graph = build.graph()
    ran = run_graph(graph, RULES, arrays, engine=engine, cuts=dict.fromkeys(range(20), pieces))
    for found, wanted in zip(
        ran.outputs.values(), by_torch(spec, given, labels, counts, frames), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)


def test_without_lengths_all_frames_count_and_the_labels_before_the_first_negative_one() -> None:
    x = np.random.default_rng(2).normal(size=(2, 7, 4))
    labels = np.array([[1, 3, 3], [2, -1, -1]])
    build, arrays = graph_of(CTC(), x, labels, {})
    found = list(run_graph(build.graph(), RULES, arrays).outputs.values())
    wanted = by_torch(CTC(), x, labels, np.array([3, 1]), np.array([7, 7]))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("label", [0, 4, -1])
@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_a_label_that_is_the_blank_or_no_class_makes_the_loss_nan(label: int, engine: str) -> None:
    x = np.random.default_rng(2).normal(size=(1, 7, 4))
    build, arrays = graph_of(CTC(), x, np.array([[1, label]]), {"target_lengths": np.array([2])})
    found = run_graph(build.graph(), RULES, arrays, engine=engine).outputs
    assert all(np.isnan(array).all() for array in found.values())


@pytest.mark.parametrize(
    ("spec", "shape", "labels", "why"),
    [
        (CTC(blank=4), (2, 5, 4), (2, 3), "class 4, but the output has 4 classes"),
        (CTC(), (5, 2, 4), (2, 3), "batch_first"),
        (CTC(), (2, 5), (2, 3), r"\[N, T, C\]"),
    ],
)
def test_what_does_not_fit_is_refused(spec: CTC, shape: Any, labels: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        graph_of(spec, np.zeros(shape), np.zeros(labels, np.int64), {})


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"blank": -1}])
def test_settings_that_there_are_not_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        CTC(**options)
