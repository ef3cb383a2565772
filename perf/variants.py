"""Ways to train one network, which a bench sets beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEN_GB = "10000000000"
MALLOCS: Mapping[str, Mapping[str, str]] = {
    "": {},
    " (malloc keeps 10 GB)": {
        "MALLOC_MMAP_THRESHOLD_": TEN_GB, "MALLOC_TRIM_THRESHOLD_": TEN_GB, "MALLOC_TOP_PAD_": TEN_GB,
    },
    " (malloc with one arena)": {
        "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20),
        "MALLOC_ARENA_MAX": "1",
    },
}  # fmt: skip
"""glibc as it comes, and told to keep what is freed: then PyTorch's memory is touched for the first time
only once."""
SHORT = {"float32": "", "bfloat16": " bf16"}


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    how: str = "oocdl"
    """Or a mode of ``train_one.py``."""
    precision: str = "float32"
    part: int | None = None
    """Budget and limit of the cgroup: one ``part``-th of what PyTorch in memory takes in this precision.
    None: no limit."""
    baseline: bool = False
    """Whether the fastest of those so marked, in each precision, is what others are compared with."""
    env: Mapping[str, str] | None = None
    """Settings of the allocator; None: those of the baseline."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``fit``, beside those of the case."""

    @property
    def plain(self) -> bool:
        """Whether its losses are to be PyTorch's in float32."""
        return self.precision == "float32" and "spill_dtype" not in self.options


def in_core(precision: str = "float32") -> tuple[Variant, ...]:
    """PyTorch with everything in memory, by each allocator and order of axes: the fastest is the baseline."""
    return tuple(
        Variant(f"PyTorch{SHORT[precision]}{order}{name}", mode, precision, baseline=True, env=env)
        for mode, order in (("incore", ""), ("last", " channels last"))
        for name, env in MALLOCS.items()
    )


def checkpointing(precision: str = "float32") -> Variant:
    """PyTorch that computes the inside of its blocks twice."""
    return Variant(f"PyTorch{SHORT[precision]} + checkpoints", "ckpt", precision)


def hooks(precision: str = "float32") -> Variant:
    """PyTorch that writes what it saves for the backward pass to files."""
    return Variant(f"PyTorch{SHORT[precision]} + disk hooks", "disk", precision)


def at(part: int, precision: str = "float32", name: str = "", **options: Any) -> Variant:
    """oocdl at one ``part``-th of the in-core memory."""
    share = "1" if part == 1 else f"1/{part}"
    # The words of fit; float32 is what it does unless told otherwise.
    told = {"precision": precision, **options} if precision != "float32" else options
    return Variant(f"oocdl{SHORT[precision]} {share}{name}", "oocdl", precision, part, env={}, options=told)
