"""Reading and writing at indices, from data and known before the run: values and gradients, in every cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper

from oocdl.errors import IndexRangeError, ModelError
from oocdl.graph.onnx.constant_folding import fold
from oocdl.graph.onnx.model_file import OnnxNode
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from tests.kit.lowered import check, model_of

RANDOM = np.random.default_rng(0)
AT = np.array


def numbers(*shape: int) -> Any:
    return RANDOM.normal(size=shape)


def ids(extent: int, *shape: int) -> Any:
    return RANDOM.integers(-extent, extent, size=shape)


def scatter_nd(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """One after another, as ONNX writes it."""
    result, k = x.clone(), i.shape[-1]
    for place, row in zip(i.reshape(-1, k), u.reshape(-1, *x.shape[k:]), strict=True):
        result[tuple(place.tolist())] = row
    return result


def scatter_elements(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, axis: int) -> torch.Tensor:
    result = x.clone()
    for place in np.ndindex(*i.shape):
        result[(*place[:axis], int(i[place]), *place[axis + 1 :])] = u[place]
    return result


def gather_elements(x: torch.Tensor, i: torch.Tensor, axis: int) -> torch.Tensor:
    return x.gather(axis, i % x.shape[axis])


def pairs(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i[..., 0], i[..., 1]]


def reduced(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, axis: int, how: str) -> torch.Tensor:
    """PyTorch's scatter_reduce, for indices that count from the end, too."""
    return x.scatter_reduce(axis, i % x.shape[axis], u, {"mul": "prod", "add": "sum"}.get(how, f"a{how}"))


def reduced_pairs(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor, how: str) -> torch.Tensor:
    """The same of the rows of ``x`` along its first two axes, counted through."""
    flat = (i[..., 0] % x.shape[0]) * x.shape[1] + i[..., 1] % x.shape[1]
    rows = flat.reshape(-1, 1).expand(-1, x.shape[2])
    return reduced(x.flatten(0, 1), rows, u.reshape(rows.shape), 0, how).reshape(x.shape)


X = numbers(3, 5, 2)
TWICE = AT([[[2, 1], [0, -1]], [[2, 1], [-1, 1]]])
CASES: dict[str, tuple[str, list[Any], dict[str, Any], Callable[..., Any]]] = {
    "gather-last": ("Gather", [X, ids(2, 2, 3)], {"axis": 2}, lambda x, i: x[:, :, i]),
    "gather-middle": ("Gather", [X, ids(5, 7)], {"axis": 1}, lambda x, i: x[:, i]),
    "elements": ("GatherElements", [X, ids(5, 3, 4, 2)], {"axis": 1}, partial(gather_elements, axis=1)),
    "elements-less": ("GatherElements", [X, ids(2, 2, 5, 3)], {"axis": -1}, partial(gather_elements, axis=2)),
    "nd": ("GatherND", [X, np.stack([ids(3, 4), ids(5, 4)], -1)], {}, pairs),
    "nd-one": ("GatherND", [X, ids(3, 2, 3, 1)], {}, lambda x, i: x[i[..., 0]]),
    "nd-batch": (
        "GatherND", [X, np.stack([ids(5, 3, 4), ids(2, 3, 4)], -1)], {"batch_dims": 1},
        lambda x, i: torch.stack([pairs(*both) for both in zip(x, i, strict=True)])),
    "nd-batch-single": (
        "GatherND", [X, ids(5, 3, 1)], {"batch_dims": 1},
        lambda x, i: torch.stack([y[k[0]] for y, k in zip(x, i, strict=True)])),
    "scatter-nd": ("ScatterND", [X, AT([[2], [0], [2]]), numbers(3, 5, 2)], {}, scatter_nd),
    "scatter-elements": (
        "ScatterElements", [X, ids(5, 3, 4, 2), numbers(3, 4, 2)], {"axis": 1},
        partial(scatter_elements, axis=1)),
    **{
        f"scatter-elements-{how}": (
            "ScatterElements", [X, ids(2, 2, 5, 3), numbers(2, 5, 3)], {"axis": 2, "reduction": how},
            partial(reduced, axis=2, how=how))
        for how in ("add", "mul", "max", "min")
    },
    **{
        f"scatter-nd-{how}": (
            "ScatterND", [X, TWICE, numbers(2, 2, 2)], {"reduction": how}, partial(reduced_pairs, how=how))
        for how in ("add", "mul", "max", "min")
    },
}  # fmt: skip


