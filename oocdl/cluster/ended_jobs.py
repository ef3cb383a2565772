"""Finds out which jobs are over before a worker of theirs came, of which Dask knows nothing, and why."""

from __future__ import annotations

import asyncio
import math
import os
import pwd
import re
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping
from pathlib import Path

LOOK_SECONDS = 20.0
"""Seconds between two questions to the batch system, and minimum wait of a job before it is looked for."""
ANSWER_SECONDS = 15.0
LOG_BYTES = 64 << 10
"""Bytes at the end of a log in which the line to be shown is looked for."""
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception): .+")
"""The line of a traceback that tells what is wrong; of several, the first is the cause of the others."""
LISTS = {
    "slurm": "squeue --noheader --user {user} --format %A",
    "pbs": "qselect -u {user}",
    "sge": "qstat -u {user}",
    "lsf": "bjobs -noheader -o jobid",
    "htcondor": "condor_q -autoformat ClusterId",
}
"""Commands that print a line for each job of a user that is not over, which begins with its number."""
NONE_LEFT = "No unfinished job found"


class Ended:
    """Finds which jobs of a batch system are over, of those that wait for their workers."""

    def __init__(self, system: str, logs: Path) -> None:
        self._system, self._logs = system, logs
        self._waiting: dict[str, float] = {}
        self._looked = -math.inf
        self._tells = False
        """Whether a job of this cluster was ever listed: a list may be of others, as of another cluster."""

    async def among(self, numbers: Mapping[str, str]) -> dict[str, str]:
        """Return worker name -> what is known, where its job is over; ``numbers``: worker name -> job number.

        Asks at most once in ``LOOK_SECONDS``; returns nothing if the batch system does not tell. As long as
        it has never listed a job of this cluster, only jobs with silent logs count as over.
        """
        now = time.monotonic()
        self._waiting = {number: self._waiting.get(number, now) for number in numbers.values()}
        old = {number for number, since in self._waiting.items() if now - since >= LOOK_SECONDS}
        if not numbers or now - self._looked < LOOK_SECONDS:
            return {}
        self._looked = now
        there = await unfinished(self._system)
        if there is None:
            return {}
        self._tells = self._tells or any(_plain(number) in there for number in self._waiting)
        return {
            name: self._words(number)
            for name, number in numbers.items()
            if number in old and _plain(number) not in there and (self._tells or self._is_quiet(number))
        }

    def _logs_of(self, number: str) -> list[Path]:
        mentions = re.compile(rf"(?<!\d){_plain(number)}(?!\d)")  # not of job 112, where 12 is meant
        return [path for path in self._logs.glob("*") if mentions.search(path.name)]

    def _is_quiet(self, number: str) -> bool:
        """Return whether a job has begun to write logs, and has written nothing more for a while."""
        written = [path.stat().st_mtime for path in self._logs_of(number)]
        return bool(written) and time.time() - max(written) >= LOOK_SECONDS

    def _words(self, number: str) -> str:
        """Quote a job's logs, with the file's path: the first error, else the last line; empty without."""
        told = []
        for path in self._logs_of(number):
            with path.open("rb") as file:
                file.seek(max(path.stat().st_size - LOG_BYTES, 0))
                lines = [line.strip() for line in file.read().decode(errors="replace").split("\n")]
            lines = [line for line in lines if line]
            errors = [line for line in lines if ERROR.fullmatch(line)]
            told += [(bool(errors), path.stat().st_mtime, path, line) for line in (errors or lines[-1:])[:1]]
        return f": '{max(told)[3]}' ({max(told)[2]})" if told else ""


async def unfinished(system: str) -> set[str] | None:
    """Return the numbers of this user's jobs that are not over; None if the batch system does not tell."""
    command = LISTS[system].format(user=_user()).split()
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    except OSError:
        return None
    try:
        out, error = await asyncio.wait_for(process.communicate(), ANSWER_SECONDS)
    except TimeoutError:
        process.kill()
        return None
    if process.returncode and NONE_LEFT not in error.decode(errors="replace"):
        return None
    return {_plain(line) for line in out.decode(errors="replace").split("\n") if _plain(line)}


def _plain(number: str) -> str:
    """Return the digits that the number of a job begins with.

    >>> _plain(" 12.server"), _plain("job-ID  prior")
    ('12', '')
    """
    match = re.match(r"\s*(\d+)", number)
    return match[1] if match else ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return str(os.getuid())
