"""Runs a function in a forked copy of this process: what crashes, changes or allocates there stays there.

PyTorch's exporters run the code of a module, and some of that code ends a process (a segmentation fault in
the tracer) or changes global state. A copy costs some ten milliseconds, and its memory goes with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import re
import resource
import signal
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from oocdl.errors import OocdlError, UnsupportedError
from oocdl.host.heap import keep_freed_memory

T = TypeVar("T")
UNFIT = b"unfit"
"""Message of a copy that cannot go backward: the work is then done in this process."""
_PR_SET_PDEATHSIG = 1


def start(what: str, work: Callable[[], T], most_seconds: int | None = None) -> Callable[[], T]:
    """Begin to run ``work`` in a copy of this process; return the function that waits for its result.

    It runs on one thread, with its output thrown away. The result and typed errors are pickled; any other
    exception becomes an UnsupportedError that names it, and so does the copy's death, with ``what``, the
    subject of a sentence. Where CUDA is in use, or has left threads, it runs in this process once it is
    waited for, for as long as it takes: autograd does not survive a fork there. Elsewhere the result is an
    UnsupportedError after ``most_seconds`` of a processor's time.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, whose locks a copy may inherit; PyTorch's loaders fork all the same.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(work, writer, most_seconds)
    os.close(writer)

    def result() -> T:
        try:
            with open(reader, "rb") as file:
                data = file.read()
            status = os.waitpid(pid, 0)[1]
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        if not data:
            number = os.waitstatus_to_exitcode(status)
            if number == -signal.SIGXCPU:
                raise UnsupportedError(f"{what} did not end in {most_seconds} s")
            how = f"signal {signal.Signals(-number).name}" if number < 0 else f"exit status {number}"
            raise UnsupportedError(f"{what} crashed ({how})")
        if data == UNFIT:
            return work()
        value: T
        value, error = pickle.loads(data)
        if error is not None:
            raise error
        return value

    return result


def in_child(what: str, work: Callable[[], T], most_seconds: int | None = None) -> T:
    """Run ``work`` in a copy of this process, and return its result."""
    return start(what, work, most_seconds)()


def _run(work: Callable[[], T], writer: int, most_seconds: int | None) -> NoReturn:
    """Do the work of a copy, and end it without the clean-up that is the original's."""
    code = 1
    try:
        gc.freeze()  # a collection would go through all that the original has, and copy its pages
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # rather this copy than its original, if memory ends
        if most_seconds is not None:
            _, most = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()  # it writes to a file of its own, which in a notebook is the cell
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        torch.set_num_threads(1)
        keep_freed_memory()  # convolutions in float64 take up to twice as long where each touches new pages
        data = pickle.dumps(_outcome(work)) if _goes_backward() else UNFIT
        with open(writer, "wb") as pipe:
            pipe.write(data)
        code = 0
    finally:
        os._exit(code)


def _goes_backward() -> bool:
    """Whether autograd runs in this copy: it does not where its threads for devices ran before the fork."""
    # They do in builds with CUDA, even without a GPU, once parts of PyTorch are loaded that exporters need.
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def _outcome(work: Callable[[], T]) -> tuple[T | None, OocdlError | None]:
    try:
        return work(), None
    except OocdlError as error:
        error.__cause__ = error.__context__ = error.__traceback__ = None  # they hold what cannot be pickled
        return None, error
    except Exception as error:  # a module's code raises whatever it likes
        return None, UnsupportedError(first_line(error))


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, behind its type where it is none of ours."""
    # PyTorch's exporter wraps what went wrong in errors of its own, whose text is on how to report it.
    while type(error).__module__.startswith("torch.onnx") and error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", lines[0]).split())
    kind = "" if isinstance(error, OocdlError) else f"{type(error).__name__}: "
    return kind + (text if len(text) <= 400 else f"{text[:397]}...")
