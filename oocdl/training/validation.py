"""A validation within a run: forward passes over samples that no step has, whose mean losses it returns.

What each pass has found is noted in the run, so that a validation that was killed goes on where it was: the
steps that lead there again give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oocdl.planning.passes import PassInfo
from oocdl.report.history_view import VALIDATION_PREFIX
from oocdl.storage.files import read_bytes, regular, reporting, write_bytes
from oocdl.storage.run.history import line_of, row_of

FILE = "history/validation.jsonl"


@dataclass(frozen=True)
class Validation:
    """The notes on the validation of one state of the weights."""

    path: Path
    state: Mapping[str, Any]
    """What the results depend on, as plain data."""

    def noted(self) -> list[dict[str, float]]:
        """Return the losses of the passes that are done, and forget notes on any other state."""
        with reporting(self.path):
            lines = read_bytes(self.path).splitlines() if self.path.exists() else []
            rows = [row for line in lines if (row := row_of(line)) is not None]
            rows = [row for row in rows if row["state"] == self.state]
            write_bytes(self.path, b"".join(map(line_of, rows)))
        return [row["losses"] for row in rows]

    def note(self, losses: Mapping[str, float]) -> None:
        """Note the losses of the next pass."""
        with reporting(self.path), open(self.path, "ab", opener=regular) as stream:
            stream.write(line_of({"state": self.state, "losses": losses}))


def means(losses: Sequence[Mapping[str, float]], passes: Sequence[tuple[str, PassInfo]]) -> dict[str, float]:
    """Return the losses of a validation, each the mean over samples, by their names in the history."""
    sizes = [len(info.indices) for _, info in passes]
    return {
        f"{VALIDATION_PREFIX}{name}": sum(
            found[name] * size for found, size in zip(losses, sizes, strict=True)
        )
        / sum(sizes)
        for name in losses[0]
    }
