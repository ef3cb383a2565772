"""Programs on NumPy take no more memory than ``scratch_of`` says, as ``tracemalloc`` counts it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from oocdl.engines.engine import get_engine
from oocdl.engines.numpy.numpy_kernels import KERNELS
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.operands import empty_outputs
from oocdl.graph.ir.program import Program
from oocdl.graph.ir.speed import Scale
from oocdl.ops import RULES
from oocdl.planning.probes import computing_probes, probe_program, streaming_probes
from tests.kit.programs import single

SCALE = 1 / 16
SLACK_BYTES = 1 << 16
"""Of buffers and objects, whatever the size of arrays."""
PROBES = [*streaming_probes(SCALE), *(p for _, size, p in computing_probes(Scale(SCALE)) if size < 300)]


def peak_bytes(program: Program, engine: str = "numpy") -> int:
    """The most that is allocated at once while the program runs."""
    random = np.random.default_rng(0)
    kinds = zip(program.input_shapes, program.input_dtypes, strict=True)
    arrays = [np.asarray(7 * random.random(shape)).astype(dtype) for shape, dtype in kinds]
    run, outs = get_engine(engine).compile(program), empty_outputs(program)
    run(arrays, outs)  # which compiles loops
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
        taken = peak_bytes(program)
        assert taken < most + SLACK_BYTES
        dtypes = {*program.input_dtypes, *program.instructions[0].dtypes}
        assert "bool" in dtypes or most < 6 * taken, "memory is reserved that nothing takes"


@pytest.mark.parametrize(("op", "results"), [("ReduceSum", 1), ("Moments", 2)])
@pytest.mark.parametrize("axis", [0, 1])
def test_loops_take_no_more_for_their_sums_than_they_say(op: str, results: int, axis: int) -> None:
    x = np.zeros((2048, 256), np.float32)
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    program = single(op, [x], [(shape, "float32")] * results, {"axes": (axis,)}, key=f"{op} along {axis}")
    most = get_engine("onnxruntime").scratch_of(program, RULES).scratch_bytes
    assert peak_bytes(program, "onnxruntime") < most + SLACK_BYTES


IDS, ROWS = np.zeros(1 << 17, np.int64), np.zeros((1 << 17, 8), np.float32)
"""So many indices of so few rows that an array more of them would be most of all."""


@pytest.mark.parametrize("engine", ["numpy", "onnxruntime"])
@pytest.mark.parametrize(
    ("op", "arrays", "result"),
    [
        ("Gather", [ROWS[:50], IDS], (ROWS.shape, "float32")),
        ("GatherGrad", [IDS, ROWS], ((50, 8), "float32")),
        ("LastAt", [IDS], ((50,), "int64")),
    ],
)
def test_lookups_make_no_array_of_their_indices(
    engine: str, op: str, arrays: list[Array], result: tuple[Shape, str]
) -> None:
    program = single(op, arrays, [result], {} if op == "Gather" else {"rows": 50}, key=f"{op} narrow")
    most = get_engine(engine).scratch_of(program, RULES).scratch_bytes
    assert peak_bytes(program, engine) < most + SLACK_BYTES
