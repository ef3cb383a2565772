"""Arrays that stay on a device from run to run: a tier above RAM.

An array of the host is reserved for each, so plan, tier and spill are what they are without a device. Its
bytes come to the host when somebody there wants them, or when the device needs their room. What was used the
longest ago leaves first: that is what the backward pass wants last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakSet

from torch import Tensor

from oocdl.graph.ir.graph import Array

Fetch = Callable[[Tensor, Any, Array], None]
"""Copies a tensor to an array of the host, once an event has passed, and waits until it is there."""


class Resident:
    """An array on the device; a ``DeviceArray``. ``host`` is what waits for its bytes; None: it has them."""

    def __init__(
        self, memory: DeviceMemory, tensor: Tensor, ready: Any = None, host: Array | None = None
    ) -> None:
        self.nbytes = tensor.nbytes
        self.used = next(memory.clock)
        self._memory, self._ready, self._host = memory, ready, host
        self._tensor: Tensor | None = tensor
        self._lock = threading.Lock()

    def hold(self) -> Tensor | None:
        self.used = next(self._memory.clock)
        return self._tensor

    @property
    def is_there(self) -> bool:
        return self._tensor is not None

    def settle(self) -> None:
        if self._host is None:
            return
        with self._lock:
            if self._host is not None:
                assert self._tensor is not None, "an array has left the device and is not on the host"
                self._memory.fetch(self._tensor, self._ready, self._host)
                self._host = self._ready = None

    def leave(self) -> None:
        self.settle()
        self._tensor = None


class DeviceMemory:
    """Keeps arrays in what is free of a device, beside what runs take.

    ``free_bytes`` is asked by the first run of a session.
    """

    def __init__(self, free_bytes: Callable[[], int], fetch: Fetch) -> None:
        self.free_bytes, self.fetch = free_bytes, fetch
        self.capacity_bytes: int | None = None
        self.clock = count()
        self._residents: WeakSet[Resident] = WeakSet()
        self._lock = threading.Lock()

    def add(self, tensor: Tensor, ready: Any = None, host: Array | None = None) -> Resident:
        """Keep a tensor that nobody writes to.

        ``host`` is an array that waits for its bytes, which are there once the event ``ready`` has passed.
        """
        made = Resident(self, tensor, ready, host)
        with self._lock:
            self._residents.add(made)
        return made

    def _there(self) -> list[Resident]:
        with self._lock:
            return [one for one in self._residents if one.is_there]

    @property
    def kept_bytes(self) -> int:
        return sum(one.nbytes for one in self._there())

    def make_room(self, nbytes: int | None = None) -> None:
        """Have arrays leave the device until ``nbytes`` are free beside the others; None: all of them."""
        if self.capacity_bytes is None:
            self.capacity_bytes = self.free_bytes()
        there = self._there()
        short_bytes = sum(one.nbytes for one in there) + (nbytes or 0) - self.capacity_bytes
        if nbytes is not None and short_bytes <= 0:
            return
        for one in sorted(there, key=lambda one: one.used):
            if nbytes is not None and short_bytes <= 0:
                break
            one.leave()
            short_bytes -= one.nbytes
