"""Reads the files of a run that hold their own digest: settings, plan, report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oocdl.errors import CorruptError
from oocdl.storage.checksums import digest_of, unsealed
from oocdl.storage.files import read_text

COPY = "run-copy.json"  # the same as ``run.json``, which never changes, in case that is damaged
SAMPLES = "samples.json"  # what samples are normalised and transformed by: a run that does neither has none
SEALED_FILES = {
    "run.json": "run", COPY: "run", "plan.json": "plan", "report.json": "report", SAMPLES: "samples"
}  # fmt: skip
"""File name -> kind that ``sealed`` was given for it."""

MISREAD = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""Exceptions that bad data raise where they are used."""


@contextmanager
def understood(root: Path) -> Iterator[None]:
    """Turn what facts of a run raise that are none, though sound, into CorruptError."""
    try:
        yield
    except MISREAD as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CorruptError(
            f"the run in {root} has facts that this version of oocdl cannot read ({reason}); open it with "
            "the version that wrote it, or restore it"
        ) from error


def read_sealed(path: Path, known: str | None = None) -> tuple[dict[str, Any], str] | None:
    """Return the plain data of such a file, and its digest; None if it is not there.

    ``known`` is the digest that the current version was made with, if any; CorruptError for another file.
    """
    try:
        text = read_text(path)
        body = unsealed(SEALED_FILES[path.name], text)
        if not isinstance(body, dict):
            raise ValueError("it is not an object")
        # A new plan is written before the first commit that is made with it.
        if known not in (None, digest_of(text), body.get("replaces")):
            raise ValueError("it is not the one that the last commit was made with")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        copied = path.name == "run.json" and path.with_name(COPY).exists()
        way_out = "oocdl repair writes it anew from its copy" if copied else "restore it"
        raise CorruptError(f"{path} is damaged ({reason}); {way_out}") from error
    return body, digest_of(text)
