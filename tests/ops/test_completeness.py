"""Every operator is complete, and is told apart by its facts, not by its name."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.ir.speed import Scale, Streaming
from oocdl.ops.registry import RULES
from oocdl.planning.cost_model import BFLOAT16_SUFFIX, NOMINAL
from tests.kit.code import imports, modules, own_imports, room
from tests.kit.each import for_each


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_operator_is_complete(op: str) -> None:
    rule = RULES[op]
    assert rule.op == op
    assert callable(rule.infer) and callable(rule.gradient) and callable(rule.flops)
    assert (rule.axes is None) != (rule.expand is None), "exactly one of axes and expand"


@pytest.mark.parametrize("op", sorted(RULES))
def test_what_runs_has_a_speed_and_scratch_space(op: str) -> None:
    rule = RULES[op]
    assert callable(rule.scratch_elements), "it has no default: what is not reserved breaks the budget"
    assert (rule.speed is None) == (rule.axes is None), "exactly what is cut runs, and has a speed"
    if rule.speed is None:
        return
    like = RULES[rule.speed.like].speed
    assert isinstance(like, Streaming) and like.bytes_per_second, "what it is like has a rate of its own"
    assert like.like == rule.speed.like, "what others are like is like itself"
    if isinstance(rule.speed, Streaming):
        probes = list(rule.speed.probes((1, 16, 16, 8, 8)))
    else:
        made = list(rule.speed.probes(Scale(0.01, thin_slab_elements=THIN_SLAB_ELEMENTS)))
        probes = [probe for _, _, probe in made]
        kinds = {kind for kind, _, _ in made}
        both = kinds | {kind + BFLOAT16_SUFFIX for kind in kinds if rule.product}
        assert both <= NOMINAL.arithmetic.keys(), "kinds have nominal rates"
    assert probes and {probe.op for probe in probes} == {op}
    assert rule.speed.like in NOMINAL.memory and 0 < NOMINAL.bytes_per_second(op, RULES) < float("inf")


def test_engines_know_convolutions_as_rules_do() -> None:
    kernels = importlib.import_module("oocdl.engines.torch.torch_kernels").KERNELS
    known = {op: kernel.convolution for op, kernel in kernels.items() if kernel.convolution}
    products = {op: rule.product for op, rule in RULES.items() if rule.product}
    data = {op: product.data for op, product in products.items() if product.data}
    assert {op: convolution.data for op, convolution in known.items()} == data
    for op, convolution in known.items():
        assert convolution.makes_weights != products[op].makes_data


NAME_OPERATORS = {
    "graph.transforms.canonicalize": "merges Reshapes, drops Identities and products with one",
    "graph.transforms.factorize": "turns Reshapes into factors",
    "graph.partition.wiring": "looks through the Casts that ``transforms.bfloat16`` writes",
    "planning.probes": "puts a Neg behind what it measures",
    "engines.torch.split_concat": "takes Concats apart, and Slices together with what they are parts of",
}
"""Modules that name operators, because they rewrite those very ones. Whatever holds for a class of them
is a field of ``OpRule``, or of an engine's ``Kernel``. Readers and writers of ONNX, whose names these are,
and tables of kernels are apart."""


def named(tree: ast.AST) -> Iterator[tuple[int, object]]:
    """Line and text of strings that are compared, listed, mapped from, or given a name."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            found = [*node.elts]
        elif isinstance(node, ast.Dict):
            found = [*node.keys]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.MatchValue):
            found = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = [*node.args] if node.func.attr in ("startswith", "endswith", "get") else []
        yield from ((item.lineno, item.value) for item in found if isinstance(item, ast.Constant))


def names_operators(name: str) -> bool:
    return (
        room(name) in ("ops", "fusion", "pytorch") or name == "cli.zoo" or "onnx" in name or has_kernels(name)
    )


def has_kernels(name: str) -> bool:
    """Whether a module of an engine has a table of kernels, or writes ONNX."""
    tables = {ast.unparse(node.target) for node in modules()[name].body if isinstance(node, ast.AnnAssign)}
    has_table = not {"KERNELS", "FUNCTIONS"}.isdisjoint(tables)
    return room(name) == "engines" and (has_table or "onnx" in imports(modules()[name]))


@for_each(lambda: [name for name in modules() if not names_operators(name)])
def test_no_operator_is_told_apart_by_its_name(name: str) -> None:
    wrong = [(line, text) for line, text in named(modules()[name]) if text in RULES]
    if name in NAME_OPERATORS:
        assert wrong, f"oocdl.{name} names no operator any more: take it from the list"
    else:
        assert not wrong, f"oocdl.{name} tells operators apart by name; make it a field of OpRule: {wrong}"


def test_every_operator_file_is_registered() -> None:
    for name, tree in modules().items():
        made = [ast.unparse(node) for node in tree.body if isinstance(node, ast.AnnAssign | ast.Assign)]
        makes = any("RULES" in text.split("=")[0] for text in made)
        if room(name) == "ops" and makes and name != "ops.registry":
            assert name in own_imports("ops.registry"), f"oocdl.{name} is not in the registry"
