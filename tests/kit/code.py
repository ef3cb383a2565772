"""The sources of the package as syntax trees, for tests of their shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "oocdl"


@cache
def modules() -> dict[str, ast.Module]:
    """Module name without the package -> its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    # What is loaded on first use stands in the stub.
    found["__init__"].body += ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of imported modules; of ``from oocdl import x`` both could be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or tree is modules()["__init__"], "imports are absolute"
            module = ".".join(filter(None, ("oocdl" if node.level else "", node.module)))
            inner = [f"{module}.{alias.name}" for alias in node.names]
            modules_inside = [name for name in inner if name.removeprefix("oocdl.") in modules()]
            # A package's own docstring module is no dependency if only modules inside it are taken.
            yield from modules_inside
            if len(modules_inside) < len(inner):
                yield module


@cache
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


def path_of(name: str) -> Path:
    """The file of a module."""
    parts = PACKAGE.joinpath(*name.split("."))
    return parts / "__init__.py" if parts.is_dir() else parts.with_suffix(".py")
