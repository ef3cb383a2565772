"""Seconds a step of a 3D U-Net: oocdl at parts of what PyTorch takes in memory, and what PyTorch can do.

oocdl runs inside a memory cgroup of exactly its budget (root): else the page cache is a hidden one. Beside
it PyTorch in memory by several allocators, with activation checkpoints, and with what is saved for the
backward pass in files; in float32 and in bfloat16.

    python perf/unet3d.py [--toy] [--base 16] [--size 128] [--only 'oocdl 1/4,*hooks*'] [--plot unet3d.png]

A part of 1/16 is measured from 192³ on: below, it is less than the process itself.
"""

from __future__ import annotations

from bench import Bench, options, run, settle
from cases import unet
from variants import Variant, as_much_as, at, checkpointing, hooks, in_core

LARGE = 192


def variants(size: int) -> tuple[Variant, ...]:
    """All of them, in the order in which they run."""
    return (
        *in_core(),
        *(way(tuned=tuned) for way in (checkpointing, hooks) for tuned in (False, True)),
        Variant("PyTorch in a cgroup of 1/4", "incore", part=4),
        *(at(part) for part in (1, 2, 4, 8, *([16] if size >= LARGE else []))),
        at(8, name=" (spill in bf16)", spill_dtype="bfloat16"),
        at(4, name=" (ONNX Runtime)", engine="onnxruntime"),
        *(as_much_as(way(tuned=False)) for way in (checkpointing, hooks)),
        *in_core("bfloat16"),
        checkpointing("bfloat16"),
        hooks("bfloat16"),
        at(4, "bfloat16"),
        at(8, "bfloat16"),
    )


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.add_argument("--size", type=int, help="edge of the cube; default: 128 (in a toy 16)")
    made.add_argument("--base", type=int, help="channels on top; default: 16 (in a toy 2)")
    made.add_argument("--depth", type=int, help="levels; default: 3 (in a toy 2)")
    args = settle(made)
    args.size, args.base = args.size or (16 if args.toy else 128), args.base or (2 if args.toy else 16)
    args.depth = args.depth or (2 if args.toy else 3)
    ways = ((way(tuned=False), way(tuned=tuned)) for way in (checkpointing, hooks) for tuned in (False, True))
    pairs = tuple((as_much_as(frugal).name, other.name) for frugal, other in ways)
    run(Bench(unet(args.base, args.size, args.depth), variants(args.size), pairs=pairs), args)


if __name__ == "__main__":
    main()
