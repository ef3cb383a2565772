"""Measures how fast this machine is with an engine, and how much scratch it takes; caches the rates.

Each probe runs on as many threads as there are cores, all of them at once: that is how units
run, and one thread alone would be faster. Rates are kept in the user's cache folder until the
machine or the engine changes.
"""

from __future__ import annotations

import hashlib
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from oocdl.engines.engine import Engine, get_engine, resolve
from oocdl.engines.engine_registry import channels_last_ranks
from oocdl.errors import ResourceError
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.program_cost import program_flops
from oocdl.graph.ir.speed import Heavy, RateTable, Scale
from oocdl.host.heap import give_back_freed_memory, keep_freed_memory, trim
from oocdl.host.limits import cores, most_taken_bytes
from oocdl.host.main_heap import MainHeapThreads
from oocdl.host.paths import cache_folder
from oocdl.ops import RULES
from oocdl.planning.cost_model import FREE_BYTES_PER_SECOND, NOMINAL, Rates, moved_bytes
from oocdl.planning.machine import machine_facts
from oocdl.planning.probes import (
    bfloat16_probes,
    computing_probes,
    overhead_program,
    probe_program,
    rest_program,
    streaming_probes,
)
from oocdl.storage.cache.direct_io import direct_flag, read_box, write_array
from oocdl.storage.cache.page_pool import Pool
from oocdl.storage.checksums import sealed, unsealed
from oocdl.storage.files import write_text

FORMAT_VERSION = 11
"""Version of the file and of what the probes measure: rates of another version are measured anew."""
DISK_FILE_BYTES = 8 << 20
"""Size of each file that the disk is measured with: that of a chunk."""
DISK_BYTES = 256 << 20
"""Bytes written to the disk, and read from it, in all."""
MEASURE_TWICE_SECONDS = 12
"""Time of all probes below which they are measured twice and the better result counts: other processes may
use the machine for a while."""
TIMED_CALLS = 3
"""Calls of a probe that count, on every thread."""
SCRATCH_NOISE_BYTES = 256 << 10
"""Largest difference in the scratch of one program from one run to the next."""
FULL_SIZE_THREADS = 4
"""Threads above which arrays of probes are smaller, so that measuring takes a few hundred MiB at most."""


def rates_for(engine: str = "auto", folder: Path | None = None, again: bool = False) -> Rates:
    """The rates of this machine with ``engine``: those in the cache, else measured now (half a minute).

    The disk is measured in ``folder`` (default: the current one). ``again``: whether those in the cache are
    replaced. Warns in one line if there is a cache file that cannot be used.
    """
    found = None if again else load_rates(engine)
    if found is None:
        found = measure_rates(engine, folder)
        store_rates(engine, found)
    return found


def known_rates(engine: str) -> Rates:
    """The rates that were measured on this machine with ``engine``, else the nominal ones."""
    return load_rates(engine) or NOMINAL


