"""Every operator: value, gradient, axis rule and cost, against PyTorch and brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from oocdl.errors import ModelError, UnsupportedError
from oocdl.graph.ir.graph import Node, Role
from oocdl.graph.ir.index import AxisRule, clip, pieces
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.differentiate import differentiate
from oocdl.ops import RULES
from oocdl.ops._broadcast import is_float, size
from tests.kit.interpret import OPS, evaluate, run
from tests.kit.op_cases import CASES, DIFFERENTIABLE, RESAMPLE, Case, params


def test_every_operator_has_a_case_and_an_oracle() -> None:
    assert {case.op for case in CASES} == set(RULES) == set(OPS)
    assert all(op == rule.op for op, rule in RULES.items())


def test_only_poolings_are_filled_with_minus_infinity() -> None:
    assert {op for op, rule in RULES.items() if rule.fill} == {"MaxPool", "MaxPoolGrad"}


def weighted_loss(build: Builder, outputs: tuple[str, ...]) -> tuple[str, dict[str, np.ndarray]]:
    """A scalar that weighs every output element differently."""
    random, weights, total = np.random.default_rng(1), {}, None
    for place, name in enumerate(outputs):
        shape = build.shape(name)
        weights[f"w{place}"] = random.normal(size=shape).astype(build.dtype(name))
        weight = build.value(f"w{place}", shape, build.dtype(name), Role.INPUT)
        part = build("Mul", name, weight)
        if shape:
            part = build("ReduceSum", part, axes=tuple(range(len(shape))))
            part = build("Reshape", part, shape=())
        total = part if total is None else build("Add", total, part)
    assert total is not None
    return total, weights


@pytest.mark.parametrize("case", params(DIFFERENTIABLE))
def test_gradient_is_autograds(case: Case) -> None:
    arrays = case.arrays()
    build, inputs, outputs = case.node(arrays)
    if case.op == "Normalize":  # it has the gradient of the whole norm
        build, arrays = Builder(RULES), arrays[:1]
        inputs = (build.value("x0", arrays[0].shape, "float64", Role.INPUT),)
        moments = build.node("Moments", inputs, {"axes": case.attrs["axes"]})
        outputs = build.node("Normalize", (*inputs, *moments), case.attrs)
    kinds = [is_float(array.dtype.name) for array in arrays]
    wanted = [place for place, floats in enumerate(kinds) if floats and place not in case.constant]
    if case.op == "Dropout":
        wanted = [0]
    if not wanted or not is_float(build.dtype(outputs[0])):
        return
    loss, weights = weighted_loss(build, tuple(outputs[place] for place in case.read) or outputs)
    grads = differentiate(build, loss, [inputs[place] for place in wanted])
    build.outputs = [*outputs, loss, *grads.values()]
    places = [place for place in range(len(arrays)) if place not in case.constant]
    tensors = {inputs[p]: torch.tensor(arrays[p], requires_grad=p in wanted) for p in places}
    truth = evaluate(build.graph(), {**tensors, **weights})
    expected = torch.autograd.grad(truth[loss], [tensors[inputs[p]] for p in wanted], allow_unused=True)
    for graph in (build.graph(), canonicalize(build.graph(), RULES)):
        names = dict(zip(grads, graph.outputs[len(outputs) + 1 :], strict=True))
        with torch.no_grad():
            found = evaluate(graph, {**tensors, **weights})
        for tensor, place in zip(expected, wanted, strict=True):
            tensor = torch.zeros_like(tensors[inputs[place]]) if tensor is None else tensor
            name = names.get(inputs[place])
            if name is None:  # a constant piece by piece, such as Floor
                assert not tensor.any()
                continue
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, check_dtype=True)


def _letter(index: Any) -> str:
    return getattr(index, "letter", "")


def random_ranges(rule: AxisRule, random: np.random.Generator) -> dict[str, tuple[int, int]]:
    """A random part of every letter that may be cut; all of the others."""
    found = {}
    for letter, extent in rule.extents.items():
        start = int(random.integers(extent))
        stop = int(random.integers(start, extent)) + 1
        whole = letter in rule.uncut or all(letter != _letter(axis) for axes in rule.outputs for axis in axes)
        found[letter] = (0, extent) if whole else (start, stop)
    return found


@pytest.mark.parametrize("case", params([case for case in CASES if RULES[case.op].axes]))
def test_only_the_needed_region_is_read(case: Case) -> None:
    """Noise outside the regions that the rule asks for changes nothing in the output region."""
    random = np.random.default_rng(7)
    arrays = case.arrays()
    build, inputs, outputs = case.node(arrays)
    shapes = [array.shape for array in arrays]
    node, derive = build.nodes[0], RULES[case.op].axes
    assert derive is not None
    rule = derive(node, shapes, [build.shape(name) for name in outputs])
    for indices, name in zip((*rule.inputs, *rule.outputs), (*inputs, *outputs), strict=True):
        assert len(indices) == len(build.shape(name))
        for index, extent in zip(indices, build.shape(name), strict=True):
            assert index is not None or extent == 1
    before = run(node, [torch.as_tensor(array) for array in arrays])
    for _ in range(12):
        ranges = random_ranges(rule, random)
        noisy = []
        for array, indices in zip(arrays, rule.inputs, strict=True):
            needed = []
            for index, extent in zip(indices, array.shape, strict=True):
                letter = getattr(index, "letter", "")
                wanted = (0, extent) if index is None else index.needs(ranges.get(letter, (0, extent)))
                needed.append(slice(*clip(wanted, extent)))
            other = random.permutation(array.reshape(-1)).reshape(array.shape)
            if array.dtype == np.float64:
                other = np.asarray(other + 3.0 * random.normal(size=array.shape))
                other = np.asarray(np.abs(other) + 0.1) if (array > 0).all() else other
            other[tuple(needed)] = array[tuple(needed)]
            noisy.append(other)
        after = run(node, [torch.as_tensor(array) for array in noisy])
        for first, second, indices in zip(before, after, rule.outputs, strict=True):
            if {k for k, part in ranges.items() if part != (0, rule.extents[k])} - set(map(_letter, indices)):
                continue  # a partial sum
            region = tuple(slice(*ranges[i.letter]) if i else slice(None) for i in indices)
            torch.testing.assert_close(first[region], second[region], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", params([case for case in CASES if RULES[case.op].axes]))
def test_an_operation_an_element_at_least_unless_elements_only_move(case: Case) -> None:
    build, inputs, outputs = case.node(case.arrays())
    shapes = [build.shape(name) for name in inputs], [build.shape(name) for name in outputs]
    rule = RULES[case.op]
    flops, scratch = rule.flops(build.nodes[0], *shapes), rule.scratch_elements(build.nodes[0], *shapes)
    if rule.moves_only or case.op in ("Pad", "Gather"):
        assert flops == 0
        assert scratch == 0 or case.op == "Gather", "ids of narrow rows count"
    else:
        assert flops >= min(max(map(size, side)) for side in shapes)


@pytest.mark.parametrize("case", params([case for case in CASES if RULES[case.op].moves_only]))
def test_what_only_moves_elements_is_the_same_before_and_after_rounding(case: Case) -> None:
    build, _, _ = case.node(case.arrays())
    tensors = [torch.as_tensor(array) for array in case.arrays()]
    before = run(build.nodes[0], [tensor.bfloat16() for tensor in tensors])
    after = [result.bfloat16() for result in run(build.nodes[0], tensors)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _keeps_axes(case: Case) -> bool:
    rule = RULES[case.op]
    return rule.product is None and rule.keeps_axes and rule.axes is not None


@pytest.mark.parametrize("case", params([case for case in CASES if _keeps_axes(case)]))
def test_axes_are_where_the_rule_says(case: Case) -> None:
    """``keeps_axes``: an axis of an operand that the result has, too, is as far from the last one there."""
    rule = RULES[case.op]
    assert rule.axes is not None
    build, inputs, outputs = case.node(case.arrays())
    found = rule.axes(build.nodes[0], *([build.shape(name) for name in names] for names in (inputs, outputs)))
    for out in found.outputs:
        places = {getattr(index, "letter", None): place - len(out) for place, index in enumerate(out)}
        for operand in found.inputs:
            for place, index in enumerate(operand):
                letter = getattr(index, "letter", None)
                assert letter is None or places.get(letter, place - len(operand)) == place - len(operand)


def test_flops_of_contractions_are_exact() -> None:
    def flops(case: Case) -> int:
        build, inputs, outputs = case.node(case.arrays())
        shapes = [build.shape(name) for name in inputs], [build.shape(name) for name in outputs]
        return RULES[case.op].flops(build.nodes[0], *shapes)

    window = {"strides": (1,), "pads": (1, 1), "dilations": (1,)}
    assert flops(Case("Einsum", ((3, 4), (4, 5)), {"equation": "ab,bc->ac"})) == 2 * 3 * 4 * 5
    assert flops(Case("Conv", ((2, 3, 8), (5, 3, 3)), window)) == 2 * 2 * 5 * 8 * 3 * 3
    transposed = Case("ConvTranspose", ((2, 5, 8), (5, 3, 3)), {**window, "spatial": (8,)})
    weight = Case("ConvWeightGrad", ((2, 3, 8), (2, 5, 8)), {**window, "kernel_shape": (3,)})
    assert flops(transposed) == flops(weight) == 2 * 2 * 5 * 8 * 3 * 3


@pytest.mark.parametrize("case", params(RESAMPLE))
def test_resample_gives_the_taps_of_a_piece(case: Case) -> None:
    (x,) = case.arrays()
    build, _, (name,) = case.node([x])
    rule, node, axis = RULES["Resample"], build.nodes[0], case.attrs["axis"]
    assert rule.axes is not None and rule.localize is not None
    shape = build.shape(name)
    band = rule.axes(node, [x.shape], [shape]).inputs[0][axis]
    assert band is not None
    whole = np.moveaxis(run(node, [torch.as_tensor(x)])[0].numpy(), axis, -1)
    for out in pieces(shape[axis], min(3, shape[axis])):
        held = band.needs(out)
        regions = [tuple((0, n) for n in s) for s in (shape, x.shape)]
        regions = [(*r[:axis], part, *r[axis + 1 :]) for r, part in zip(regions, (out, held), strict=True)]
        taps = rule.localize(node, regions[0], regions[1:], [x.shape])
        seen = np.moveaxis(x, axis, -1)[..., slice(*held)]
        local = sum(seen[..., c] * w for c, w in zip(taps["columns"], taps["weights"], strict=True))
        np.testing.assert_allclose(local, whole[..., slice(*out)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "attrs",
    [
        {"mode": "linear", "coordinates": "half_pixel", "antialias": True},
        {"mode": "cubic", "coordinates": "align_corners"},
        {"mode": "average", "window": (2, 2, 1, 0, 0)},
    ],
    ids=lambda attrs: attrs["mode"],
)
def test_a_piece_of_a_long_line_has_few_taps(attrs: dict[str, Any], transposed: bool) -> None:
    extents = (1, 2, 8000), (1, 2, 16000)
    shape, out = extents if transposed else extents[::-1]
    attrs = {**attrs, "axis": 2, "size": out[2], "transposed": transposed}
    regions = [tuple((0, n) for n in s) for s in (out, shape)]
    localize = RULES["Resample"].localize
    assert localize is not None
    taps = localize(Node("", "Resample", ("x",), ("y",), attrs), regions[0], regions[1:], [shape])
    assert sum(np.asarray(value).nbytes for value in taps.values()) < 50 * out[2]


def test_a_second_derivative_is_refused() -> None:
    build = Builder(RULES)
    x = build.value("x", (3,), "float64", Role.INPUT)
    loss = build("Reshape", build("ReduceSum", build("ReluGrad", x, x), axes=(0,)), shape=())
    with pytest.raises(UnsupportedError, match="ReluGrad"):
        differentiate(build, loss, [x])


def test_a_gradient_of_what_is_kept_for_the_gradient_is_refused() -> None:
    build = Builder(RULES)
    attrs = {"reverse": False, "activations": ("Sigmoid", "Tanh", "Tanh")}
    shapes = [(2, 1, 8), (8, 2), (1, 1, 2), (1, 1, 2)]
    values = [build.value(f"x{n}", shape, "float32", Role.INPUT) for n, shape in enumerate(shapes)]
    made = build.node("LstmSteps", values, attrs)
    loss = build("Reshape", build("ReduceSum", made[1], axes=(0, 1, 2)), shape=())
    with pytest.raises(UnsupportedError, match="keeps for its gradient"):
        differentiate(build, loss, values[:1])


@pytest.mark.parametrize("wrong", ["others'", "of other axes", "given"])
def test_a_gradient_of_a_norm_by_other_moments_is_refused(wrong: str) -> None:
    build = Builder(RULES)
    x, y = (build.value(name, (3, 3), "float64", Role.INPUT) for name in "xy")
    given = [build.value(name, (1, 3), "float64", Role.INPUT) for name in ("mean", "var")]
    attrs = {"axes": (0,), "eps": 0.1}
    moments = given if wrong == "given" else build.node("Moments", [y if "others" in wrong else x], attrs)
    if wrong == "of other axes":
        x = build("Transpose", x, perm=(1, 0))
    made = build("Normalize", x, *moments, **attrs)
    loss = build("Reshape", build("ReduceSum", made, axes=(0, 1)), shape=())
    with pytest.raises(ModelError, match="'normalize' .Normalize.*moments of its own operand"):
        differentiate(build, loss, ["x"])


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "why"),
    [
        ("Add", ((2,), (3,)), {}, "broadcast"),
        ("Add", ((2,),), {}, "takes 2"),
        ("Add", ((2,), ("ids", (2,), 3)), {}, "dtypes"),
        ("Conv", ((1, 2, 5), (1, 3, 3)), {"strides": (1,), "pads": (0, 0), "dilations": (1,)}, "channels"),
        ("Conv", ((1, 2, 2), (1, 2, 3)), {"strides": (1,), "pads": (0, 0), "dilations": (1,)}, "fit"),
        ("Einsum", ((2, 3), (4, 5)), {"equation": "ab,bc->ac"}, "extents 3 and 4"),
        ("Einsum", ((2, 3), (3, 3)), {"equation": "ab,bb->a"}, "repeats"),
        ("Reshape", ((2, 3),), {"shape": (4,)}, "reshaped"),
        ("ReduceSum", ((2, 3),), {"axes": (-1,)}, "axes"),
        ("Slice", ((4,),), {"axis": 0, "start": 3, "stop": 3, "step": 1}, "non-empty"),
    ],
)
def test_wrong_nodes_are_refused_by_name(op: str, operands: tuple, attrs: dict, why: str) -> None:
    case = Case(op, operands, attrs)
    with pytest.raises(ModelError, match=why) as caught:
        case.node(case.arrays())
    assert op.lower() in str(caught.value)
