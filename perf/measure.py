"""What the benches share: run one measurement in a process and a cgroup of its own, tell the result."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from cage import NoCage, Outcome, cage, watch

T = TypeVar("T")
MIB = 1 << 20
NARROW = 8
"""Columns of a table that is printed row by row are at least so wide."""


def short_parser(text: str | None) -> argparse.ArgumentParser:
    """The options that all benches have."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--toy", action="store_true", help="tiny sizes and no cgroup, for tests")
    made.add_argument("--json", type=Path, help="also write everything here")
    return made


def parser(text: str | None) -> argparse.ArgumentParser:
    """And those of all benches that train."""
    made = short_parser(text)
    made.add_argument("--engine", default="auto", help="auto, torch or onnxruntime")
    made.add_argument("--timeout", type=float, default=3600, help="seconds for one process")
    made.add_argument("--workdir", help="folder on a disk for data, runs and spill; default: the system's")
    return made


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def one_process(
    script: str,
    words: Mapping[str, Any],
    limit_bytes: int | None,
    timeout: float = 3600,
    env: Mapping[str, str] | None = None,
    disk: Path | None = None,
) -> Outcome:
    """One process of a script of this folder; inside a cgroup of ``limit_bytes`` unless that is None.

    Environment and disk are as ``cage.watch`` has them.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(words)]
    try:
        with cage(limit_bytes) if limit_bytes is not None else nullcontext() as place:
            return watch(command, place, env, timeout, disk)
    except NoCage as error:
        raise SystemExit(str(error)) from error


def one_run(
    model: Path, dataset: Path, limit_bytes: int | None, timeout: float = 3600, **options: Any
) -> Outcome:
    """One process of ``one_run.py``, and what it takes of the model's disk."""
    words = {"model": str(model), "dataset": str(dataset), **options}
    return one_process("one_run.py", words, limit_bytes, timeout, disk=model.parent)


def failure(outcome: Outcome) -> str:
    """Why a process has no result, in a few words; empty if it has."""
    if outcome.oom_kills:
        return "killed for memory"
    if outcome.code:
        lines = outcome.message.splitlines() or ["no message"]
        return f"failed ({outcome.code}): {lines[-1]}"
    refused = outcome.result.get("refused")
    return f"refused: {refused}" if refused else ""


def result(outcome: Outcome, what: str = "") -> Mapping[str, Any]:
    """What a process found; the bench ends if it found nothing."""
    if why := failure(outcome):
        raise SystemExit(f"{what}{why}")
    return outcome.result


def later(outcome: Outcome, name: str) -> float | None:
    """Median of a figure that a run has for each step, the first step left out; None without a run."""
    numbers = outcome.result.get(name)
    return median(numbers[1:] or numbers) if numbers else None


@contextmanager
def folder(args: argparse.Namespace) -> Iterator[Path]:
    """An empty folder for one case; gone afterwards."""
    with TemporaryDirectory(dir=args.workdir) as name:
        yield Path(name)


def report(
    args: argparse.Namespace, heads: Sequence[str], rows: Sequence[Sequence[str]], found: Sequence[Any]
) -> None:
    """Print the table; write everything that was found to ``--json``."""
    print(markdown(heads, rows))
    write_json(args, found)


def write_json(args: argparse.Namespace, found: Sequence[Any]) -> None:
    """Write everything that was found to ``--json``, if that was asked for."""
    if args.json:
        data = [asdict(item) if is_dataclass(item) and not isinstance(item, type) else item for item in found]
        arguments = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"arguments": arguments, "rows": data}, indent=1))


def print_top(heads: Sequence[str]) -> None:
    """Of a table whose rows are printed as they come: a bench may take hours."""
    print(top(heads, [max(len(head), NARROW) for head in heads]), flush=True)


def print_row(heads: Sequence[str], cells: Sequence[str]) -> None:
    """One more row of it."""
    print(line(cells, [max(len(head), NARROW) for head in heads]), flush=True)


def measure_rates(args: argparse.Namespace) -> None:
    """Measure this machine's rates where nobody has: predicted seconds would be nominal. Not in a toy."""
    if not args.toy:
        # In a process of its own: the engine shall not be loaded in the one that watches.
        code = (
            "import sys; from pathlib import Path; from oocdl.planning.calibrate import rates_for; "
            "rates_for(sys.argv[1], Path(sys.argv[2]))"
        )
        with folder(args) as place:
            subprocess.run([sys.executable, "-c", code, args.engine, str(place)], check=True)


def limit_of(args: argparse.Namespace, budget_bytes: int) -> int | None:
    """Of the cgroup: exactly the budget; none in a toy."""
    return None if args.toy else budget_bytes


def mib(nbytes: float) -> str:
    """For a cell."""
    return f"{nbytes / MIB:.0f}"


def gb(nbytes: float | None) -> str:
    """For a cell; what is not known is said to be so."""
    return "not planned" if nbytes is None else f"{nbytes / 1e9:.3f}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    return "\n".join([top(heads, widths), *(line(row, widths) for row in rows)])


def top(heads: Sequence[str], widths: Sequence[int]) -> str:
    """The heads, and the rule below them."""
    rule = "|" + "|".join("-" * (width + 1) + (":" if n else "-") for n, width in enumerate(widths)) + "|"
    return f"{line(heads, widths)}\n{rule}"


def line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """One row; a cell that is wider than its column makes the row longer."""
    texts = [c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "| " + " | ".join(texts) + " |"
