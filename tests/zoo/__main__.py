"""All networks, in all ways: ``python -m tests.zoo [PATTERN ...]``. Goes on where it was stopped.

Each network runs in a process of its own. Results are lines of JSON in ``--results``; what is there is not
run again. At the end `docs/reference/networks.md` is written from them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.kit.code import ROOT
from tests.zoo.networks import NETWORKS
from tests.zoo.trial import FLOOR32, FLOOR64, MOVES, NOISE, WAYS

PAGE = ROOT / "docs" / "reference" / "networks.md"
HEAD = f"""# Networks

Written by `python -m tests.zoo` (see `tests/zoo/README.md`): networks of libraries, with random weights,
exported in four ways, trained by oocdl for three steps in float64, and in float32 with every layer cut in
the batch, beside PyTorch in float64.

- **equal**: losses are PyTorch's, in float64 within {FLOOR64:g}, in float32 within {NOISE} times
  what PyTorch's own losses of float32 are off (or {FLOOR32:g}); where that is not so, the most that PyTorch's
  are off at each step in {MOVES} repetitions counts, with weights moved by some bits.
- **announced**: oocdl said before the first step that the file trains another network, with the cure.
- **not exported**: the exporter of PyTorch fails.

"""

Row = Mapping[str, Any]


def word(row: Row) -> str:
    """What came of a way, in a word."""
    stage = str(row["stage"])
    if stage in ("different", "refused in train") and row["announced"]:
        return "announced"
    return {"failed in export": "not exported"}.get(stage, stage)


def reason(row: Row) -> str:
    """Why, on one line and without numbers of nodes."""
    text = str(row.get("why", "")).split("\n")[0].replace("|", "/")
    return re.sub(r"\s+", " ", text)[:160]


def _steps(errors: Iterable[float]) -> str:
    return ", ".join(f"{error:.1e}" for error in errors)


def page(rows: Iterable[Row]) -> str:
    """The page."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["network"], {})[row["way"]] = row
    run = f"{len(found)} of {len(NETWORKS)} networks have been run; an empty cell is a way that has not.\n"
    lines = [HEAD + run, "| | " + " | ".join(WAYS) + " |", "|---|" + "---:|" * len(WAYS)]
    counts = {way: Counter(word(each[way]) for each in found.values() if way in each) for way in WAYS}
    for kind in sorted(set().union(*counts.values())):
        lines.append(f"| {kind} | " + " | ".join(str(counts[way][kind] or "") for way in WAYS) + " |")
    lines += ["", "| network | " + " | ".join(WAYS) + " | planned in s |", "|---|" + "---|" * (len(WAYS) + 1)]
    for name, each in sorted(found.items()):
        files = [row for way, row in each.items() if way != "from_torch"]  # else exporting counts, too
        seconds = [row["plan_seconds"] for row in files if "plan_seconds" in row]
        cells = [word(each[way]) if way in each else "" for way in WAYS]
        least = f"{min(seconds):.1f}" if seconds else ""
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {least} |")
    reasons = []
    for name, each in sorted(found.items()):
        why = {reason(row): way for way, row in reversed(each.items()) if reason(row)}
        reasons += [f"- {name}, {way}: {text}" for text, way in why.items()]
    lines += ["", "Why not:", "", *reasons] if reasons else []
    kinds = {"float64": ("noise64", "errors64"), "float32": ("noise", "errors32")}
    amplified = [
        f"- {name}, {way}, {dtype}: PyTorch's are off by {_steps(row[noise])}, "
        f"oocdl's by {_steps(row[errors])}"
        for name, each in sorted(found.items())
        for way, row in each.items()
        for dtype, (noise, errors) in kinds.items()
        if noise in row
    ]
    lines += ["", "Losses of each step where weights were moved:", "", *amplified] if amplified else []
    return "\n".join(lines) + "\n"


def read(path: Path) -> list[Row]:
    """The results that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def try_one(name: str, ways: list[str], timeout: float) -> list[str]:
    """Lines of JSON of a network; a process that does not end is a result, too."""
    command = [sys.executable, "-m", "tests.zoo.trial", name, *ways]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
        text, stage = done.stdout, f"ended by {done.returncode}"
    except subprocess.TimeoutExpired as error:
        text, stage = (error.stdout or b"").decode(), f"not done in {timeout:.0f} s"
    lines = [line for line in text.splitlines() if line.startswith('{"network"')]
    rest = ways[len(lines) :]
    return lines + [
        json.dumps({"network": name, "way": way, "stage": stage, "announced": []}) for way in rest
    ]


def main() -> None:
    """Run what is missing, and write the page."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("patterns", nargs="*", default=["*"], help="of names, such as 'timm/*'")
    made.add_argument("--results", type=Path, default=Path("zoo.jsonl"))
    made.add_argument("--ways", default=",".join(WAYS), help="which, by commas")
    made.add_argument("--timeout", type=float, default=600, help="seconds for one network")
    made.add_argument("--page", type=Path, default=PAGE)
    args = made.parse_args()
    there = {(row["network"], row["way"]) for row in read(args.results)}
    for name in NETWORKS:
        ways = [way for way in args.ways.split(",") if (name, way) not in there]
        if ways and any(fnmatchcase(name, pattern) for pattern in args.patterns):
            lines = try_one(name, ways, args.timeout)
            with args.results.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
            print(name, *(word(json.loads(line)) for line in lines), sep="\t", flush=True)
    args.page.write_text(page(read(args.results)))


if __name__ == "__main__":
    main()