def load_rates(engine: str = "auto") -> Rates | None:
    """The rates in the cache; None if there are none, or if they belong to another machine or engine.

    Warns in one line if there is a cache file that cannot be used.
    """
    engine = resolve(engine)
    path = cache_path(engine)
    try:
        body = unsealed("rates", path.read_text())
        if body["facts"] != _facts(engine):
            way_out = "oocdl info --machine measures again"
            warnings.warn(f"the rates in {path} are outdated and do not count; {way_out}", stacklevel=2)
            return None
        return Rates.from_json(body["rates"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        warnings.warn(f"the rates in {path} are damaged and do not count: {reason}", stacklevel=2)
        return None


def store_rates(engine: str, rates: Rates) -> Path:
    """Replace the rates in the cache; returns the file. ResourceError if it cannot be written."""
    path = cache_path(resolve(engine))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        body = {"facts": _facts(resolve(engine)), "rates": rates.to_json()}
        write_text(path, sealed("rates", body))
    except OSError as error:
        raise ResourceError(
            f"cannot keep measured rates in {path.parent}: {error.strerror}; set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    return path


def cache_path(engine: str) -> Path:
    """The file in the cache of this host's rates with ``engine``."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:12]
    return cache_folder() / f"rates-{host}-{engine.replace(':', '-')}.json"


def _facts(engine: str) -> dict[str, Any]:
    """Return the facts that the rates depend on."""
    here = {"format": FORMAT_VERSION, "host": platform.node(), "cores": cores(), "engine": engine}
    return here | machine_facts(engine)


def measure_rates(
    engine: str = "auto",
    folder: Path | None = None,
    scale: float = 1.0,
    disk_bytes: int = DISK_BYTES,
    threads: int | None = None,
) -> Rates:
    """Measure this machine with ``engine`` and the disk of ``folder`` (default: the current one).

    ``scale`` multiplies the sizes of the probes: less than 1 is for tests. ``threads`` are busy at once;
    None: one for each core, so that the rates are those of a core whose neighbours work, too. Measuring
    takes about half a minute, a few hundred MiB of memory, and ``disk_bytes`` of disk, which are free again
    afterwards.
    """
    keep_freed_memory()  # as a run does: what an operator takes depends on it
    threads = threads or cores()
    bench = _Bench(get_engine(engine), threads)
    short, long = (bench.seconds(overhead_program(count)) for count in (1, 21))
    bench.instruction_seconds = max((long - short) / 20, 0.0)
    bench.program_seconds = max(short - bench.instruction_seconds, 0.0)
    scale *= min(1.0, FULL_SIZE_THREADS / threads)
    begun = time.monotonic()
    sizes = Scale(scale, thin_slab_elements=bench.engine.thin_slab_elements)
    arithmetic, memory = _arithmetic(bench, computing_probes(sizes)), _memory(bench, scale)
    if time.monotonic() - begun < MEASURE_TWICE_SECONDS:
        arithmetic, memory = _arithmetic(bench, computing_probes(sizes)), _memory(bench, scale)
    scratch = _scratch_ratios(bench, computing_probes(sizes))
    if bench.engine.has_bfloat16:
        arithmetic |= _arithmetic(bench, bfloat16_probes(sizes))
        scratch |= _scratch_ratios(bench, bfloat16_probes(sizes))
    copied = bench.copy_bytes_per_second(max(int(scale * (16 << 20)), 1))
    bench.pool.shutdown()
    give_back_freed_memory()
    written, read = disk_rates(folder or Path.cwd(), disk_bytes)
    return Rates(
        arithmetic=dict(sorted(arithmetic.items())),  # as the cache lists them
        memory=dict(sorted(memory.items())),
        copy_bytes_per_second=copied,
        instruction_seconds=bench.instruction_seconds,
        program_seconds=bench.program_seconds,
        disk_read_bytes_per_second=read,
        disk_write_bytes_per_second=written,
        thin_slab_elements=sizes.thin_slab_elements,
        scratch_ratios=dict(sorted(scratch.items())),
    )


def _arithmetic(bench: _Bench, probes: Iterable[Heavy]) -> dict[str, RateTable]:
    """Rates of the heavy operators by kind and size, from the mean time of an operation of each probe."""
    found: dict[str, dict[int, list[float]]] = {}
    for kind, size, probe in probes:
        program = probe_program(probe, bench.channels_last_ranks)
        each = found.setdefault(kind, {}).setdefault(size, [])
        each.append(bench.net_seconds(program) / program_flops(program, RULES))
    return {
        kind: tuple((size, 1 / fmean(each)) for size, each in sorted(table.items()))
        for kind, table in found.items()
    }


def _scratch_ratios(bench: _Bench, probes: Iterable[Heavy]) -> dict[str, RateTable]:
    """Return scratch taken over scratch told, by kind and size of heavy operators; only kinds above 1."""
    found: dict[str, dict[int, float]] = {}
    for kind, size, probe in probes:
        ratio = bench.scratch_ratio(probe_program(probe, bench.channels_last_ranks))
        each = found.setdefault(kind, {})
        each[size] = max(ratio, each.get(size, 1.0))
    return {kind: tuple(sorted(each.items())) for kind, each in found.items() if max(each.values()) > 1}


def _memory(bench: _Bench, scale: float) -> dict[str, float]:
    """Bytes a second of the other operators, from the mean time of a byte over an operator's probes."""
    found: dict[str, list[float]] = {}
    for probe in streaming_probes(scale, bench.engine.has_bfloat16):
        program, rest = probe_program(probe), rest_program(probe)
        instruction = next(one for one in program.instructions if one.op == probe.op)
        moved = moved_bytes(instruction, dict(zip(program.inputs, program.input_dtypes, strict=True)))
        seconds = bench.net_seconds(program) - (bench.net_seconds(rest) if rest else 0.0)
        found.setdefault(probe.op, []).append(max(seconds / moved, 1 / FREE_BYTES_PER_SECOND))
    return {op: 1 / fmean(each) for op, each in found.items()}


class _Bench:
    """Runs programs on all threads at once and times them."""

    instruction_seconds = program_seconds = 0.0

    def __init__(self, engine: Engine, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.channels_last_ranks = channels_last_ranks(engine.name, "float32")
        self.random = np.random.default_rng(0)
        self.pool = MainHeapThreads(threads)
        self.best: dict[str, float] = {}
        """Key of a program -> the fewest seconds of all its measurements."""

    def seconds(self, program: Program) -> float:
        """Median time of a call while all threads run the same program, each on its own arrays.

        If it was measured before, the shorter of both times counts.
        """
        run = self.engine.compile(program)
        given = [self._arrays(program) for _ in range(self.threads)]
        taken = self._median([partial(run, arrays) for arrays in given])
        self.best[program.key] = min(taken, self.best.get(program.key, taken))
        return self.best[program.key]

    def net_seconds(self, program: Program) -> float:
        """``seconds`` without the overhead of the call, but never less than a tenth of them."""
        whole = self.seconds(program)
        spent = self.program_seconds + self.instruction_seconds * len(program.instructions)
        return max(whole - spent, whole / 10)

    def scratch_ratio(self, program: Program) -> float:
        """Return the ratio of the scratch that a run takes here to what the engine tells of it; at least 1.

        1 where Linux does not tell the peak of a process, and for programs that run on a device.
        """
        if self.engine.device:
            return 1.0
        run, arrays = self.engine.compile(program), self._arrays(program)
        outs = run(arrays)
        run(arrays, outs)  # what a kernel keeps from its first run is no scratch
        trim()
        taken = most_taken_bytes(partial(run, arrays, outs)) or 0
        told = self.engine.scratch_of(program, RULES).scratch_bytes
        return taken / max(told, SCRATCH_NOISE_BYTES) if taken > told + SCRATCH_NOISE_BYTES else 1.0

    def copy_bytes_per_second(self, nbytes: int) -> float:
        """Bytes a second, read and written, of copies of ``nbytes`` to new memory."""
        arrays = [np.ones(nbytes, np.uint8) for _ in range(self.threads)]
        return 2 * nbytes / self._median([array.copy for array in arrays])

    def _arrays(self, program: Program) -> list[Array]:
        """Inputs of a program: random numbers from 0 to 1, integers from 0 to 7."""
        made = []
        for shape, dtype, order in zip(
            program.input_shapes, program.input_dtypes, program.input_orders, strict=True
        ):
            # A period of odd length: as random as an operator can tell, and made in no time.
            period = self.random.random(min(prod(shape), 65521), dtype=np.float32)
            array = np.resize(period, shape)
            values = array > 0.5 if dtype == "bool" else array * (8 if dtype == "int64" else 1)
            made.append(ordered(np.empty, shape, dtype, order))
            made[-1][...] = values
        return made

    def _median(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median seconds of calls that all threads begin together, after one that does not count.

        Processor time is taken, which other processes do not add to: kernels run on the thread that calls.
        On a device they do not, and that thread waits: wall time is taken.
        """
        clock = time.perf_counter if self.engine.device else time.thread_time
        barrier = threading.Barrier(len(calls))

        def work(call: Callable[[], object]) -> list[float]:
            times: list[float] = []
            call()
            for _ in range(TIMED_CALLS):
                barrier.wait()
                begun = clock()
                call()
                times.append(clock() - begun)
            return times

        return median(taken for times in self.pool.map(work, calls) for taken in times)


def disk_rates(folder: Path, nbytes: int = DISK_BYTES) -> tuple[float, float]:
    """Bytes a second written to the disk and read from it, by files of 8 MiB, as the spill does it.

    The spill also takes checksums of what it reads, which is not measured.
    """
    size = min(DISK_FILE_BYTES, max(nbytes // 2, 1))
    data = Pool(size).empty((size,), np.uint8)
    data[...] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    try:
        with TemporaryDirectory(prefix=".oocdl-disk-", dir=folder) as name:
            flag = direct_flag(Path(name))
            paths = [Path(name, str(number)) for number in range(max(nbytes // size, 2))]
            for path in paths:
                write_array(path, data, flag)
            # Over what is there: a step finds the files of the step before.
            written = median([_timed(partial(write_array, path, data, flag)) for path in paths])
            box = ((0, size),)
            read = median([_timed(partial(read_box, path, data.shape, box, data, flag)) for path in paths])
    except OSError as error:
        raise ResourceError(
            f"cannot measure the disk of {folder}: {error.strerror}; choose a folder that can be written"
        ) from error
    return size / written, size / read


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return max(time.perf_counter() - begun, 1e-9)
