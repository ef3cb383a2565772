"""Shows on a terminal how many of the bytes of a long task are done."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from oocdl.errors import printable


class BytesBar(Progress):
    """A bar that is filled by ``add``; nothing is shown where there is no terminal. A context manager."""

    def __init__(self, is_shown: bool) -> None:
        console = Console(stderr=True, highlight=False)
        words = TextColumn("{task.description}", markup=False)
        columns = (words, BarColumn(24), DownloadColumn(), TimeRemainingColumn())
        is_shown = is_shown and console.is_terminal
        super().__init__(*columns, console=console, transient=True, disable=not is_shown)
        self._task = self.add_task("", total=None)
        self.total = 0
        """Bytes of all that is to be done; 0: not known."""
        self.text = ""
        """What is done now."""

    def add(self, nbytes: int) -> None:
        self.update(self._task, advance=nbytes, total=self.total or None, description=printable(self.text))
