"""The journal of a search: what Optuna logs of a study, in one file that holds its own digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from oocdl.errors import CorruptError, StoreError
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import read_text, reporting, write_text


class Journal(BaseJournalBackend):
    """The log of a study, which is in memory until ``write``: a kill leaves what one of them has written.

    One process at a time writes, by the lock of the folder; others may read. Raises CorruptError for a file
    that is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: list[dict[str, Any]] = []
        self._written = 0
        if not path.exists():
            return
        try:
            with reporting(path, "read"):
                logs = unsealed("search", read_text(path))
        except ValueError as error:
            raise CorruptError(
                f"{path} is damaged ({error}); restore it, or choose another workdir"
            ) from error
        if not isinstance(logs, list):
            raise StoreError(
                f"the search in {path.parent} is of an earlier version of oocdl; choose another workdir"
            )
        self.logs, self._written = logs, len(logs)

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the logs from a number on."""
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Take logs, as they will be read again."""
        self.logs += json.loads(json.dumps(logs))

    def write(self) -> None:
        """Write all of it, durably, if there is anything new."""
        if len(self.logs) != self._written:
            write_text(self.path, sealed("search", self.logs))
            self._written = len(self.logs)
