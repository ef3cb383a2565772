"""A search as text: its table, and a line for each trial that has trained to the end of a rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from oocdl.errors import printable
from oocdl.events import Notice, SearchEvent, TrialDone
from oocdl.report.notebook import block_here
from oocdl.report.tables import Column, Sheet, text_of
from oocdl.report.units import counted, duration, value_text

FACTS = ("state", "rung", "steps", "metric", "error", "seconds", "peak_bytes", "run")
"""Keys of a row of ``Search.table`` beside the trial and its values."""


def search_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of a search, and below it the errors of its trials.

    >>> row = {"trial": 3, "lr": 0.0123456, "state": "finished", "rung": 1, "steps": 30, "metric": 0.5}
    >>> print(search_text([{**row, "error": None, "seconds": 2.0}]))
    ┏━━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━┓
    ┃ trial ┃ metric ┃ steps ┃      lr ┃    state ┃
    ┡━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━┩
    │ 3     │    0.5 │    30 │ 0.01235 │ finished │
    └───────┴────────┴───────┴─────────┴──────────┘
    <BLANKLINE>
    """
    errors = [f"trial {row['trial']}: {printable(row['error'])}" for row in rows if row["error"]]
    return text_of(search_table(rows), *errors)


def search_table(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Make the table of a search, whose later values go first where there is no room."""
    names = [name for name in (rows[0] if rows else {}) if name not in ("trial", *FACTS)]
    values = [Column(name, name, value_text, rank) for rank, name in enumerate(names, 3)]
    columns = (
        Column("trial", "trial", kind="name"),
        Column("metric", "metric", value_text),
        Column("steps", "steps", value_text, 2),
        *values,
        Column("state", "state", rank=1),
    )
    return Sheet("", columns, [[row[column.key] for column in columns] for row in rows])


class SearchProgress:
    """Prints a line for each trial that has trained, on stderr, or in one output of a notebook."""

    def __init__(self, console: Console | None = None) -> None:
        self.block = None if console else block_here()
        self.console = console or Console(stderr=True, highlight=False)

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case TrialDone():
                self._print(_trial_text(event))
            case Notice(text):
                self._print(text)

    def _print(self, text: str) -> None:
        if self.block is not None:
            return self.block.line(text)
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _trial_text(event: TrialDone) -> str:
    row = event.row
    names = (name for name in row if name not in ("trial", *FACTS))
    values = ", ".join(f"{name}={value_text(row[name])}" for name in names)
    head = f"trial {row['trial']} ({values})"
    tail = f"{event.done} of {event.of} done"
    if row["metric"] is None:
        return f"{head} failed: {row['error']}; {tail}"
    spent = f"{counted(row['steps'], 'step')}, {duration(row['seconds'])}"
    return f"{head} {row['metric']:.6g} after {spent}: {row['state']}; {tail}"
