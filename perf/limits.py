"""What this machine can do at most: products and convolutions a second, and the disk's bytes.

    python perf/limits.py '{"folder": ".", "threads": 2, "precisions": ["float32", "bfloat16"]}'

prints one line of JSON. The other benches call it in their own rounds: a roofline holds for the
machine as it was while the rest was measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oocdl.config import parse_bytes
from oocdl.graph.ir.array_layout import PAGE_BYTES
from oocdl.storage.cache.direct_io import direct_flag, read_box, write_array

Bytes = npt.NDArray[np.uint8]

THREADS = (1, 2, 3, 4)
SECONDS = 0.5
"""Of every product and convolution; the fastest call counts."""
READS = 0.6
"""Part of the chunks that are read where both is done at once."""
VOLUMES = ((16, 32, 128, 128), (32, 32, 64, 64), (64, 32, 32, 32), (128, 16, 16, 16))
"""Channels and space of the convolutions that are tried."""
IMAGES = ((64, 56, 56), (256, 14, 14))


@dataclass(frozen=True)
class Speed:
    """Of the disk alone, in bytes a second."""

    threads: int
    read: float
    written: float
    both: float
    """Read and written at once, in the step's proportion."""


def empty_at_a_page(nbytes: int) -> Bytes:
    """Memory that direct input can go to."""
    raw = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + nbytes]


def aligned(nbytes: int) -> Bytes:
    """Noise that begins at a page, as the arrays of the tier do."""
    made = empty_at_a_page(nbytes)
    made[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    return made


def disk(place: Path, chunk_bytes: int, count: int) -> list[Speed]:
    """Write ``count`` chunks over old ones and read them, by each number of threads."""
    flag = direct_flag(place)
    files = [place / f"chunk{number}" for number in range(count)]
    arrays = [aligned(chunk_bytes) for _ in range(max(THREADS))]
    for file in files:  # the spill writes over its old files, too
        write_array(file, arrays[0], flag)

    def write(thread: int, file: Path) -> None:
        write_array(file, arrays[thread], flag)

    def read(thread: int, file: Path) -> None:
        read_box(file, (chunk_bytes,), ((0, chunk_bytes),), arrays[thread], flag)

    def either(thread: int, file: Path) -> None:
        number = files.index(file)
        turn = int((number + 1) * READS) > int(number * READS)
        (read if turn else write)(thread, file)

    found = [
        Speed(threads, *(rate(move, files, threads, chunk_bytes) for move in (read, write, either)))
        for threads in THREADS
    ]
    for file in files:
        file.unlink()
    return found


def rate(move: Callable[[int, Path], None], files: list[Path], threads: int, chunk_bytes: int) -> float:
    """Bytes a second of moving all files."""

    def part(thread: int) -> None:
        for file in files[thread::threads]:
            move(thread, file)

    with ThreadPoolExecutor(threads) as pool:
        begun = time.monotonic()
        list(pool.map(part, range(threads)))
        return len(files) * chunk_bytes / (time.monotonic() - begun)


def fastest(call: Callable[[], Any], flops: float, seconds: float) -> float:
    """FLOPs a second of the fastest of as many calls as there is time for, three at least."""
    call()
    took, ends = list[float](), time.monotonic() + seconds
    while len(took) < 3 or time.monotonic() < ends:
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return flops / min(took)


def arithmetic(precision: str, edge: int, seconds: float) -> dict[str, float]:
    """FLOPs a second of the largest product, and of the fastest convolution of several kinds."""
    import torch
    from torch.nn import functional

    dtype = getattr(torch, precision)
    left, right = (torch.randn(edge, edge, dtype=dtype) for _ in range(2))
    product = fastest(lambda: left @ right, 2.0 * edge**3, seconds)
    best, least = 0.0, max(edge // 16, 1)
    for channels, *space in (*VOLUMES, *IMAGES):
        convolve = functional.conv3d if len(space) == 3 else functional.conv2d
        last = torch.channels_last_3d if len(space) == 3 else torch.channels_last
        samples = 1 if len(space) == 3 else 8
        x = torch.randn(samples, channels, *(min(extent, least) for extent in space), dtype=dtype)
        w = torch.randn(channels, channels, *(3,) * len(space), dtype=dtype)
        flops = 2.0 * x.numel() * channels * 3 ** len(space)
        for layout in (torch.contiguous_format, last):
            a, b = x.to(memory_format=layout), w.to(memory_format=layout)
            best = max(best, fastest(lambda f=convolve, a=a, b=b: f(a, b, padding=1), flops, seconds))  # type: ignore[misc]
    return {"product": product, "convolution": best}


def measure(
    folder: Path, threads: int, precisions: Sequence[str], toy: bool = False, total: str = "1GiB"
) -> dict[str, Any]:
    """All of it, as JSON holds it: by precision, and the disk by threads."""
    import torch

    torch.set_num_threads(threads)
    chunk, whole = (64 << 10, 1 << 20) if toy else (16 << 20, parse_bytes(total))
    found: dict[str, Any] = {}
    for name in precisions:
        # At full size PyTorch had not ended after 15 minutes where the processor has no such arithmetic.
        slow = name == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        found[name] = arithmetic(name, *((64, 0.0) if toy or slow else (2048, SECONDS)))
    found["disk"] = [asdict(speed) for speed in disk(folder, chunk, whole // chunk)]
    return found


def main() -> None:
    """Parse, measure, print."""
    words = json.loads(sys.argv[1])
    print(json.dumps(measure(Path(words.pop("folder")), **words)))


if __name__ == "__main__":
    main()
