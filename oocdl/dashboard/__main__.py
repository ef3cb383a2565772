"""``python -m oocdl.dashboard RUN``: serves the page of a run; its first line on stdout is the address."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from oocdl.dashboard.server import serve
from oocdl.errors import OocdlError


def main() -> int:
    """Serve; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m oocdl.dashboard", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory, or a folder of them")
    parser.add_argument("--port", type=int, default=0, help="default: one that is free")
    parser.add_argument("--allow-host", action="append", default=[], help="a further name of the page's host")
    parser.add_argument("--parent", type=int, help="process id: ends when this one is no longer its child")
    given = parser.parse_args()
    if given.parent is not None:
        os.nice(10)  # the one that trains goes first
    try:
        with suppress(KeyboardInterrupt):  # how it is ended
            serve(given.run, given.port, lambda line: print(line, flush=True), given.parent, given.allow_host)
    except OocdlError as error:
        print(f"oocdl: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
