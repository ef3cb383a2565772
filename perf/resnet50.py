"""Seconds a step of ResNet-50, 32 images of 224²: oocdl at parts of what PyTorch takes in memory (root).

python perf/resnet50.py [--toy] [--batch 32] [--only 'oocdl 1/4'] [--plot resnet50.png]
"""

from __future__ import annotations

from bench import Bench, options, run, settle
from cases import resnet
from variants import at, checkpointing, hooks, in_core

VARIANTS = (
    *in_core(),
    checkpointing(),
    hooks(),
    *(at(part) for part in (1, 2, 4, 8)),
    *in_core("bfloat16"),
    at(4, "bfloat16"),
)


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.add_argument("--batch", type=int, help="images; default: 32 (in a toy 2)")
    args = settle(made)
    batch = args.batch or (2 if args.toy else 32)
    blocks, width, size, classes = ((1, 1), 8, 32, 10) if args.toy else ((3, 4, 6, 3), 64, 224, 1000)
    run(Bench(resnet(blocks, width, batch, size, classes), VARIANTS), args)


if __name__ == "__main__":
    main()
