"""An array "x" as a dataset stores it, opened; and what may become of a file meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zarr

from oocdl.storage.dataset.dataset import DataArray, open_dataset


def write_x(path: Path, x: Any = None, zarr_format: int = 3, **options: Any) -> Path:
    """A Zarr group with this array; ``options`` of ``create_array``."""
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)  # type: ignore[arg-type]
    group.create_array("x", data=x, **options)
    return path


def opened(source: Any) -> DataArray:
    """The array of a dataset."""
    return open_dataset(source, names=["x"]).arrays["x"]


def chunk_files(path: Path) -> list[Path]:
    """Files of the array's chunks in C order, if all indices have one digit."""
    return sorted(file for file in (path / "x").rglob("*") if file.is_file() and file.name[-1].isdigit())


def flip(file: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip a bit of a byte, by default of the one in the middle."""
    content = bytearray(file.read_bytes() or b"\0")
    content[len(content) // 2 if at is None else at] ^= 1 << bit
    file.write_bytes(content)


def shorten(file: Path, how: str) -> None:
    """Leave it "empty", "half", or without its "last byte"."""
    size = file.stat().st_size
    os.truncate(file, {"empty": 0, "half": size // 2, "last byte": size - 1}[how])


NO_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
}
"""What may be in the place of a file."""
