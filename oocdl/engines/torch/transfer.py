"""Makes tensors of arrays in the same memory, or copies them to a device and back: on a stream, in pieces of
pinned memory.

Pinned memory can be copied while the processor does something else, but is the host's: a stream has two
small pieces of it, however large the arrays. While one piece travels the other is filled or emptied.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.operands import aligned

PIECE_BYTES = 4 << 20
"""Bytes of a piece: its copy takes ten times as long as the call that starts it."""
PIECES_PER_STREAM = 2
_BFLOAT16 = np.dtype("bfloat16")


def pieces(whole: Any, most_bytes: int) -> Iterator[Any]:
    """``whole`` (an array or a tensor, however it lies) in parts of at most so many bytes, in order.

    >>> [part.shape for part in pieces(np.zeros((3, 4), np.uint8), 8)]
    [(2, 4), (1, 4)]
    """
    if whole.nbytes <= most_bytes:
        yield whole
        return
    step = most_bytes // whole[0].nbytes
    if step:
        yield from (whole[start : start + step] for start in range(0, len(whole), step))
        return
    for part in whole:
        yield from pieces(part, most_bytes)


def _warn_once() -> None:
    """Have PyTorch give its one warning of read-only arrays now, unheard: no kernel writes to an input."""
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


_warn_once()


def to_torch(array: Array) -> Tensor:
    """A tensor of the same memory, or of a copy where PyTorch cannot take the array as it lies."""
    array = aligned(array)
    if any(stride < 0 for stride in array.strides):
        array = np.array(array, order="C")
    return shared(array)


def shared(array: Array) -> Tensor:
    """A tensor of the same memory, never a copy."""
    if array.dtype == _BFLOAT16:  # a name that a library has taught NumPy, and PyTorch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Piece:
    """Pinned memory of the host that one copy at a time goes through."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type != "cpu"  # else copies are done when they are asked for
        self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self.copied: Any = torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]
        self.goes_to: Tensor | None = None
        """Memory of an array that the piece is copied to once it has come from the device."""

    def of(self, tensor: Tensor) -> Tensor:
        """The beginning of the memory as a tensor like ``tensor``, without gaps."""
        return self.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy between the piece and the device."""
        target.copy_(source, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self.copied is not None:
            self.copied.synchronize()

    def finish(self) -> None:
        """Wait, and copy what has come from the device to its array: the piece is free again."""
        self.wait()
        if self.goes_to is not None:
            self.goes_to.copy_(self.of(self.goes_to))
            self.goes_to = None


def cuda_stream(device: torch.device) -> Any:
    """A new stream of a device; None where copies and kernels are done when they are asked for."""
    return None if device.type == "cpu" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Stream:
    """A stream of the device that copies for one thread at a time, with pieces that are used in turn.

    ``computing`` is the stream that kernels run on, one after the other: what is copied to the device is
    there before kernels begun later run, and what is copied from it is made by kernels begun before.
    """

    def __init__(self, device: torch.device, computing: Any = None) -> None:
        self.device, self.computing = device, computing
        self.copying = cuda_stream(device)
        self.pieces = [_Piece(device) for _ in range(PIECES_PER_STREAM)]
        self.turn = 0

    def _next(self) -> _Piece:
        self.turn = (self.turn + 1) % PIECES_PER_STREAM
        self.pieces[self.turn].finish()
        return self.pieces[self.turn]

    def to_device(self, array: Array) -> Tensor:
        """Begin to copy an array to the device, where it is contiguous."""
        with torch.cuda.stream(self.copying):
            made = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), device=self.device)
            for part, target in zip(pieces(array, PIECE_BYTES), pieces(made, PIECE_BYTES), strict=True):
                piece = self._next()
                piece.copy(target, piece.of(target).copy_(to_torch(part)))
        if self.copying is not None:
            self.computing.wait_stream(self.copying)
            made.record_stream(self.computing)  # not used again before kernels are done with it
        return made

    def to_host(self, tensor: Tensor, out: Array, ready: Any = None) -> None:
        """Begin to copy ``tensor`` to ``out`` on the host, once it is made.

        That is when the event ``ready`` has passed; None: when all kernels begun so far are done.
        """
        if self.copying is not None:
            if ready is None:
                self.copying.wait_stream(self.computing)
            else:
                self.copying.wait_event(ready)
            tensor.record_stream(self.copying)
        with torch.cuda.stream(self.copying):
            places = pieces(shared(out), PIECE_BYTES)
            for part, place in zip(pieces(tensor, PIECE_BYTES), places, strict=True):
                piece = self._next()
                piece.copy(piece.of(part), part)
                piece.goes_to = place

    def finish(self) -> None:
        """Wait for all copies that were begun."""
        for piece in self.pieces:
            piece.finish()

    def drop(self) -> None:
        """Forget copies that an aborted run has begun: its arrays may soon belong to another run."""
        for piece in self.pieces:
            piece.goes_to = None
            piece.wait()
