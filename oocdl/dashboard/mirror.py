"""Copies the files of a run that its page reads, and what is new in them, to where the run is not seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oocdl.dashboard.live_log import FACTS, FOLDER, LAST_PASS, NOTES, NOW, PICTURES, RESOURCES, STEPS
from oocdl.dashboard.series import Growing, Watched, put

GROWING = ("history/steps.jsonl", *(f"{FOLDER}/{name}" for name in (STEPS, RESOURCES, NOTES)))
"""Files that are written on at their end, or anew."""
REPLACED = ("run.json", *(f"{FOLDER}/{name}" for name in (FACTS, NOW, LAST_PASS, PICTURES)))
"""Files that are replaced as a whole."""
MOST_BYTES = 4 << 20
"""Approximate maximum of bytes sent at a time; the rest comes with the next."""


@dataclass(frozen=True)
class Piece:
    """The new content of a file."""

    name: str
    at: int
    """Byte offset in the file; 0: the file starts over with this piece."""
    data: bytes


class Source:
    """The files where they are written."""

    def __init__(self, run: Path) -> None:
        self._replaced = {name: Watched(run / name) for name in REPLACED}
        self._growing = {name: Growing(run / name) for name in GROWING}

    def news(self) -> list[Piece]:
        """Return what is new since the last call, at most about ``MOST_BYTES``."""
        new_data = ((name, file.news()) for name, file in self._replaced.items())
        found = [Piece(name, 0, data) for name, data in new_data if data is not None]
        for name, growing in self._growing.items():
            if sum(len(piece.data) for piece in found) >= MOST_BYTES:
                break
            if (data := growing.news(MOST_BYTES)) or growing.again:
                found.append(Piece(name, growing.at, data))
        return found


def write(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write what ``Source.news`` gave to the copy of the run in ``folder``."""
    for piece in pieces:
        if piece.name not in (*REPLACED, *GROWING):
            raise ValueError(f"'{piece.name}' is no file of a run's page")
        path = folder / piece.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.at:
            with path.open("r+b") as stream:
                stream.seek(piece.at)
                stream.write(piece.data)
        else:
            put(path, piece.data)
