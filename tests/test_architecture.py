"""The shape of the code: who may import whom, how large things may be, what has to be said.

The table of rooms is the design's, from the ground up. A module imports its own room and
rooms above it in this list (below it in the building), never the other way.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from oocdl.graph.ir import operands
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.ir.speed import Scale, Streaming
from oocdl.ops.registry import RULES
from oocdl.planning.nominal import NOMINAL

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "oocdl"

ROOMS = (
    "errors",
    "events",
    "machine",
    "heap",
    "graph",
    "ops",
    "losses",
    "optim",
    "config",
    "storage",
    "engines",
    "probes",
    "calibrate",
    "zoo",
    "bind",
    "sources",
    "schedule",
    "timeline",
    "printer",
    "trace",
    "report",
    "picture",
    "execute",
    "recipe",
    "compile",
    "simulate",
    "planning",
    "passes",
    "testing",
    "weights",
    "session",
    "preview",
    "disk",
    "cluster",
    "run",
    "progress",
    "resume",
    "train",
    "demo",
    "info",
    "cli",
    "__init__",
)

ONLY = {
    "storage": {"errors", "graph.axes", "graph.memory"},
    "graph": {"errors"},
    "ops": {"errors", "graph"},
    "engines": {"errors", "graph"},
    "zoo": {"errors"},
    "schedule": set(),
    "printer": {"errors", "graph"},
    "progress": {"events"},
}
"""Rooms that know less than their place would allow."""

GATES = {
    "onnx": ("graph.*onnx*", "engines.onnx*", "zoo"),
    "onnxruntime": ("engines.onnx_session",),
    "llvmlite": ("engines.fused_compile",),
    "torch": ("engines.torch*",),
    "dask": ("execute", "schedule", "preview", "session", "cluster", "testing"),
    "distributed": ("cluster",),
    "zarr": ("storage.*", "run", "train", "demo"),
    "h5py": ("storage.hdf5_source",),
    "rich": ("report", "planning", "preview", "progress", "info", "demo", "cli"),
    "typer": ("cli",),
    "PIL": ("demo",),
    "matplotlib": ("picture",),
}
"""The only modules that may import a heavy library, as patterns."""

FILE_LINES, FUNCTION_LINES = 400, 65


@cache
def modules() -> dict[str, ast.Module]:
    """Module name without the package -> its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules; of ``from oocdl import x`` both could be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules_inside = [name for name in inner if name.removeprefix("oocdl.") in modules()]
            # A package's own docstring module is no dependency if only modules inside it are taken.
            yield from modules_inside
            if len(modules_inside) < len(inner):
                yield str(node.module)


def own_imports(name: str) -> set[str]:
    """Modules of this package that a module imports, without the package's name."""
    return {
        found.removeprefix("oocdl.") if found != "oocdl" else "__init__"
        for found in imports(modules()[name])
        if found.split(".")[0] == "oocdl"
    }


def room(name: str) -> str:
    return name.split(".")[0]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


every_module = pytest.mark.parametrize("name", list(modules()))


def test_every_room_has_its_place() -> None:
    assert {room(name) for name in modules()} == set(ROOMS)


@every_module
def test_imports_point_one_way(name: str) -> None:
    place = ROOMS.index(room(name))
    wrong = [found for found in own_imports(name) if ROOMS.index(room(found)) > place]
    assert not wrong, f"oocdl.{name} imports what stands above it: {wrong}"


@every_module
def test_rooms_that_know_little_stay_so(name: str) -> None:
    allowed = ONLY.get(room(name))
    if allowed is not None:
        others = {found for found in own_imports(name) if room(found) != room(name)}
        assert not {found for found in others if found not in allowed and room(found) not in allowed}


