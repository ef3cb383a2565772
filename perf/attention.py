"""Attention beside PyTorch's ``scaled_dot_product_attention``: forward and backward, float32, one core.

    python perf/attention.py          # --toy at small size; --engines torch

Of each engine the programs of the node and of its gradient, of PyTorch its function and the backward of
autograd. All take turns; the least of all calls counts. Errors are the largest of the result and of the three
gradients, as parts of the largest value of each, beside PyTorch in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # is read when NumPy is loaded
import numpy as np
import torch
import torch.nn.functional as F
from grouped import least_seconds
from measure import report, short_parser

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.speed import Probe
from oocdl.planning.probes import probe_program

CASES = {
    # batch, heads, length, size of a head, causal
    "4 x 8 heads x 64, 512": (4, 8, 512, 64, False),
    "4 x 8 heads x 64, 512, causal": (4, 8, 512, 64, True),
    "8 heads x 64, 2048": (1, 8, 2048, 64, False),
    "8 heads x 64, 2048, causal": (1, 8, 2048, 64, True),
    "16 x 12 heads x 64, 128": (16, 12, 128, 64, False),
    "64 windows x 3 heads x 32, 49": (64, 3, 49, 32, False),
}
Case = tuple[int, int, int, int, bool]
Call = Callable[[], Sequence[Any]]


def operands(case: Case) -> list[np.ndarray[Any, Any]]:
    """Queries, keys, values, and the gradient of the result."""
    random, shape = np.random.default_rng(0), case[:4]
    return [random.normal(size=shape).astype(np.float32) for _ in range(4)]


def ours(engine_name: str, case: Case) -> Call:
    """The engine's programs of attention and of its gradient."""
    batch, heads, length, size, causal = case
    wide, rows = (batch, heads, 1, length, size), (batch, heads, length, size)
    attrs = {"scale": size**-0.5, "band": (None, 0 if causal else None), "unseen": -np.inf, "blind": 0.0}
    given = [(wide, "float32"), (rows, "float32"), (rows, "float32")]
    kept = [((*wide[:4], 2), "float32"), ((*wide[:4], 1), "float32"), (wide, "float32")]
    engine = get_engine(engine_name)
    forward = engine.compile(probe_program(Probe("Attend", tuple(given), attrs)))
    backward = engine.compile(probe_program(Probe("AttendGrad", (*given, *kept), attrs)))
    q, k, v, dy = operands(case)  # programs leave out axes of one

    def call() -> Sequence[Any]:
        y, stats = forward([q, k, v])
        delta = (torch.from_numpy(dy) * torch.from_numpy(y)).sum(3).numpy()
        return [y, *backward([q, k, v, stats, delta, dy])]

    return call


def theirs(case: Case, dtype: torch.dtype = torch.float32) -> Call:
    """PyTorch's function, and its backward."""
    *qkv, dy = (torch.from_numpy(array).to(dtype) for array in operands(case))
    for one in qkv:
        one.requires_grad_()

    def call() -> Sequence[Any]:
        y = F.scaled_dot_product_attention(*qkv, is_causal=case[4])
        return [y.detach(), *torch.autograd.grad(y, qkv, dy)]

    return call


def error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The largest difference, as a part of the largest value of each."""
    shaped = [np.asarray(one).reshape(two.shape) for one, two in zip(found, exact, strict=True)]
    pairs = zip(shaped, exact, strict=True)
    return max(float(abs(one - two.numpy()).max() / two.abs().max()) for one, two in pairs)


def rows(engines: Sequence[str], toy: bool) -> list[dict[str, Any]]:
    """The figures of all cases."""
    torch.set_num_threads(1)
    found = []
    for name, (batch, heads, length, size, causal) in CASES.items():
        case = (1, 2, 32, 8, causal) if toy else (batch, heads, length, size, causal)
        calls = {"PyTorch": theirs(case), **{engine: ours(engine, case) for engine in engines}}
        exact = theirs(case, torch.float64)()
        seconds = least_seconds(list(calls.values()), 1 if toy else 6)
        errors = {title: error(call(), exact) for title, call in calls.items()}
        found.append({"case": name, "seconds": dict(zip(calls, seconds, strict=True)), "errors": errors})
    return found


def main() -> None:
    """Print a table of milliseconds, and of errors."""
    parser = short_parser(__doc__)
    parser.add_argument("--engines", default="torch,onnxruntime")
    args = parser.parse_args()
    engines = args.engines.split(",")
    made, lines = rows(engines, args.toy), []
    for row in made:
        base, cells = row["seconds"]["PyTorch"], [row["case"]]
        for title, seconds in row["seconds"].items():
            cells.append(f"{1e3 * seconds:.1f} ({row['errors'][title]:.0e})")
            cells += [f"{seconds / base:.2f}"] if title != "PyTorch" else []
        lines.append(cells)
    heads = [head for engine in engines for head in (engine, "ratio")]
    report(args, ["case", "PyTorch ms (error)", *heads], lines, made)


if __name__ == "__main__":
    main()
