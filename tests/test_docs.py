"""What the README shows is run, and what it lists is what there is."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import tomllib
import warnings
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import pytest
from PIL import Image
from typer.testing import CliRunner

from oocdl import events
from oocdl.cli.app import app
from oocdl.cli.demo import write_volumes
from oocdl.engines import engine_registry
from oocdl.ops import activation, expression
from tests.kit.code import PACKAGE, ROOT
from tests.kit.each import for_each

README = (ROOT / "README.md").read_text()
RUN = (
    "README.md",
    "docs/how-to/medical-images.md",
    "docs/how-to/losses-and-optimizers.md",
    "docs/how-to/pytorch.md",
    "docs/how-to/onnx.md",
    "docs/how-to/validation.md",
    "docs/how-to/augmentation.md",
    "docs/how-to/search.md",
    "docs/how-to/debugging-a-slow-step.md",
    "docs/reference/events.md",
)
"""Pages whose blocks of Python are run, one after the other; `tests/test_tutorials.py` runs the tutorials."""
QUOTED = ("docs/how-to/adding-an-engine.md", "docs/how-to/adding-an-operator.md")
"""Pages whose blocks of Python are entries of tables."""
TOP = ("oocdl", "tests", "docs", "perf", "examples")
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
PAGES = [*sorted(ROOT.glob("*.md")), *(page for top in TOP for page in sorted((ROOT / top).rglob("*.md")))]
SOURCES = [source for top in TOP for source in sorted((ROOT / top).rglob("*.py"))]
TUTORIALS = ROOT / "docs" / "tutorials"
EVENTS = ROOT / "docs" / "reference" / "events.md"
SHORTER = {
    "epochs=20": "epochs=1",
    "2GiB": "4GiB",
    "trials=27, steps=100, rungs=3": "trials=2, steps=1",
    "size=96": "size=16",
}
"""Stand-ins: the test's process has loaded more than a user's would have."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def brain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small ``brain.zarr``, as the current one."""
    write_volumes(tmp_path / "brain.zarr", samples=2, size=16, seed=0)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_one_after_the_other(brain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    shown = [(page, block) for page in RUN for block in blocks("python", page)]
    for page, block in shown:
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own, on its future
            exec(compile(block, page, "exec"), names)
    assert (brain / "trained.onnx").is_file() and (brain / "out.zarr").is_dir()
    assert (brain / "losses.csv").read_text().count("\n") == 2
    assert "tasks a step" in capsys.readouterr().out


def test_every_block_of_python_is_run() -> None:
    others = [named(page) for page in (ROOT / "docs").rglob("*.md") if page.parent != TUTORIALS]
    pages = {"README.md", *others}
    assert {page for page in pages if blocks("python", page)} == {*RUN, *QUOTED}
    (entry,) = eval(f"{{{blocks('python', QUOTED[0])[0]}}}", vars(engine_registry)).values()
    assert "mine" in entry.install
    (elu,) = eval(f"[{blocks('python', QUOTED[1])[0]}]", {**vars(activation), **vars(expression)})
    assert elu.op == "Elu"


def test_the_example_is_short() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line]
    assert len(lines) <= 12


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    (command,) = re.findall(r"python (-m pytest.*)$", blocks("sh")[1], re.MULTILINE)
    assert f'"$bin/python" {command} ' in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_commands_parse_and_files_are_there() -> None:
    pages = [README, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    for line in [line for page in pages for line in re.findall(r"`(oocdl [a-z]+[^`]*)`", page)]:
        _, verb, *rest = shlex.split(line)
        shown = CliRunner().invoke(app, [verb, "--help"])
        assert shown.exit_code == 0, line
        assert not [word for word in rest if word.startswith("--") and word not in shown.output]


@for_each(PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^):#]+)[^):]*\)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_every_yes_of_the_comparison_is_shown_by_a_test() -> None:
    page = ROOT / "docs" / "explanation" / "compared.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if re.match(r"\| \S", line)][1:]
    rows = [row for row in rows if row[1]]
    assert len(rows) == 38
    for feature, verdict, shown, *others in rows:
        assert all(cell.startswith(("yes", "part", "no")) for cell in (verdict, *others)), feature
        test = re.fullmatch(r"\[`(test_\w+)`\]\((.*\.py)\)", shown)
        if test is None:
            assert verdict.startswith("no") or re.fullmatch(r"\w+-(PREDICT|METRIC|CROP)", shown), feature
        else:
            assert f"\ndef {test[1]}(" in (page.parent / test[2]).read_text(), feature


@for_each([*PAGES, *SOURCES])
def test_files_that_are_named_are_there(text: Path) -> None:
    content = text.read_text()
    saved = re.findall(r"^Save this as `(.*)`:$", content, re.MULTILINE)
    names = {*re.findall(r"`([\w./*-]+)`", content)} - {*saved}
    assert not [name for name in names if is_path(name) and not found(name, text.parent)]


@for_each([*PAGES, *SOURCES])
def test_modules_that_are_named_are_there(text: Path) -> None:
    for name in re.findall(r"`(oocdl(?:\.\w+)+)`", text.read_text()):
        resolve_name(name)


def is_path(name: str) -> bool:
    """Whether something between backticks claims to be a file or a folder of this repository."""
    first, slash, _ = name.partition("/")
    return name.endswith((".py", ".md")) or bool(slash and (first in ROOMS or first in TOP))


def found(name: str, beside: Path) -> bool:
    """Paths start at the root, in ``oocdl/`` or beside the text; a name alone may be that of any file."""
    if "/" not in name and any(path.name == name for path in (*PAGES, *SOURCES)):
        return True
    return any(list(base.glob(path)) for base in (ROOT, PACKAGE, beside) for path in (name, f"{name}.py"))


@pytest.mark.parametrize("name", ["step", "networks"])
def test_pictures_show_the_figures_that_were_measured(name: str) -> None:
    benchmarks = runpy.run_path(str(ROOT / "docs" / "draw_benchmarks.py"))
    with Image.open(ROOT / "docs" / "images" / f"{name}.png") as picture:
        assert picture.info["Description"] == benchmarks["table"](name), "python docs/draw_benchmarks.py"


def test_every_event_is_described_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|(.*)\|$", EVENTS.read_text(), re.MULTILINE)
    kinds = {*get_args(events.Event), *get_args(events.SearchEvent)}
    assert {name for name, _ in rows} == {kind.__name__ for kind in kinds}
    for name, text in rows:
        for field in fields(getattr(events, name)):
            assert f"`{field.name}`" in text, f"{name}.{field.name}"


def test_the_project_says_what_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = "torch cluster mri dicom s3 search plot pandas mlflow surface docs test dev"
    assert set(project["optional-dependencies"]) == set(extras.split())
    assert sum(line.startswith("onnxruntime") for line in project["dependencies"]) == 2
    assert project["license"] == "Apache-2.0"
