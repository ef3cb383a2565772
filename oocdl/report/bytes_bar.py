"""Shows on a terminal how many of the bytes of a long task are done."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from oocdl.errors import printable


class BytesBar:
    """A bar that is filled by ``add``; nothing is shown where there is no terminal. A context manager."""

    def __init__(self, is_shown: bool, console: Console | None = None) -> None:
        console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(24), DownloadColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=None)
        self.total = 0
        """Bytes of all that is to be done; 0: not known."""
        self.text = ""
        """What is done now."""

    def __enter__(self) -> BytesBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        self._bar.update(
            self._task, advance=nbytes, total=self.total or None, description=printable(self.text)
        )
