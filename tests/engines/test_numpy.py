"""Programs on NumPy take no more memory than ``scratch_of`` says, as ``tracemalloc`` counts it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.engines.numpy.numpy_kernels import KERNELS
from oocdl.graph.ir.operands import empty_outputs
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.speed import Scale
from oocdl.ops import RULES
from oocdl.planning.probes import computing_probes, probe_program, streaming_probes

SCALE = 1 / 16
SLACK_BYTES = 1 << 16
"""Of buffers and objects, whatever the size of arrays."""
PROBES = [
    *streaming_probes(SCALE),
    *(probe for _, size, probe in computing_probes(Scale(SCALE)) if size < 300),
]


def peak_bytes(program: Program) -> int:
    """The most that is allocated at once while the program runs."""
    random = np.random.default_rng(0)
    kinds = zip(program.input_shapes, program.input_dtypes, strict=True)
    arrays = [np.asarray(7 * random.random(shape)).astype(dtype) for shape, dtype in kinds]
    run, outs = get_engine("numpy").compile(program), empty_outputs(program)
    tracemalloc.start()
    try:
        run(arrays, outs)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_operators_take_no_more_than_they_say(op: str) -> None:
    programs = [probe_program(probe) for probe in PROBES if probe.op == op]
    said = [get_engine("numpy").scratch_of(program, RULES).scratch_bytes for program in programs]
    assert max(said) > 4 * SLACK_BYTES, "arrays so small tell nothing"
    for program, most in zip(programs, said, strict=True):
        assert peak_bytes(program) < most + SLACK_BYTES