@pytest.mark.parametrize("known", [False, True], ids=["data", "known"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_in_every_cut(case: str, known: bool, tmp_path: Path) -> None:
    op, arrays, attrs, formula = CASES[case]
    names = ["x", "i", "u"][: len(arrays)]
    given = dict(zip(names, arrays, strict=True))
    constants = {"i": given.pop("i")} if known else {}
    index = torch.as_tensor(arrays[1])
    model = model_of([helper.make_node(op, names, ["y"], **attrs)], given, ["y"], constants)
    check(
        model, given, (lambda x, *rest: formula(x, index, *rest)) if known else formula, tmp_path, counts=(2,)
    )


def test_a_known_box_is_slices(tmp_path: Path) -> None:
    """As PyTorch exports ``x[:, 1:4, 1:2] = u``, which the shifted windows of Swin do."""
    where = np.stack(np.meshgrid(np.arange(3), np.arange(1, 4), np.arange(1, 2), indexing="ij"), -1)
    model = model_of(
        [helper.make_node("ScatterND", ["x", "i", "u"], ["y"])],
        {"x": X, "u": (u := numbers(3, 3, 1))},
        ["y"],
        {"i": where},
    )

    def formula(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        result[:, 1:4, 1:2] = part
        return result

    check(model, {"x": X, "u": u}, formula, tmp_path)
    graph = inspect_onnx(tmp_path / "model.onnx").bind(RULES).graph
    assert {node.op for node in graph.nodes} == {"Slice", "Concat"}


def test_an_index_outside_of_all_rows_is_an_error_of_a_reduction_too(tmp_path: Path) -> None:
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction="max")
    given = {"x": numbers(4, 6), "i": AT([[4]]), "u": numbers(1, 6)}
    with pytest.raises(IndexRangeError, match="is given index 4 for an axis of 4"):
        check(model_of([node], given, ["y"]), given, lambda x, i, u: x, tmp_path, counts=(1,))


@pytest.mark.parametrize("index", [[[0, 6]], [[4, 0]], [[0, -7]]])
def test_an_index_outside_its_axis_is_an_error_even_inside_the_array(index: Any, tmp_path: Path) -> None:
    node = helper.make_node("GatherND", ["x", "i"], ["y"])
    x = numbers(4, 6)
    known = model_of([node], {"x": x}, ["y"], {"i": AT(index)})
    with pytest.raises(ModelError, match="outside axis"):
        check(known, {"x": x}, lambda x: x, tmp_path)
    model = model_of([node], {"x": x, "i": AT(index)}, ["y"])
    worst = max(zip(index[0], x.shape, strict=True), key=lambda pair: abs(pair[0]))
    with pytest.raises(IndexRangeError, match="is given index {} for an axis of {}".format(*worst)):
        check(model, {"x": x, "i": AT(index)}, lambda x, i: x.reshape(-1)[:1] * 0, tmp_path, counts=(1,))


def test_what_is_folded_is_what_runs() -> None:
    for op, arrays, attrs, formula in CASES.values():
        (found,) = fold(OnnxNode("n", op, ("x", "i", "u")[: len(arrays)], ("y",), attrs), arrays)
        np.testing.assert_array_equal(found, formula(*(torch.as_tensor(array) for array in arrays)).numpy())


def test_extremes_of_any_number_of_operands_are_folded() -> None:
    for op, function in (("Max", np.max), ("Min", np.min)):
        for count in (1, 2, 3):
            arrays = list(RANDOM.integers(0, 9, (count, 4)))
            (found,) = fold(OnnxNode("n", op, ("x", "y", "z")[:count], ("out",), {}), arrays)
            np.testing.assert_array_equal(found, function(arrays, axis=0))


@pytest.mark.parametrize(("noop", "wanted"), [(0, 21), (1, [[1, 2, 3], [4, 5, 6]])])
def test_a_folded_reduction_over_no_axes_is_over_all(noop: int, wanted: Any) -> None:
    data, axes = np.arange(1, 7).reshape(2, 3), np.array([], np.int64)
    attrs = {"keepdims": 0, "noop_with_empty_axes": noop}
    (found,) = fold(OnnxNode("n", "ReduceSum", ("x", "axes"), ("y",), attrs), [data, axes])
    np.testing.assert_array_equal(found, wanted)


def test_the_gradient_of_equal_updates_is_scatter_reduces(tmp_path: Path) -> None:
    x, u = np.ones((2, 3)), np.array([[1.0, 1.0, 0.5], [1.0, 0.0, 2.0]])
    given = {"x": x, "u": u}
    for how in ("max", "mul"):
        node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=how)
        index = AT([[0], [0]])
        model = model_of([node], given, ["y"], {"i": index})
        rows = torch.as_tensor(index).expand(-1, 3)
        check(
            model, given, lambda x, u, how=how, rows=rows: reduced(x, rows, u, 0, how), tmp_path, counts=(2,)
        )


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_the_gradient_of_topk_goes_to_what_is_chosen(axis: int, largest: int, tmp_path: Path) -> None:
    x = RANDOM.permutation(12).reshape(3, 4).astype(float)
    node = helper.make_node("TopK", ["x", "k"], ["v", "p"], axis=axis, largest=largest)
    model = model_of([node], {"x": x}, ["v", "p"], {"k": AT([2])})
    check(model, {"x": x}, lambda x: tuple(torch.topk(x, 2, axis, bool(largest))), tmp_path, counts=(2,))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_one_hot_with_values_from_data(axis: int, tmp_path: Path) -> None:
    where, values = AT([[0, 3], [-1, 5]]), numbers(2)
    node = helper.make_node("OneHot", ["i", "d", "v"], ["y"], axis=axis)
    given = {"i": where, "v": values}

    def formula(i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_it = torch.stack([(i == n) | (i == n - 4) for n in range(4)], axis)
        return torch.where(is_it, v[1], v[0])

    check(model_of([node], given, ["y"], {"d": AT(4)}), given, formula, tmp_path, counts=(2,))
