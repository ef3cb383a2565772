"""One worker and two, of one core each: threads of one process, and processes of a Dask cluster.

A U-Net, each process with half of what PyTorch takes in memory; and two with a quarter each, which together
have what one has. All of a variant's processes are in one memory cgroup of their budgets and 1 GiB more
for the process that hands out the work (root).

    python perf/scaling.py [--toy] [--base 16] [--size 128] [--plot scaling.png]
"""

from __future__ import annotations

from dataclasses import replace

from bench import Bench, options, run, settle
from cases import unet
from variants import Variant, at, in_core


def processes(count: int, part: int) -> Variant:
    """oocdl on a cluster of so many processes."""
    one = at(part)
    name = f"{count} process{'es' * (count > 1)} (1/{part} each)"
    return replace(one, name=name, workers=count)


def threads(count: int, part: int) -> Variant:
    """oocdl in one process."""
    one = at(part, threads=count)
    return replace(one, name=f"{count} thread{'s' * (count > 1)} (1/{part})")


VARIANTS = (
    *in_core(), threads(1, 2), threads(2, 2), processes(1, 2), processes(2, 2), processes(2, 4),
)  # fmt: skip
PAIRS = (
    (threads(2, 2).name, threads(1, 2).name),
    (processes(2, 2).name, processes(1, 2).name),
    (processes(2, 4).name, processes(1, 2).name),
)


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.add_argument("--size", type=int, help="edge of the cube; default: 128 (in a toy 16)")
    made.add_argument("--base", type=int, help="channels on top; default: 16 (in a toy 2)")
    args = settle(made)
    args.size, args.base = args.size or (16 if args.toy else 128), args.base or (2 if args.toy else 16)
    run([Bench(unet(args.base, args.size, 2 if args.toy else 3), VARIANTS, pairs=PAIRS)], args)


if __name__ == "__main__":
    main()
