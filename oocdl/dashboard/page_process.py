"""Shows the page of a run: in a process of its own while ``fit`` trains, or in this one until Ctrl-C.

Bokeh takes tens of MiB: it is never imported into a process that trains.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from shlex import quote
from typing import IO
from urllib.parse import urlsplit

from oocdl.cluster.systems import tunnel
from oocdl.host.limits import anonymous_bytes_of

START_SECONDS, END_SECONDS = 60.0, 5.0
"""A page's process has so long to tell its address, and to end."""


@contextmanager
def shown(run: Path, tell: Callable[[str], None], port: int = 0) -> Iterator[None]:
    """Show the page of a run as long as the block lasts; ``tell`` gets a line with its address.

    ``port`` 0 is any that is free. Where it cannot be shown, the line says why, and the block runs on.
    """
    with tempfile.TemporaryFile() as complaints:
        # A session of its own: Ctrl-C is for the run, which then ends the page.
        process = subprocess.Popen(
            [
                sys.executable, "-m", "oocdl.dashboard.server", str(run), f"--port={port}",
                f"--parent={os.getpid()}",
            ],
            stdout=subprocess.PIPE, stderr=complaints, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        command = f"`oocdl dashboard {quote(str(run))}`"
        try:
            ready, _, _ = select([process.stdout], [], [], START_SECONDS)
            address = process.stdout.readline().decode().strip() if ready else ""
            if address:
                mib = anonymous_bytes_of(process.pid) >> 20
                tell(
                    f"dashboard: {address} until the run ends, {command} shows it again; "
                    f"{from_elsewhere(address)}; its process takes {mib} MiB, and more for each open page, "
                    "beside the memory budget"
                )
            else:
                tell(f"no dashboard: {_last_line(complaints)}; {command} may show more")
            yield
        finally:
            process.stdout.close()
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def from_elsewhere(address: str) -> str:
    """Say how the page at an address is seen from another machine."""
    port = urlsplit(address).port
    assert port is not None
    return f"from your own machine: {tunnel(port, port)}"


def serve(run: Path, port: int, tell: Callable[[str], None], allowed: Sequence[str]) -> None:
    """Show the page of a run from this process until Ctrl-C: see `oocdl/dashboard/server.py`."""
    from oocdl.dashboard import server

    asyncio.run(server.serve(run, port, tell, allowed=allowed))


def write_report(run: Path, target: Path, tables: str) -> None:
    """Write the page of a run as one HTML file: see `oocdl/dashboard/page.py`."""
    from oocdl.dashboard import page

    page.write(run, target, tables)


def _last_line(stream: IO[bytes]) -> str:
    stream.seek(0)
    lines = stream.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "its process tells nothing")
