"""``TensorBoard``: the history of a run as event files, written without further packages.

A file is a sequence of records: 8 bytes of length, its crc32c, the data, its crc32c. The data is a protobuf
message ``Event`` (tensorflow/core/util/event.proto), of which a few fields are enough.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from ctypes import c_float
from pathlib import Path

import google_crc32c

from oocdl.callbacks.committed_rows import CommittedRows, Row
from oocdl.events import RunStarted
from oocdl.host.paths import path_of
from oocdl.storage.files import reporting, write_text

ENDING = ".oocdl"
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
"""Fields of an ``Event``."""
LAST = "oocdl.step"
"""The file beside the events that has the last step of ours."""


class TensorBoard(CommittedRows):
    """Writes numbers of each committed step for TensorBoard (``tensorboard --logdir FOLDER``).

    ``folder`` is ``tensorboard`` in the run's directory by default. A run that goes on, or starts anew, does
    so in TensorBoard's curves. Raises StoreError if the folder cannot be written.

    >>> run = oocdl.fit("unet.onnx", "brain.zarr", callbacks=[TensorBoard("logs/unet")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.given = None if folder is None else path_of("folder", folder).absolute()
        self._file = Path()

    def begin(self, event: RunStarted) -> int:
        """Begin another file; of earlier ones TensorBoard leaves out steps that were rolled back."""
        folder = self.given or Path(event.workdir) / "tensorboard"
        with reporting(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = folder / LAST
            told = known.read_bytes() if known.is_file() else b""
            last = min(int(told), event.done) if told.isdigit() else 0
            write_text(known, str(last))
            now = time.time()
            # TensorBoard reads files in the order of their names.
            stamp = f"{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
            self._file = folder / f"events.out.tfevents.{stamp}{ENDING}"
            start = _field(SESSION_LOG, _field(1, 1))  # status: START
            version = _field(FILE_VERSION, b"brain.Event:2")
            self._file.write_bytes(_record(_event(now, 0, version)) + _record(_event(now, last + 1, start)))
        return last

    def write(self, rows: Sequence[Row]) -> None:
        """Add records."""
        data = b"".join(_record(_event(row.unix_seconds, row.step, _summary(row))) for row in rows)
        with reporting(self._file):
            with self._file.open("ab") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            write_text(self._file.with_name(LAST), str(rows[-1].step))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def _field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message: a whole number as varint, a float with 64 bits, or bytes."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _event(unix_seconds: float, step: int, what: bytes) -> bytes:
    return _field(WALL_TIME, unix_seconds) + _field(STEP, step) + what


def _summary(row: Row) -> bytes:
    # A value has a float32, beyond whose range it is infinite.
    values = (
        _field(1, _field(1, name.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", c_float(number).value))
        for name, number in row.numbers().items()
    )
    return _field(SUMMARY, b"".join(values))


def _masked_crc(data: bytes) -> bytes:
    crc = int(google_crc32c.value(data))
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)
