"""The signals that end a command, and how what must not be broken off is kept from them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unstoppable() -> Iterator[None]:
    """Ignore these signals, also in processes that are started meanwhile; only the main thread can."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
