"""Keeps the machine code of loops in the user's cache, so that a machine compiles each loop once."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path

from oocdl.errors import InputError
from oocdl.host.limits import code_digest
from oocdl.host.paths import cache_folder

MOST_ENTRIES = 4096
"""Maximum number of entries, of 4 KiB each; beyond it, the half that was used longest ago is removed."""
SEAL_BYTES = hashlib.sha256().digest_size


class CodeCache:
    """Machine code by the text that it was compiled from; ``compiler`` names what else it depends on.

    An entry that is damaged, or that another user may have written, does not count. Where the folder cannot
    be written, one warning says so.
    """

    def __init__(self, compiler: str) -> None:
        self._salt = f"{code_digest()}\0{compiler}\0".encode()
        self._folder: Path | None = None
        with suppress(InputError):  # nobody knows the home folder: nothing is kept
            self._folder = cache_folder() / "loops"

    def key(self, text: str) -> str:
        """Return the name of the entry for this text."""
        return hashlib.sha256(self._salt + text.encode()).hexdigest()

    def read(self, key: str) -> bytes | None:
        """Return the code of an entry; None if there is none that counts."""
        if self._folder is None:
            return None
        path = self._folder / key
        with suppress(OSError), path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid == os.getuid() and not status.st_mode & 0o022:
                seal, code = file.read(SEAL_BYTES), file.read()
                if seal == _seal(key, code):
                    os.utime(path)
                    return code
        return None

    def write(self, key: str, code: bytes) -> None:
        """Add an entry, or replace it."""
        if self._folder is None:
            return
        partial = self._folder / f"{key}.{os.getpid()}.{threading.get_ident()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_seal(key, code) + code)
            partial.chmod(0o600)
            partial.replace(self._folder / key)
            self._remove_old()
        except OSError as error:
            warnings.warn(f"compiled loops cannot be kept in {self._folder}: {error.strerror}", stacklevel=2)
            self._folder = None

    def _remove_old(self) -> None:
        assert self._folder is not None
        entries = list(os.scandir(self._folder))
        if len(entries) > MOST_ENTRIES:
            with suppress(FileNotFoundError):  # another process removes them, too
                ages = sorted(entries, key=lambda entry: entry.stat().st_mtime)
                for old in ages[: len(ages) // 2]:
                    os.unlink(old)


def _seal(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + code).digest()
