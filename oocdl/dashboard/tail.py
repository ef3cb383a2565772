"""Reads files of lines of JSON that another process appends to, only what is new each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oocdl.storage.files import regular


class Tail:
    """The lines of one file. A file that has become shorter, or is another, is read anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.again = False
        """Whether the last ``read`` began anew: what was read before it is no longer so."""
        self._at, self._inode = 0, -1

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that have come since the last call. One that is not whole yet comes later.

        A line that is no JSON is left out: a writer that was killed may have left part of one.
        """
        self.again = False
        try:
            with open(self.path, "rb", opener=regular) as stream:
                found = stream.fileno(), self.path.stat()
                if found[1].st_size < self._at or (self._inode not in (-1, found[1].st_ino)):
                    self._at, self.again = 0, True
                self._inode = found[1].st_ino
                stream.seek(self._at)
                data = stream.read()
        except FileNotFoundError:
            self.again, self._at = self._at > 0, 0
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
