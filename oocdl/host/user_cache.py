"""Keeps what is costly to find in the user's cache: one file an entry, sealed, and replaced as a whole.

An entry that is damaged, or that another user may have written, does not count.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from oocdl.errors import InputError
from oocdl.host.paths import cache_folder


@dataclass(frozen=True)
class UserCache:
    """Entries of one ``kind``, a plural, in a folder of that name; those used longest ago are removed."""

    kind: str
    most_entries: int
    _failed: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    def read(self, key: str) -> bytes | None:
        """Return an entry, or None; warns in one line if it does not count."""
        try:
            path = self._path_of(key)
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & 0o022:
                    raise ValueError("another user may have written it")
                seal, data = file.readline(), file.read()
            if seal != _seal(key, data):
                raise ValueError("its digest does not match")
            with suppress(OSError):  # it can only be read
                os.utime(path)
        except (FileNotFoundError, NotADirectoryError, InputError):
            return None
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} does not count, and is made anew: {error}", stacklevel=2)
            return None
        return data

    def write(self, key: str, data: bytes) -> None:
        """Add an entry, or replace it; warns in one line if it cannot be kept, and then tries no more."""
        if self._failed.is_set():
            return
        try:
            path = self._path_of(key)
            partial = path.with_name(f"{key}.{os.getpid()}.{threading.get_ident()}")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(_seal(key, data) + data)
                partial.chmod(0o600)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            entries = list(os.scandir(path.parent))
            if len(entries) > self.most_entries:
                kept = self.most_entries * 7 // 8  # so that this is seldom
                with suppress(FileNotFoundError):  # another process removes them, too
                    for old in sorted(entries, key=lambda one: one.stat().st_mtime)[:-kept]:
                        os.unlink(old)
        except (OSError, InputError) as error:
            self._failed.set()
            warnings.warn(f"{self.kind} cannot be kept: {error}", stacklevel=2)

    def _path_of(self, key: str) -> Path:
        return cache_folder() / self.kind / key


def _seal(key: str, data: bytes) -> bytes:
    return f"{hashlib.sha256(key.encode() + data).hexdigest()}\n".encode()
