"""What programs of the torch engine take of the heap, as PyTorch's profiler counts it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.profiler import ProfilerActivity, profile

from oocdl.engines.engine import get_engine
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.program import Program


def arrays_of(program: Program, low: float = 0.0) -> list[Array]:
    """Numbers from ``low`` on for a program's inputs, which lie as it wants them."""
    orders, arrays = dict(program.orders), []
    for slot, shape, dtype in zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True):
        arrays.append(ordered(np.empty, shape, dtype, orders.get(slot, ())))
        arrays[-1][...] = np.random.default_rng(slot).random(shape) * 3 + low
    return arrays


def peak_bytes(program: Program, engine: str = "torch", arrays: Sequence[Array] | None = None) -> int:
    """The most that PyTorch has allocated at once while the program runs for the second time."""
    run, arrays = get_engine(engine).compile(program), arrays_of(program) if arrays is None else arrays
    outs = run(arrays)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(arrays, outs)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
