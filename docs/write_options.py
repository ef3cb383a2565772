"""Writes `docs/reference/options.md`, the page of all options of ``fit``: ``python docs/write_options.py``.

The records of the options are the source; `tests/training/test_signature.py` holds the page against them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

from oocdl.config.options import (
    CommonOptions,
    LengthOptions,
    Option,
    PassOptions,
    SettingOptions,
    ValidationOptions,
)
from oocdl.training.call import ALL_OPTIONS, CallOptions, FurtherCallOptions

PAGE = Path(__file__).parent / "reference" / "options.md"
HEAD = """# Options

All options of `oocdl.fit`, which `oocdl.plan` takes too; `oocdl.simulate` and `oocdl.search` take those that
their docstrings name. On the command line they have dashes: `batch_size=2` is `--batch-size 2`; in a file for
`--config`, `batch_size = 2`.

A value that changes the **plan** changes rounding, and so the last digits of results.

This page is written by `docs/write_options.py` from the records in `oocdl/config/options.py` and
`oocdl/training/call.py`.
"""
SECTIONS: Mapping[str, tuple[type, ...]] = {
    "Every day": (CommonOptions, LengthOptions, PassOptions, ValidationOptions, CallOptions),
    "Further settings": (SettingOptions,),
    "Further options of a call": (FurtherCallOptions,),
}


CHANGES = {"plan": "Changes the plan", "bits": "Changes results", "neither": "Changes no result"}
FIXED = {
    None: "",
    "run": "; a run does not resume with another value",
    "plan": "; a run resumes with another value only if `replan=True`",
}


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for title, kinds in SECTIONS.items():
        names = [name for kind in kinds for name in get_type_hints(kind)]
        parts += [f"## {title}\n", *(entry(name, ALL_OPTIONS[name]) for name in names)]
    return "\n".join(parts)


def entry(name: str, option: Option) -> str:
    """Return what the page says of an option."""
    text = re.sub(r"``(.*?)``", r"`\1`", option.doc)
    text = re.sub(r"([\w/]*<\w+>[\w.]*)", r"`\1`", text)
    facts = f"*Default `{option.default!r}`. {CHANGES[option.changes]}{FIXED[option.fixed]}.*"
    return f"### `{name}`\n\n{text}\n\n{facts}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
