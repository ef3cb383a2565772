"""Waits for a crew without ever waiting for ever: whoever is lost is noticed within seconds.

The scheduler tells at once of a worker whose connection breaks. Of one that is stopped or cut off it tells
much later, so the driver looks how long each has been silent.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as LocalCancelled
from concurrent.futures import Future as LocalFuture
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, NamedTuple, NoReturn

from distributed import Future, KilledWorker
from distributed.client import ClosedClientError

from oocdl.errors import OocdlError, ResourceError
from oocdl.runtime import dask_private
from oocdl.runtime.cluster import scheduler_side
from oocdl.runtime.cluster.carried import carried
from oocdl.runtime.cluster.cluster_progress import Report, Stillness
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.lost import SILENT_SECONDS, WorkersLost

LOOK_SECONDS, LOOKS = 1.0, 3
"""Seconds between two looks at an awaited crew, and number of looks within them after an odd error."""
LATE_SECONDS = 3.0
"""Seconds between two looks after which the later one says nothing of who was silent meanwhile."""
TELL_SECONDS = 8.0
"""Seconds of silence after which a member is named to the user."""
ANSWER_SECONDS = 20.0
"""Seconds within which the scheduler answers, or is taken for dead."""
OF_FILES = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EISDIR, errno.EMFILE, errno.ENFILE,
    errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS, errno.ESTALE,
}  # fmt: skip
"""Errors of a member's files: another crew would meet them again."""


