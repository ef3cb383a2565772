"""Seconds a step of a GPT of 12 layers of 512, 8 x 512 tokens: oocdl at parts of what PyTorch takes (root).

python perf/gpt.py [--toy] [--batch 8] [--tokens 512] [--only 'oocdl 1/4'] [--plot gpt.png]
"""

from __future__ import annotations

import cases
from bench import Bench, options, run, settle
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
    made.add_argument("--batch", type=int, help="sequences; default: 8 (in a toy 2)")
    made.add_argument("--tokens", type=int, help="of each; default: 512 (in a toy 16)")
    args = settle(made)
    batch, tokens = args.batch or (2 if args.toy else 8), args.tokens or (16 if args.toy else 512)
    blocks, width, heads, vocabulary = (1, 32, 2, 64) if args.toy else (12, 512, 8, 8192)
    run(Bench(cases.gpt(blocks, width, heads, batch, tokens, vocabulary), VARIANTS, "adamw"), args)


if __name__ == "__main__":
    main()
