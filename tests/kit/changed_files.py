"""Reads and plans changed ONNX files, in a process of its own: ``python -m tests.kit.changed_files 0 600``.

Each is planned, or refused by a typed error. Prints, as JSON, how many ended how, and what else happened.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import zarr

from oocdl.config import make_settings
from oocdl.errors import GraphError, OocdlError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from oocdl.training.job import job_of
from tests.kit.changed_models import changed, models

MOST_BYTES, MOST_CPU_SECONDS, SAMPLES = 1 << 30, 5.0, 2
OPTIONS = {"loss": "mse", "memory": "512MiB", "engine": "numpy", "threads": 1}


class TooSlow(BaseException):
    """A file has taken longer than any may."""


def _too_slow(*_: object) -> None:
    raise TooSlow


@contextmanager
def little_time() -> Iterator[None]:
    """What takes longer inside is broken off."""
    signal.signal(signal.SIGVTALRM, _too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def try_all(seeds: Iterable[int], tried: Callable[[int], tuple[str, str]]) -> None:
    """Try seeds; prints as JSON how many ended how, and what was wrong.

    ``tried`` returns how one ended, and what is wrong with that, or "".
    """
    ended: Counter[str] = Counter()
    wrong: dict[int, str] = {}
    for seed in seeds:
        how, why = tried(seed)
        ended[how] += 1
        if why:
            wrong[seed] = why
            print(f"seed {seed}: {why}", file=sys.stderr, flush=True)
    print(json.dumps({"ended": ended, "wrong": wrong}))


@cache
def _data(name: str, folder: Path) -> Path:
    """A dataset of which there are no bytes, that the model fits before it is changed."""
    path = folder / f"{name}.zarr"
    group = zarr.open_group(str(path), mode="w")
    for port in (*inspect_of(name, folder).inputs, *inspect_of(name, folder).outputs):
        shape = (SAMPLES, *(dim if isinstance(dim, int) else 2 for dim in port.dims[1:]))
        group.create_array(port.name.replace("/", "_"), shape=shape, dtype=port.dtype, chunks=(1, *shape[1:]))
    return path


@cache
def inspect_of(name: str, folder: Path) -> Any:
    """The model before it is changed."""
    path = folder / f"{name}.onnx"
    path.write_bytes(models()[name].SerializeToString())
    return inspect_onnx(path)


def tried(seed: int, folder: Path, progress: Path | None = None) -> tuple[str, str]:
    """Plan the file of a seed; returns how that ended, and the traceback where it must not end so."""
    if progress is not None:
        progress.write_text(str(seed))
    name, content = changed(seed)
    data, path = _data(name, folder), folder / "changed.onnx"
    path.write_bytes(content)
    try:
        with little_time():
            opened = inspect_onnx(path)
            shapes = {p.name: tuple(d if isinstance(d, int) else 2 for d in p.dims) for p in opened.inputs}
            opened.bind(RULES, shapes, training=False)
            job_of(path, str(data), make_settings(**OPTIONS)).plan()
        return "planned", ""
    except GraphError as error:
        return "a defect", str(error)
    except OocdlError as error:
        if "\n" in str(error) or not str(error):
            return "an error that is not one line", str(error)
        return type(error).__name__, ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        return "internal error", f"{name}: " + traceback.format_exc()


def main(first: int, last: int, progress: Path | None = None) -> None:
    """Try the files of seeds."""
    warnings.simplefilter("ignore")
    os.environ |= {"OOCDL_PLAN_CACHE": "off", "OOCDL_MEASURE": "off"}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for name in models():
            _data(name, folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try_all(range(first, last), partial(tried, folder=folder, progress=progress))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