def test_no_cycles() -> None:
    left = {name: own_imports(name) - {name} for name in modules()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


@every_module
def test_heavy_libraries_come_in_through_their_gates(name: str) -> None:
    taken = {found.split(".")[0] for found in imports(modules()[name])}
    wrong = [
        library for library, gates in GATES.items()
        if library in taken and not any(fnmatchcase(name, gate) for gate in gates)
    ]  # fmt: skip
    assert not wrong, f"oocdl.{name} is no gate to {wrong}"


@every_module
def test_no_import_hides_in_a_function(name: str) -> None:
    lazy = [
        node.lineno
        for function in functions(modules()[name])
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not lazy
    if name not in ("engines.engine", "picture", "train"):  # gates to what may not be installed, or needed
        assert not re.search(r"import_module|__import__", ast.unparse(modules()[name]))


@every_module
def test_files_and_functions_are_small(name: str) -> None:
    parts = PACKAGE.joinpath(*name.split("."))
    path = parts / "__init__.py" if parts.is_dir() else parts.with_suffix(".py")
    assert len(path.read_text().splitlines()) <= FILE_LINES
    for function in functions(modules()[name]):
        assert function.end_lineno is not None
        lines = function.end_lineno - function.lineno + 1 - docstring_lines(function)
        assert lines <= FUNCTION_LINES, f"{function.name} has {lines} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a docstring: saying more costs nothing."""
    first = node.body[0]
    if ast.get_docstring(node) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


@every_module
def test_what_is_public_is_documented(name: str) -> None:
    tree = modules()[name]
    assert ast.get_docstring(tree), f"oocdl.{name} has no docstring"
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing


@every_module
def test_no_error_is_swallowed(name: str) -> None:
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: which errors?"
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            assert not (broad and all(isinstance(line, ast.Pass) for line in node.body)), node.lineno


def test_nothing_is_left_for_later() -> None:
    marks = re.compile("TO" + "DO|FIX" + r"ME|X" + r"XX\b")
    for folder in ("oocdl", "tests", "examples", "perf"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not marks.search(path.read_text()), path


def test_inner_packages_only_have_a_docstring_or_their_table() -> None:
    for path in PACKAGE.rglob("*/__init__.py"):
        body = ast.parse(path.read_text()).body[1:]
        assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in body), path


@pytest.mark.parametrize("op", sorted(RULES))
def test_every_operator_is_complete(op: str) -> None:
    rule = RULES[op]
    assert rule.op == op
    assert callable(rule.infer) and callable(rule.gradient) and callable(rule.flops)
    assert (rule.axes is None) != (rule.expand is None), "exactly one of axes and expand"


@pytest.mark.parametrize("op", sorted(RULES))
def test_what_runs_has_a_speed_and_scratch_space(op: str) -> None:
    rule = RULES[op]
    assert callable(rule.workspace), "it has no default: what is not reserved breaks the budget"
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
        assert {kind for kind, _, _ in made} == set(rule.speed.points)
        assert set(rule.speed.bfloat16_points) == (set(rule.speed.points) if rule.product else set())
    assert probes and {probe.op for probe in probes} == {op}
    assert 0 < NOMINAL.bytes_per_second(op, RULES) < float("inf")


def test_engines_sort_the_data_of_convolutions() -> None:
    products = {op: rule.product for op, rule in RULES.items() if rule.product}
    assert {op: product.data for op, product in products.items() if product.data} == operands.DATA


NAME_OPERATORS = {
    "graph.expand": "merges Reshapes, drops Identities and products with one, reads through Expands",
    "graph.factorize": "turns Reshapes into factors",
    "graph.traffic": "looks through the Casts that ``rounded`` writes",
    "probes": "puts a Neg behind what it measures",
}
"""Modules that name operators, because they rewrite those very ones. Whatever holds for a class of them
is a field of ``OpRule``. Readers and writers of ONNX, whose names these are, and engines are apart."""


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
    return room(name) in ("ops", "engines", "zoo") or "onnx" in name


@pytest.mark.parametrize("name", [name for name in modules() if not names_operators(name)])
def test_no_operator_is_told_apart_by_its_name(name: str) -> None:
    wrong = [(line, text) for line, text in named(modules()[name]) if text in RULES]
    if name in NAME_OPERATORS:
        assert wrong, f"oocdl.{name} names no operator any more: take it from the list"
    else:
        assert not wrong, f"oocdl.{name} tells operators apart by name; make it a field of OpRule: {wrong}"


def test_every_operator_file_is_registered() -> None:
    for name, tree in modules().items():
        makes = any(
            isinstance(node, ast.AnnAssign | ast.Assign) and "RULES" in ast.unparse(node).split("=")[0]
            for node in tree.body
        )
        if room(name) == "ops" and makes and name != "ops.registry":
            assert name in own_imports("ops.registry"), f"oocdl.{name} is not in the registry"
