"""What PyTorch can do by itself about activations: write them to files until the backward pass wants them.

``torch.autograd.graph.saved_tensors_hooks`` with direct input and output, as oocdl's spill has it, so
that no page cache helps. Tensors of some size are written by threads of their own, each once however many
operators save it, and read a little before the backward pass comes to them; parameters and inputs of the
network stay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from limits import empty_at_a_page
from torch import Tensor

from oocdl.storage.cache.direct_io import direct_flag, read_box, write_array

WORKERS = 2
AHEAD = 2
"""Tensors that are read before they are asked for: those that were saved before the one that is."""
WAITING = 4
"""Tensors that may wait to be written: they are still in memory."""


class Saved:
    """A tensor that is being written, or has been."""

    def __init__(self, number: int, tensor: Tensor, path: Path) -> None:
        self.number = number
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.path = path
        self.written: Future[None] | None = None
        self.read: Future[Tensor] | None = None
        weakref.finalize(self, path.unlink, missing_ok=True)


class DiskHooks:
    """Saved tensors in ``folder``."""

    def __init__(self, folder: Path, stay: Iterable[Tensor], least_bytes: int) -> None:
        self.least_bytes = least_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.flag = folder, direct_flag(folder)
        self.stay = {tensor.untyped_storage().data_ptr() for tensor in stay}
        self.pool = ThreadPoolExecutor(WORKERS)
        self.room = threading.Semaphore(WAITING)
        self.numbers = count()
        self.order: list[weakref.ref[Saved]] = []
        self.known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self.read_bytes = self.written_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Within it, what operators save goes to the folder."""
        self.known.clear()
        self.order.clear()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """To the disk, if it is worth it; what is there already is not written again."""
        storage = tensor.untyped_storage()
        if tensor.nbytes < self.least_bytes or storage.data_ptr() in self.stay:
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        alive, saved = (reference() for reference in self.known.get(key, (lambda: None,) * 2))
        # An address is used again once its tensor is gone.
        if alive is None or saved is None:
            made = Saved(len(self.order), tensor, self.folder / f"saved{next(self.numbers)}")
            self.order.append(weakref.ref(made))
            self.known[key] = weakref.ref(storage), weakref.ref(made)
            self.written_bytes += tensor.nbytes
            self.room.acquire()
            made.written = self.pool.submit(self.write, tensor.detach(), made.path)
            return made
        assert isinstance(saved, Saved)
        return saved

    def write(self, tensor: Tensor, path: Path) -> None:
        """In one of the threads."""
        try:
            flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            write_array(path, flat, self.flag)
        finally:
            self.room.release()

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """Back into memory."""
        if isinstance(saved, Tensor):
            return saved
        wanted = self.fetch(saved)
        for before in self.order[max(saved.number - AHEAD, 0) : saved.number][::-1]:
            if (other := before()) is not None:
                self.fetch(other)
        return wanted.result()

    def fetch(self, saved: Saved) -> Future[Tensor]:
        """Begin to read it, unless that has begun; it stays for all that want it."""
        if saved.read is None:
            self.read_bytes += saved.nbytes
            saved.read = self.pool.submit(self.read, saved)
        return saved.read

    def read(self, saved: Saved) -> Tensor:
        """In one of the threads."""
        assert saved.written is not None
        saved.written.result()
        flat = empty_at_a_page(saved.nbytes)
        read_box(saved.path, flat.shape, ((0, flat.size),), flat, self.flag)
        return torch.from_numpy(flat).view(saved.dtype).view(saved.shape)
