"""Options of ``fit`` that most tests begin with."""

from __future__ import annotations

from typing import Any

QUICK: dict[str, Any] = {"memory": "4GiB", "engine": "onnxruntime", "progress": False, "threads": 1}
"""Roomy, on one thread, and silent: the engine that starts the fastest."""
EXACT: dict[str, Any] = {**QUICK, "engine": "torch", "precision": "float64", "threads": 2, "shuffle": False}
"""In float64, samples in the order of the dataset: what PyTorch is compared with."""
