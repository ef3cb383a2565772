"""Lets pages link to files outside `docs/`, and shows some of these files as pages.

A link to a file that has a page leads to that page; a link to any other file outside `docs/` downloads it.
The help of each command stands where a page has the line ``<!-- help of all commands -->``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from typer.testing import CliRunner

from oocdl.cli.app import app as command_line
from oocdl.cli.app import descriptions

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
SHOWN = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "explanation/measurements": "perf/README.md",
    "explanation/what-was-tried": "perf/NOTES.md",
}
"""Pages that show the text of a file outside `docs/`; in the repository each has a line that links to it."""
HELP_MARK = "<!-- help of all commands -->"
LINK = re.compile(r"\]\(([^):#\s]+)(#[^)]*)?\)")
WIDTH = 100


def linked(text: str, home: Path, page: Path) -> str:
    """Return a text of the folder ``home`` with its links as ``page`` has to have them."""
    pages = {ROOT / name: DOCS / f"{docname}.md" for docname, name in SHOWN.items()}

    def link(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(home / match[1]))
        target = pages.get(target, DOCS / "index.md" if target == ROOT / "README.md" else target)
        outside = DOCS not in target.parents and target.suffix != ".png"
        return f"]({'path:' * outside}{os.path.relpath(target, page.parent)}{match[2] or ''})"

    return LINK.sub(link, text)


def help_of_all() -> str:
    """Return the help of each command as a section of Markdown."""
    runner = CliRunner(env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)})
    sections = []
    for verb in descriptions():
        shown = runner.invoke(command_line, [verb, "--help"], prog_name="oocdl")
        sections.append(f"## oocdl {verb}\n\n```text\n{shown.output.strip()}\n```\n")
    return "\n".join(sections)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the text of a page together when Sphinx reads it."""
    page = DOCS / f"{docname}.md"
    if docname in SHOWN:
        file = ROOT / SHOWN[docname]
        app.env.note_dependency(os.fspath(file))
        source[0] = linked(file.read_text(), file.parent, page)
    else:
        source[0] = linked(source[0], page.parent, page)
    if HELP_MARK in source[0]:
        source[0] = source[0].replace(HELP_MARK, help_of_all())


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