class Watch:
    """Watches the members of a crew, given by their addresses. ``tell`` is called with lines for the user.

    A member is given up after ``silent_seconds`` without a heartbeat.
    """

    def __init__(
        self,
        client: Any,
        members: Collection[str],
        tell: Callable[[str], None],
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.client, self.members, self._tell = client, tuple(members), tell
        self._drop_seconds, self._tell_seconds = silent_seconds, min(TELL_SECONDS, silent_seconds / 2)
        self._silent: set[str] = set()
        self._removed: set[str] = set()
        # No event: a signal in the entry of its lock would leave that taken, and the client's loop waiting.
        self._change: SimpleQueue[None] = SimpleQueue()
        self._stillness = Stillness(tell)
        self._looked = float("-inf")

    def removed(self, event: tuple[float, str]) -> None:
        """Take an event of the scheduler: the time at which it removed a worker, and its address."""
        self._removed.add(event[1])
        self._change.put(None)

    def look(self, now: bool = False) -> None:
        """Look whether all members are there and well, and whether anybody moves; raise WorkersLost if not.

        Looks at most once in ``LOOK_SECONDS``, or ``now``.
        """
        since = monotonic() - self._looked
        if since < LOOK_SECONDS and not now and not self._removed:
            return
        there = roll(self.client, self._tell)
        before, self._looked = self._looked, monotonic()
        gone = [one for one in self.members if one not in there or one in self._removed]
        if gone:
            raise WorkersLost(f"{_named(gone)} gone")
        if self._looked - before > LATE_SECONDS and not now:
            return  # driver or scheduler were stopped: heartbeats of that time are still to be read
        for address in self.members:
            seconds = there[address].silent
            if seconds < self._tell_seconds:
                if address in self._silent:
                    self._silent.remove(address)
                    self._tell(f"worker {address} is back")
            elif seconds >= self._drop_seconds:
                # If it is alive after all, it is told and starts anew.
                on_scheduler(self.client, scheduler_side.forget_worker, address)
                raise WorkersLost(f"worker {address} has been silent for {seconds:.0f} s")
            elif address not in self._silent:
                self._silent.add(address)
                self._tell(
                    f"worker {address} has been silent for {seconds:.0f} s; it is given up after "
                    f"{self._drop_seconds:.0f} s"
                )
        if not self._silent:  # whom the others may wait for
            reports = {address: there[address].report for address in self.members}
            self._stillness.look(reports, min(since, LATE_SECONDS))

    def wait(
        self,
        futures: Sequence[Future[Any] | LocalFuture[Any]],
        nbytes: int = 0,
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all are done, or one has failed. Raises WorkersLost, also if nobody moves any more.

        ``nbytes``: what travels between the driver and members meanwhile. ``tick`` is called about once a
        second.
        """
        self._stillness.begin(nbytes)

        def done(_: object) -> None:
            self._change.put(None)

        for future in futures:
            future.add_done_callback(done)
        left = list(futures)
        while left:
            if any(failed(future) for future in left):
                return
            left = [future for future in left if not future.done()]
            if left:
                if not self._removed:
                    with suppress(Empty):
                        self._change.get(timeout=LOOK_SECONDS)
                    while not self._change.empty():  # of what is looked at now
                        self._change.get()
                self.look()
                if tick is not None:
                    tick()

    def ask(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        nanny: bool = False,
        only: Sequence[str] | None = None,
        nbytes: int = 0,
        refusal: type[Exception] | tuple[()] = (),
    ) -> dict[str, Any]:
        """Call a function on all members, or ``only`` on some, or on their nannies; return their answers.

        ``nbytes`` is the size of large arguments and answers. An error of type ``refusal`` is an answer.
        Raises what else the function raises on one of them, WorkersLost if one is lost meanwhile.
        """
        whom = list(only or self.members)
        asked = dask_private.run_on_workers(self.client, function, *arguments, workers=whom, nanny=nanny)
        return self._answers([in_loop(self.client, asked)], nbytes, refusal)

    def ask_each(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Sequence[Any]],
        refusal: type[Exception] | tuple[()] = (),
    ) -> dict[str, Any]:
        """Call a function on members by address, each with arguments of its own; the rest as ``ask``.

        The last argument of each is large: pickled bytes.
        """
        calls = [
            dask_private.run_on_workers(self.client, function, *own, workers=[address])
            for address, own in arguments.items()
        ]
        nbytes = sum(len(own[-1]) for own in arguments.values())
        return self._answers([in_loop(self.client, call) for call in calls], nbytes, refusal)

    def _answers(
        self,
        asked: Sequence[LocalFuture[Mapping[str, Any]]],
        nbytes: int,
        refusal: type[Exception] | tuple[()],
    ) -> dict[str, Any]:
        """Return what members answer; raise what one of them has raised that is no ``refusal``."""
        self.wait(asked, nbytes)
        found: dict[str, Any] = {}
        for answer in sorted(asked, key=failed, reverse=True):  # others than one that failed may not be done
            try:
                found |= answer.result()
            except Exception as error:
                self.raise_of(error)
        errors = {address: given for address, given in found.items() if isinstance(given, BaseException)}
        if refusal and not all(isinstance(error, OocdlError) for error in errors.values()):
            self._look_twice()
        for address, given in errors.items():
            found[address] = _told(address, given, refuses=bool(refusal))
            if isinstance(given, Superseded) or not isinstance(found[address], refusal):
                self.raise_of(found[address])
        return found

    def raise_of(self, error: BaseException) -> NoReturn:
        """Raise an error of a member; WorkersLost for one that only tells of lost members."""
        if isinstance(error, OSError) and error.errno in OF_FILES:
            raise ResourceError(f"a worker cannot use its files: {error}") from error
        if isinstance(error, OSError | KilledWorker | Superseded | asyncio.CancelledError | LocalCancelled):
            self.look(now=True)  # which names who is lost
            raise WorkersLost(plain(error) or type(error).__name__) from error
        if not isinstance(error, OocdlError):
            self._look_twice()
        raise error

    def _look_twice(self) -> None:
        """Look several times: a lost worker leaves errors of many kinds, and is known a moment later."""
        for _ in range(LOOKS):
            self.look(now=True)
            sleep(LOOK_SECONDS / LOOKS)


def _told(address: str, error: BaseException, refuses: bool) -> BaseException:
    """Return an error of a member in words for the user, who cannot see which member it is of.

    ``refuses``: an error that is not ours means that this worker cannot do it.
    """
    # Of an error that cannot be pickled Dask sends a text with its type.
    words = plain(error) if type(error) is Exception else f"{type(error).__name__}: {plain(error)}"
    if isinstance(error, ImportError) or words.startswith(("ImportError", "ModuleNotFoundError")):
        text = (
            f"cannot import what it needs ({words}); install the same versions of oocdl and its extras there"
        )
    elif isinstance(error, OSError) and error.errno in OF_FILES:
        text = f"cannot use its files: {error}"
    elif refuses and isinstance(error, Exception) and not isinstance(error, OocdlError | OSError):
        same = "the same versions of oocdl and its extras"
        text = f"fails ({words}); look in its log, and whether it has {same}"
    else:
        return error
    told = ResourceError(f"worker {address} {text}")
    told.__cause__ = error
    return told


def plain(error: BaseException) -> str:
    """Return the text of an error in one line, without what Dask calls the connection.

    >>> plain(OSError("in <TCP (closed) Broadcast local=tcp://a:1 remote=tcp://b:2>: Stream is closed"))
    'Stream is closed'
    """
    return " ".join(re.sub(r"\bin <[^>]*>: ", "", str(error)).split())


def failed(future: Future[Any] | LocalFuture[Any]) -> bool:
    """Return whether a future is done, and has no result."""
    if isinstance(future, LocalFuture):
        return future.done() and (future.cancelled() or future.exception() is not None)
    return future.status in ("error", "cancelled", "lost")


def in_loop(client: Any, call: Coroutine[Any, Any, Any]) -> LocalFuture[Any]:
    """Run a coroutine in the event loop of a client. Raises WorkersLost if the client is closed."""
    try:
        return asyncio.run_coroutine_threadsafe(call, client.loop.asyncio_loop)
    except RuntimeError as error:  # the loop has ended with its client
        call.close()
        raise WorkersLost("the connection to the scheduler is closed") from error


@contextmanager
def open_client() -> Iterator[None]:
    """Raise WorkersLost where a client that is closed is used."""
    try:
        yield
    except ClosedClientError as error:
        raise WorkersLost("the connection to the scheduler is closed") from error


class Seen(NamedTuple):
    """The scheduler's knowledge of a worker."""

    silent: float
    """Seconds since its last heartbeat."""
    report: Report | None
    """Report in that heartbeat, if the worker is a member."""


def roll(client: Any, tell: Callable[[str], None] | None = None) -> dict[str, Seen]:
    """Return the workers that there are, and what is known of each.

    ``tell`` is called with a line if the scheduler is silent. Raises WorkersLost if it does not answer.
    """
    found = on_scheduler(client, scheduler_side.workers_seen, tell=tell)
    return {
        address: Seen(silent, None if report is None else Report(*report))
        for address, (silent, report) in found.items()
    }


def on_scheduler(
    client: Any, function: Callable[..., Any], *arguments: Any, tell: Callable[[str], None] | None = None
) -> Any:
    """Call a function on the scheduler. Raises WorkersLost if that does not answer in ``ANSWER_SECONDS``."""
    if client.status != "running":
        raise WorkersLost("the connection to the scheduler is broken")
    call: Any = carried(function) if function.__module__ == scheduler_side.__name__ else function
    answer = in_loop(client, dask_private.run_on_scheduler(client, call, *arguments))
    asked, told = monotonic(), False
    while True:
        try:
            return answer.result(LOOK_SECONDS)
        except TimeoutError as error:
            silent = monotonic() - asked
            if answer.done():  # the error is that of its connection
                raise WorkersLost(f"the scheduler is gone ({plain(error)})") from error
            if silent >= ANSWER_SECONDS or client.status != "running":
                answer.cancel()
                raise WorkersLost(f"the scheduler has not answered for {silent:.0f} s") from None
            if silent >= TELL_SECONDS and tell is not None and not told:
                told = True
                tell(
                    f"the scheduler has been silent for {silent:.0f} s; it is given up after "
                    f"{ANSWER_SECONDS:.0f} s"
                )
        except (OSError, asyncio.CancelledError, LocalCancelled) as error:
            raise WorkersLost(f"the scheduler is gone ({plain(error)})") from error


def _named(addresses: Sequence[str]) -> str:
    if len(addresses) == 1:
        return f"worker {addresses[0]} is"
    return f"{len(addresses)} workers ({', '.join(addresses[:3])}{', ..' if len(addresses) > 3 else ''}) are"
