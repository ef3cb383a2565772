"""``TensorBoard``: the history of a run as event files, written without further packages.

A file is a sequence of records: 8 bytes of length, its crc32c, the data, its crc32c. The data is a protobuf
message ``Event`` (tensorflow/core/util/event.proto), of which a few fields are enough.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c

from oocdl.callbacks.committed_rows import CommittedRows, Row
from oocdl.events import RunStarted
from oocdl.host.paths import path_of
from oocdl.storage.files import reporting

ENDING = ".oocdl"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types of protobuf fields."""
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
"""Fields of an ``Event``."""
STEP_AT = 9
"""Bytes of an event before its step: the time, with its tag."""


class TensorBoard(CommittedRows):
    """Writes numbers of each committed step for TensorBoard (``tensorboard --logdir FOLDER``).

    ``folder`` is ``tensorboard`` in the run's directory by default. A run that goes on, or starts anew, does
    so in TensorBoard's curves. Raises StoreError if the folder cannot be written.

    >>> run = oocdl.fit("unet.onnx", "brain.zarr", callbacks=[TensorBoard("logs/unet")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.given = None if folder is None else path_of("folder", folder)
        self._file = Path()

    def begin(self, event: RunStarted, earlier: Sequence[Row]) -> int:
        """Begin another file; of earlier ones TensorBoard leaves out steps that were rolled back."""
        folder = self.given or Path(event.workdir) / "tensorboard"
        with reporting(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = sorted(folder.glob(f"*{ENDING}"))
            last = min(max((_last_step(path) for path in known), default=0), event.done)
            now = time.time()
            # TensorBoard reads files in the order of their names.
            stamp = f"{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
            self._file = folder / f"events.out.tfevents.{stamp}{ENDING}"
            start = _field(SESSION_LOG, BYTES, _field(1, VARINT, 1))  # status: START
            version = _field(FILE_VERSION, BYTES, b"brain.Event:2")
            self._file.write_bytes(_record(_event(now, 0, version)) + _record(_event(now, last + 1, start)))
        return last

    def write(self, rows: Sequence[Row]) -> None:
        """Add records."""
        data = b"".join(_record(_event(row.unix_seconds, row.step, _summary(row))) for row in rows)
        with reporting(self._file), self._file.open("ab") as stream:
            stream.write(data)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def _field(number: int, kind: int, value: int | float | bytes) -> bytes:
    tag = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint(len(value)) + value
    if kind == VARINT:
        return tag + _varint(int(value))
    return tag + struct.pack("<d" if kind == FIXED64 else "<f", value)


def _event(unix_seconds: float, step: int, what: bytes) -> bytes:
    return _field(WALL_TIME, FIXED64, unix_seconds) + _field(STEP, VARINT, step) + what


def _summary(row: Row) -> bytes:
    values = (
        _field(1, BYTES, _field(1, BYTES, name.encode()) + _field(2, FIXED32, number))
        for name, number in row.numbers().items()
    )
    return _field(SUMMARY, BYTES, b"".join(values))


def _masked_crc(data: bytes) -> bytes:
    crc = int(google_crc32c.value(data))
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _records(path: Path) -> Iterator[bytes]:
    """Yield the data of each whole record of a file."""
    with path.open("rb") as stream:
        while len(head := stream.read(12)) == 12 and head[8:] == _masked_crc(head[:8]):
            data = stream.read(struct.unpack("<Q", head[:8])[0])
            if stream.read(4) != _masked_crc(data):
                return
            yield data


def _last_step(path: Path) -> int:
    """Return the last step that a file of ours has numbers of; 0 if it has none."""
    last = 0
    for data in _records(path):
        end = next(at for at in range(STEP_AT + 1, len(data)) if data[at] < 128)
        if data[end + 1] == SUMMARY << 3 | BYTES:
            step = sum((byte & 127) << 7 * place for place, byte in enumerate(data[STEP_AT + 1 : end + 1]))
            last = max(last, step)
    return last
