"""CPU seconds that the driver of a cluster takes, once a run, until members know what they do in a pass.

Networks are cut for 64 members of 16 threads, and nothing runs. The pass is turned into numbers, its calls
are assigned, strips are cut where members meet, bundles are listed, and each member's share is made and
pickled, with the garbage collector off, as in a run. Seconds are medians of all rounds; memory is what the
driver has at most beside the plan. Each network has a process of its own.

    python perf/placing.py [--toy] [--networks unet64,unet256,resnet50,gpt] [--members 64] [--rounds 3]
        [--json FILE]

To compare two trees: this file of one, with ``PYTHONPATH`` of the other.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from measure import apart, report, short_parser
from planning import peak_bytes
from slots import CASES, THREADS, TOYS, drafted

from oocdl.host.heap import uncollected
from oocdl.host.limits import anonymous_bytes
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.assignment import assigned
from oocdl.planning.hosts.exchange import Exchange, exchange, homes_of
from oocdl.planning.hosts.flat_pass import flatten
from oocdl.planning.hosts.placement import placed_on
from oocdl.planning.hosts.share import packed_shares
from oocdl.planning.machine import Machine
from oocdl.planning.passes import MAIN

PHASES = ("numbering", "assigning", "cutting", "bundling", "sharing")


@dataclass(frozen=True)
class Row:
    """One pass."""

    network: str
    members: int
    units: int
    calls: int
    arguments: int
    strips: int
    seconds: dict[str, float]
    """CPU seconds by phase, medians."""
    share_bytes: int
    """Of the largest share, pickled."""
    all_bytes: int
    """Of all shares together."""
    peak_bytes: int
    """More than the process had with the plan, at most."""

    def cells(self) -> list[str]:
        """A row of the table."""
        counts = (self.members, self.units, self.calls, self.arguments, self.strips)
        taken = [f"{self.seconds[phase]:.2f}" for phase in PHASES]
        sizes = (self.share_bytes, self.all_bytes, self.peak_bytes)
        total = f"{sum(self.seconds.values()):.2f}"
        return [self.network, *map(str, counts), *taken, total, *(f"{size / 1e6:.1f}" for size in sizes)]


HEADS = ("network", "members", "units", "calls", "arguments", "strips", *PHASES, "all s")
HEADS = (*HEADS, "MB of the largest", "MB of all", "peak MB")


def planned(network: str, members: int, toy: bool) -> CompiledPass:
    """A pass, cut for so many members."""
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # rates are nominal, whatever this machine has measured
        draft = drafted((TOYS if toy else CASES)[network], Path(folder))
        machine = Machine("torch", THREADS, 256 << 20, 32 << 30, workers=members)
        return draft.cut(machine.limits(draft.request.settings, min(machine.unit_bytes, 1 << 30)))


def placed_once(compiled: CompiledPass, members: int) -> tuple[list[float], Exchange, list[bytes]]:
    """Seconds of each phase, and what comes out."""
    marks = [time.process_time()]
    flat = flatten(compiled.graph)
    marks.append(time.process_time())
    workers = assigned(flat, members, THREADS)
    marks.append(time.process_time())
    placed = placed_on(flat, workers)
    marks.append(time.process_time())
    going = exchange(placed, homes_of([placed]), members)
    marks.append(time.process_time())
    packed = packed_shares({MAIN: going}, members)
    marks.append(time.process_time())
    return [end - begin for begin, end in pairwise(marks)], going, packed


def place_one(network: str, members: int, toy: bool, rounds: int) -> Row:
    """Plan a pass in this process, and place it a few times."""
    compiled = planned(network, members, toy)
    before = anonymous_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    with uncollected():
        taken = [placed_once(compiled, members)[0] for _ in range(rounds - 1)]
        last, going, packed = placed_once(compiled, members)
    return Row(
        network=network,
        members=members,
        units=compiled.plan.tasks,
        calls=len(compiled.graph.calls),
        arguments=len(going.placed.flat.source),
        strips=len(going.placed.strip_reads),
        seconds=dict(zip(PHASES, map(median, zip(*taken, last, strict=True)), strict=True)),
        share_bytes=max(map(len, packed)),
        all_bytes=sum(map(len, packed)),
        peak_bytes=peak_bytes() - before,
    )


def main() -> None:
    """All networks; one table."""
    made = short_parser(__doc__)
    made.add_argument("--networks", help=f"of {', '.join(CASES)}; default: all")
    made.add_argument("--members", type=int, help="default: 64 (in a toy 4)")
    made.add_argument("--rounds", type=int, default=3, help="how often each is placed")
    args = made.parse_args()
    how = args.members or (4 if args.toy else 64), args.toy, args.rounds
    networks = (args.networks or ",".join(TOYS if args.toy else CASES)).split(",")
    rows = [apart(place_one, network, *how) for network in networks]
    report(args, HEADS, [row.cells() for row in rows], rows)


if __name__ == "__main__":
    main()
