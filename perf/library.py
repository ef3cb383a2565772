"""Seconds a step of networks of libraries, and of an LSTM: in core, and at 1/4 of the least PyTorch (root).

    python perf/library.py [--toy] [--network mobilenet_v2] [--only 'oocdl 1/4']

The LSTM is at 1/2: a quarter of what PyTorch takes is less than a process with PyTorch in it.
Libraries are to be there: ``pip install --no-deps torchvision``; for nnU-Net's network (``resenc``)
``pip install --no-deps dynamic-network-architectures``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench import Bench, options, run, settle
from cases import Case, images, recurrent, res_enc
from variants import at, in_core

VISION = {"mobilenet_v2": 32, "efficientnet_b0": 32, "convnext_tiny": 16, "swin_t": 16}
"""Networks and how many images of 224²."""


def _vision(name: str, batch: int, toy: bool) -> Case:
    return images("torchvision.models", name, 2 if toy else batch, 32 if toy else 224)


CASES: Mapping[str, Callable[[bool], Case]] = {
    **{name: lambda toy, name=name, batch=batch: _vision(name, batch, toy) for name, batch in VISION.items()},
    "resenc": lambda toy: res_enc(4, 2, 16) if toy else res_enc(16, 5, 96),
    "lstm": lambda toy: recurrent(2, 16, 2, 8) if toy else recurrent(3, 512, 32, 200),
}  # type: ignore[misc]


def main() -> None:
    """Parse, measure, tell."""
    made = options(__doc__)
    made.add_argument("--network", choices=sorted(CASES), default="lstm", help="default: lstm")
    args = settle(made)
    part = 2 if args.network == "lstm" else 4
    run(Bench(CASES[args.network](args.toy), (*in_core(), at(1), at(part))), args)


if __name__ == "__main__":
    main()
