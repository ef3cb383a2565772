"""Seconds a step of networks of many families: oocdl at parts of what PyTorch takes in memory (root).

oocdl runs inside a memory cgroup of exactly its budget: else the page cache is a hidden one. Beside it
PyTorch in memory by several allocators, with activation checkpoints, and with what is saved for the backward
pass in files; in float32 and in bfloat16.

    python perf/networks.py [--toy] [--networks unet,gpt] [--only 'oocdl 1/4,*hooks*']

Libraries are to be there for some: ``pip install --no-deps torchvision`` and, for nnU-Net's network
(``resenc``), ``pip install --no-deps dynamic-network-architectures``. A part that is less than a process with
PyTorch in it is refused: 1/4 of the LSTM, 1/16 of the smaller U-Net. PyTorch takes 13 GB for the larger one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

import cases
from bench import Bench, options, run, settle
from cases import Case
from variants import at, checkpointing, hooks, in_core

WAYS = (
    *in_core(),
    checkpointing(),
    hooks(),
    *(at(part) for part in (1, 2, 4, 8, 16)),
    at(8, name=" (spill in bf16)", spill_dtype="bfloat16"),
    at(4, name=" (ONNX Runtime)", engine="onnxruntime"),
    *in_core("bfloat16"),
    checkpointing("bfloat16"),
    hooks("bfloat16"),
    at(4, "bfloat16"),
    at(8, "bfloat16"),
)
"""All of them, in the order in which they run."""
USUAL = "oocdl 1,oocdl 1/4"


def _vision(name: str, batch: int, toy: bool) -> Case:
    return cases.images("torchvision.models", name, 2 if toy else batch, 32 if toy else 224)


def _unet(base: int, size: int, toy: bool) -> Case:
    return cases.unet(2, 16, 2) if toy else cases.unet(base, size)


def _resnet(toy: bool) -> Case:
    sizes = ((1, 1), 8, 2, 32, 10) if toy else ((3, 4, 6, 3), 64, 32, 224, 1000)
    return cases.resnet(*sizes)


NETWORKS: Mapping[str, tuple[Callable[[bool], Case], str]] = {
    "unet": (partial(_unet, 16, 128), f"{USUAL},oocdl 1/2,oocdl 1/4 (ONNX Runtime),oocdl bf16 1/4"),
    "unet_32cubed": (partial(_unet, 16, 32), "oocdl 1"),
    "unet_base32": (partial(_unet, 32, 160), "oocdl 1/8"),
    "resenc": (lambda toy: cases.res_enc(4, 2, 16) if toy else cases.res_enc(16, 5, 96), USUAL),
    "resnet50": (_resnet, USUAL),
    "convnext_tiny": (partial(_vision, "convnext_tiny", 16), USUAL),
    "swin_t": (partial(_vision, "swin_t", 16), USUAL),
    "mobilenet_v2": (partial(_vision, "mobilenet_v2", 32), USUAL),
    "efficientnet_b0": (partial(_vision, "efficientnet_b0", 32), USUAL),
    "gpt": (lambda toy: cases.gpt(*((1, 32, 2, 2, 16, 64) if toy else (12, 512, 8, 8, 512, 8192))), USUAL),
    "lstm": (
        lambda toy: cases.recurrent(*((2, 16, 2, 8) if toy else (3, 512, 32, 200))),
        "oocdl 1,oocdl 1/2",
    ),
    "mlp": (lambda toy: cases.mlp(*((2, 64, 4) if toy else (24, 4096, 4))), "oocdl 1/4"),
}
"""Each network, 32 (MobileNetV2, EfficientNet-B0, ResNet-50) or 16 images of 224², and the rows that
``perf/README.md`` has of it. The perceptron has 403 M parameters: weights and state are what has to move, so
its share of the roofline is that of the disk's speed."""


def _bench(name: str, args: argparse.Namespace) -> Bench:
    case, usual = NETWORKS[name]
    return Bench(case(args.toy), WAYS, "adamw" if name in ("gpt", "mlp") else "adam", args.only or usual)


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.set_defaults(only="")
    made.add_argument("--networks", default="all", help=f"some of {', '.join(NETWORKS)}; default: all")
    args = settle(made)
    names = list(NETWORKS) if args.networks == "all" else args.networks.split(",")
    if unknown := [name for name in names if name not in NETWORKS]:
        made.error(f"--networks: no {', '.join(unknown)}; there are {', '.join(NETWORKS)}")
    run([_bench(name, args) for name in names], args)


if __name__ == "__main__":
    main()
