"""The shape of the code: who may import whom, how large things may be, what has to be said.

A package imports itself and what stands before it in ``PACKAGES``, never what stands behind it.
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

import oocdl
from tests.kit.code import PACKAGE, ROOT, functions, imports, modules, own_imports, path_of, room
from tests.kit.each import for_each

PACKAGES = (
    "errors",
    "events",
    "host",
    "graph",
    "ops",
    "augmentation",
    "losses",
    "metrics",
    "optim",
    "transforms",
    "space",
    "config",
    "storage",
    "fusion",
    "engines",
    "planning",
    "runtime",
    "report",
    "testing",
    "pytorch",
    "cluster",
    "data",
    "dashboard",
    "callbacks",
    "training",
    "tuning",
    "presets",
    "cli",
    "__init__",
    "__main__",
)
"""In the order of imports: data flows the other way, from the command line down to bytes."""

INNER = {
    "graph": ("ir", "onnx", "transforms", "partition"),
    "storage": ("files", "checksums", "sealed_store", "zarr_json", "cache", "run", "dataset"),
    "engines": (
        "engine_registry",
        "convolution",
        "engine",
        "checked_indices",
        "numpy_functions",
        "numpy_moves",
        "recurrent_steps",
        "numpy_ctc",
        "numpy_attention",
        "torch",
        "ort",
        "numpy",
    ),
    "planning": ("hosts", "simulation", "choice"),
}
"""The same inside packages that have packages; files of ``planning`` stand below its folders."""

ROOF = {"__init__", "__main__"}
FACE = {"errors", "events", "losses", "metrics", "optim", "space", "testing", "transforms"} | ROOF
"""Modules that may stand at the top: the public face, and what everybody needs."""

ONLY = {
    "host": {"errors"},
    "graph": {"errors"},
    "ops": {"errors", "graph"},
    "augmentation": {"errors", "graph.ir.index"},
    "storage": {"errors", "graph.ir.index", "graph.ir.array_layout"},
    "fusion": {
        "graph",
        "host.limits",
        "host.user_cache",
        "ops.activation",
        "ops.expression",
        "ops.pointwise",
    },
    "cluster": {"errors", "config", "host", "storage.files", "storage.cache.spill_store"},
    "engines": {
        "errors",
        "graph",
        "fusion",
        "ops.activation",
        "ops.expression",
        "ops.pointwise",
        "ops.sequences.recurrent_cells",
    },
    "callbacks": {"errors", "events", "host", "storage"},
    "data": {"errors", "host", "graph.ir.index", "config", "storage", "report"},
}
"""Packages that know less than their place would allow."""

APART = {"engines.torch", "engines.ort", "engines.numpy"}
"""Packages that know nothing of each other: a further engine touches none of them."""

GATES = {
    "onnx": ("graph.onnx.*", "engines.ort.ort_session", "pytorch.annotate", "presets.unets"),
    "onnxruntime": ("engines.ort.ort_session",),
    "llvmlite": ("fusion.jit",),
    "torch": ("engines.torch.*", "pytorch.*"),
    "dask": ("runtime.*", "report.plan_view", "cluster.launch", "tuning.trial_workers"),
    "distributed": (
        "runtime.cluster.*",
        "cluster.launch",
        "cluster.keep",
        "cluster.keys",
        "dashboard.dask_*",
        "tuning.trial_workers",
    ),
    "dask_jobqueue": ("cluster.jobqueue",),
    "cryptography": ("cluster.keys",),
    "zarr": ("storage.*", "training.*", "data.*", "presets.nnunet_folds", "cli.demo", "cli.predict_sample"),
    "h5py": ("storage.dataset.hdf5_source",),
    "rich": ("report.*", "cli.*"),
    "typer": (
        "cli.app",
        "cli.verbs",
        "cli.look",
        "cli.verb_options",
        "cli.cluster",
        "cli.texts",
        "cli.say",
    ),
    "PIL": ("cli.demo",),
    "bokeh": ("dashboard.*",),
    "matplotlib": ("report.figure",),
    "optuna": ("tuning.search_study",),
}
"""The only modules that may import a heavy library, as patterns."""

LATE = {
    "cli.app",
    "cluster.systems",
    "dashboard.dask_plugin",
    "dashboard.page_process",
    "pytorch.door",
    "training.trainer",
    "tuning.search",
}
"""Modules whose functions import what may not be installed, or takes memory that most runs do not need."""

FILE_LINES, FUNCTION_LINES, FOLDER_FILES = 400, 65, 20
LARGEST_SHARE = 0.25
"""Of all lines, what one package may have."""

LIMITS = {
    "lines of oocdl": 70_981,
    "lines of augmentation": 1481,
    "lines of callbacks": 660,
    "lines of cli": 1885,
    "lines of cluster": 1381,
    "lines of config": 798,
    "lines of dashboard": 3505,
    "lines of data": 1442,
    "lines of engines": 6483,
    "lines of fusion": 2560,
    "lines of graph": 10_722,
    "lines of host": 1091,
    "lines of ops": 6146,
    "lines of planning": 8511,
    "lines of presets": 618,
    "lines of pytorch": 3864,
    "lines of report": 2637,
    "lines of runtime": 5369,
    "lines of storage": 6212,
    "lines of training": 3687,
    "lines of tuning": 1314,
    "lines of tests": 49_844,
    "parameters of fit": 21,
    "parameters of plan": 3,
    "parameters of search": 21,
    "parameters of simulate": 9,
    "parameters of from_torch": 6,
    "words of README.md": 653,
    "files that share a name": 0,
    "modules that are imported by a text": 2,
    "uses of locals()": 0,
}
"""Sizes that may only go down; a commit that raises one says why. The test says when one is to be lowered."""
PRIVATE_DASK = re.compile(
    r"dask\._|\b(?:client|_client|scheduler|dask_scheduler|worker|dask_worker|nanny|future|cluster)\._[a-z]"
)
"""Underscored modules of Dask, and underscored attributes of its objects by the names that we give these."""
LIMIT_SLACK = 0.01
"""Share by which a size may be below its limit before the limit has to follow."""


every_module = for_each(modules)
every_folder = for_each(sorted({path.parent for path in PACKAGE.rglob("*.py")}))


def test_every_package_has_its_place() -> None:
    assert {room(name) for name in modules()} == set(PACKAGES)
    assert {path.stem for path in PACKAGE.glob("*.py")} == FACE


def test_the_picture_shows_the_rooms_that_there_are() -> None:
    house = runpy.run_path(str(ROOT / "docs" / "draw_house.py"))
    floors = house["rooms"]()
    assert sorted(name for floor in floors for name in floor) == sorted(PACKAGES)
    below = set(PACKAGES)
    for floor in floors:
        below -= set(floor)
        for name in modules():
            if room(name) in floor:
                assert {room(found) for found in own_imports(name)} <= below | {room(name)}, name
    with Image.open(ROOT / "docs" / "images" / "house.png") as picture:
        assert picture.info["Description"] == house["description"](), "python docs/draw_house.py"


@every_module
def test_imports_point_one_way(name: str) -> None:
    place = PACKAGES.index(room(name))
    wrong = [found for found in own_imports(name) if PACKAGES.index(room(found)) > place]
    assert not wrong, f"oocdl.{name} imports what stands above it: {wrong}"


@pytest.mark.parametrize("outer", INNER)
def test_imports_point_one_way_inside_packages(outer: str) -> None:
    def place(name: str) -> int:
        part = name.split(".")[1]
        return -1 if outer == "planning" and part not in INNER[outer] else INNER[outer].index(part)

    for name in modules():
        if name.startswith(f"{outer}."):
            mine = [found for found in own_imports(name) if found.startswith(f"{outer}.")]
            wrong = [found for found in mine if place(found) > place(name)]
            assert not wrong, f"oocdl.{name} imports what stands above it: {wrong}"


@pytest.mark.parametrize("package", sorted(APART))
def test_engines_know_nothing_of_each_other(package: str) -> None:
    for name in modules():
        if name.startswith(package):
            rest = tuple(f"{other}." for other in APART - {package})
            others = {found for found in own_imports(name) if f"{found}.".startswith(rest)}
            assert not others, f"oocdl.{name} imports another engine: {others}"


@every_folder
def test_folders_can_be_looked_over(folder: Path) -> None:
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= FOLDER_FILES
    assert (folder / "__init__.py").exists()
    if len(files) > 3 and folder != PACKAGE:
        text = (folder / "README.md").read_text()
        missing = [path.name for path in files if f"`{path.name}`" not in text]
        assert not missing, f"{folder.name}/README.md does not tell of {missing}"


def test_no_package_outgrows_the_others() -> None:
    lines = {name: len(path_of(name).read_text().splitlines()) for name in modules()}
    for package in PACKAGES:
        share = sum(count for name, count in lines.items() if room(name) == package) / sum(lines.values())
        assert share < LARGEST_SHARE, f"{package} has {share:.0%} of all lines"


@cache
def sizes() -> dict[str, int]:
    """Everything that ``LIMITS`` limits, as it is now."""
    texts = {name: path_of(name).read_text() for name in modules()}
    lines = Counter[str]()
    for name, text in texts.items():
        lines[room(name)] += len(text.splitlines())
    bases = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    public = {name: getattr(oocdl, name) for name in oocdl.__all__}
    return {
        "lines of oocdl": lines.total(),
        **{f"lines of {name}": count for name, count in lines.items()},
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
        **{
            f"parameters of {name}": len(inspect.signature(found).parameters)
            for name, found in public.items()
            if inspect.isfunction(found)
        },
        "words of README.md": len((ROOT / "README.md").read_text().split()),
        "files that share a name": sum(count for count in bases.values() if count > 1),
        "modules that are imported by a text": sum("import_module(" in text for text in texts.values()),
        "uses of locals()": sum(text.count("locals()") for text in texts.values()),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_large_only_shrinks(name: str) -> None:
    size, limit = sizes()[name], LIMITS[name]
    assert size <= limit, f"{name}: {size}, limit {limit}; make room, or raise it and say why in the commit"
    assert size >= limit * (1 - LIMIT_SLACK) - 1, f"{name}: {size}; lower its limit of {limit}"


def test_private_parts_of_dask_and_zarr_stand_in_one_file_each() -> None:
    texts = {name: path_of(name).read_text() for name in modules()}
    assert {name for name, text in texts.items() if PRIVATE_DASK.search(text)} == {"runtime.dask_private"}
    assert {name for name, text in texts.items() if "zarr.core" in text} == {"storage.dataset.chunk_store"}


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


def test_an_import_of_oocdl_loads_no_library() -> None:
    code = (
        "import sys, oocdl; print({'numpy', 'zarr', 'onnx', 'dask'} & sys.modules.keys(), oocdl.fit.__name__)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "set() fit\n"


@every_module
def test_no_import_hides_in_a_function(name: str) -> None:
    lazy = [
        node.lineno
        for function in functions(modules()[name])
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not lazy or name in LATE
    if name not in ("engines.engine", "host.optional"):  # engines by their names, libraries by theirs
        assert not re.search(r"import_module|__import__", path_of(name).read_text())


@every_module
def test_files_and_functions_are_small(name: str) -> None:
    path = path_of(name)
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


def test_tests_share_helpers_by_the_kit_only() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        taken = re.findall(r"^ *(?:from|import) (tests\.[\w.]+)", path.read_text(), re.MULTILINE)
        own = ("tests.kit", "tests.zoo") if path.parent.name == "zoo" else "tests.kit"
        assert all(name.startswith(own) for name in taken), f"{path} takes from another test: {taken}"
