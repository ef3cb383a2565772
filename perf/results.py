"""What rounds have found: rows with practicality and rooflines, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cage import Outcome
from measure import failure, gb, markdown, mib
from variants import Variant


@dataclass
class Limits:
    """What the machine can do, measured before and after each round, and what a step has to do.

    The best of all counts: a roofline is what nothing can be faster than.
    """

    flops: int | None = None
    found: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, found: Mapping[str, Any]) -> None:
        """Once more."""
        self.found.append(found)

    def speed(self, precision: str, kind: str) -> float:
        """FLOPs a second of a product or a convolution."""
        return float(max(one[precision][kind] for one in self.found))

    def arithmetic(self, precision: str) -> float:
        """FLOPs a second, by the faster of both."""
        return max(self.speed(precision, kind) for kind in ("product", "convolution"))

    @property
    def disk(self) -> float:
        """Bytes a second, read and written at once, by the best number of threads."""
        return float(max(speed["both"] for one in self.found for speed in one["disk"]))


@dataclass
class Row:
    """A variant and what was measured of it; medians of all counted steps, None where there are none."""

    variant: Variant
    outcomes: Sequence[Outcome]
    budget_bytes: int | None
    anonymous_bytes: int
    why: str
    """Empty if no process has failed or was refused."""
    seconds: float | None = None
    least: float | None = None
    most: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None
    flop_seconds: float | None = None
    """What the step's FLOPs take at the machine's best."""
    disk_seconds: float | None = None
    """What its bytes take the disk alone."""
    practicality: float | None = None
    """Seconds of the fastest PyTorch in memory, in the same precision, over its own."""
    first_off: float | None = None
    """The first loss beside PyTorch's, as a part of it."""
    loss_off: float | None = None
    """The one that is furthest off."""

    def practicality_beside(self, baseline: float | None) -> None:
        """Set beside seconds of PyTorch."""
        if baseline and self.seconds is not None:
            self.practicality = baseline / self.seconds

    def loss_beside(self, true: Sequence[float] | None) -> None:
        """Set beside losses of PyTorch."""
        if true is not None and not self.why:
            found = [outcome.result["losses"] for outcome in self.outcomes]
            off = [
                [abs(loss - wanted) / abs(wanted) for loss, wanted in zip(losses, true, strict=True)]
                for losses in found
            ]
            self.first_off, self.loss_off = max(losses[0] for losses in off), max(map(max, off))

    @property
    def roofline(self) -> float | None:
        """Seconds that nobody can do it faster in, on this machine."""
        known = [seconds for seconds in (self.flop_seconds, self.disk_seconds) if seconds is not None]
        return max(known) if known else None


def row_of(variant: Variant, outcomes: Sequence[Outcome], budget: int | None, limits: Limits) -> Row:
    """The row of a variant, without what it is compared with."""
    why = next((text for outcome in outcomes if (text := failure(outcome))), "")
    taken = max(outcome.anonymous_bytes for outcome in outcomes)
    row = Row(variant, outcomes, budget, taken, why)
    if why:
        return row

    def later(name: str) -> list[float]:
        return [number for outcome in outcomes for number in outcome.result.get(name, [])[1:]]

    seconds = later("seconds")
    row.seconds, row.least, row.most = median(seconds), min(seconds), max(seconds)
    if later("spill_read"):
        row.read_bytes, row.written_bytes = median(later("spill_read")), median(later("spill_written"))
        row.disk_seconds = (row.read_bytes + row.written_bytes) / limits.disk
    if limits.flops is not None:
        row.flop_seconds = limits.flops / limits.arithmetic(variant.precision)
    return row


HEADS = (
    "", "s/step", "least to most", "practicality", "budget MiB", "taken MiB", "read GB", "written GB",
    "roofline s", "bound by", "share %", "first loss off", "worst",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""

    def cell(number: float | None, form: str = ".2f") -> str:
        return "-" if number is None else format(number, form)

    budget = mib(row.budget_bytes) if row.budget_bytes else "-"
    if row.seconds is None:
        return (row.variant.name, row.why.partition(":")[0], "-", "-", budget, *("-",) * 8)
    moved = [gb(n) if n is not None else "-" for n in (row.read_bytes, row.written_bytes)]
    roofline, bound, share = row.roofline, "-", None
    if roofline is not None:
        share = 100 * roofline / row.seconds
        bound = "disk" if roofline == row.disk_seconds else "FLOPs"
    return (
        row.variant.name, cell(row.seconds), f"{cell(row.least)} to {cell(row.most)}", cell(row.practicality),
        budget, mib(row.anonymous_bytes), *moved, cell(roofline), bound, cell(share, ".0f"),
        cell(row.first_off, ".0e"), cell(row.loss_off, ".0e"),
    )  # fmt: skip


def show(name: str, rows: Sequence[Row], limits: Limits) -> None:
    """The table, and what has to be said beside it."""
    print(f"{name}: medians of {max((steps_of(row) for row in rows), default=0)} steps and fewer\n")
    print(markdown(HEADS, [cells(row) for row in rows]), "\n")
    for precision in sorted({row.variant.precision for row in rows}):
        product, convolution = (limits.speed(precision, kind) / 1e9 for kind in ("product", "convolution"))
        print(f"{precision}: {product:.0f} GFLOP/s in a product, {convolution:.0f} in a convolution")
    flops = "not known" if limits.flops is None else f"{limits.flops / 1e9:.0f} G"
    print(f"disk: {limits.disk / 1e9:.2f} GB/s, read and written at once; FLOPs of a step: {flops}")
    for row in rows:
        if row.why:
            print(f"{row.variant.name}: {row.why}")


def steps_of(row: Row) -> int:
    """How many steps count."""
    return sum(len(outcome.result.get("seconds", [])[1:]) for outcome in row.outcomes)


ALL_HEADS = (
    "network", "fastest PyTorch s", "its MiB", "least MiB", "oocdl", "s/step", "practicality", "budget MiB",
    "taken MiB", "worst loss off",
)  # fmt: skip


def show_all(networks: Mapping[str, Sequence[Row]]) -> None:
    """One table of all networks, a line for each row of oocdl."""
    lines = []
    for name, rows in networks.items():
        for row in (row for row in rows if not row.variant.baseline):
            rivals = [r for r in rows if r.variant.baseline and r.variant.precision == row.variant.precision]
            known = [(rival.seconds, rival.anonymous_bytes) for rival in rivals if rival.seconds]
            fastest, its = min(known, default=(0.0, 0))
            least = min((taken for _, taken in known), default=0)
            _, seconds, _, practicality, budget, taken, *_, off = cells(row)
            rival, way = (f"{fastest:.2f}", mib(its), mib(least)), row.variant.name.removeprefix("oocdl ")
            lines.append((name, *rival, way, seconds, practicality, budget, taken, off))
    print(markdown(ALL_HEADS, lines), "\n")
