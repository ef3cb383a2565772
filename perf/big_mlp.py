"""A perceptron of 403 M parameters with AdamW, batch 4: weights and state are what has to move.

24 layers of 4096², at a quarter of what PyTorch takes in memory, inside a memory cgroup of that (root): bound
by the disk, so the share of the roofline is the share of the disk's speed. Beside it DeepSpeed ZeRO-3 with
parameters and optimizer in files, by the Python of ``--deepspeed``, where that has DeepSpeed.

    python perf/big_mlp.py [--toy] [--batch 4] [--deepspeed /envs/ds/bin/python] [--plot big_mlp.png]
"""

from __future__ import annotations

from bench import Bench, options, run, settle
from cases import mlp
from variants import Variant, at, in_core

NVME = Variant("DeepSpeed ZeRO-3 on NVMe", "deepspeed", options={"offload": "nvme"})
VARIANTS = (
    *in_core(),
    *(at(part) for part in (1, 2, 4, 8)),
    Variant("DeepSpeed ZeRO-3 in memory", "deepspeed", options={"offload": "none"}),
    NVME,
)


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.add_argument("--batch", type=int, default=4, help="samples")
    made.add_argument("--layers", type=int, help="default: 24 (in a toy 2)")
    made.add_argument("--width", type=int, help="of the layers; default: 4096 (in a toy 64)")
    args = settle(made)
    layers, width = args.layers or (2 if args.toy else 24), args.width or (64 if args.toy else 4096)
    run([Bench(mlp(layers, width, args.batch), VARIANTS, "adamw", ((at(4).name, NVME.name),))], args)


if __name__ == "__main__":
    main()
