"""Rates as data, and the seconds that they predict."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from oocdl.graph.program import Instruction, Program
from oocdl.graph.rates import (
    LOW,
    NOMINAL,
    Points,
    Rates,
    heavy_kind,
    interpolate,
    padded_shape,
    program_seconds,
)
from oocdl.graph.rounded import WINDOWED
from oocdl.ops import RULES
from oocdl.probes import Probe, convolutions, in_bfloat16, overhead, pools, products, streams
from tests.engines.programs import operand, single

TABLE: Points = ((1, 1e9), (4, 3e9), (16, 2e9), (64, 50e9))


def seconds(program: Program, rates: Rates = NOMINAL) -> float:
    return program_seconds(program, RULES, rates)


def conv(channels: int, edge: int, pads: int = 0) -> Program:
    arrays = [np.zeros((1, channels, edge, edge), "float32"), np.zeros((channels, channels, 3, 3), "float32")]
    around = [(0, 0), (0, 0), (pads, pads), (pads, pads)] if pads else None
    shape = (1, channels, edge - 2 + 2 * pads, edge - 2 + 2 * pads)
    slides = {"strides": (1, 1), "dilations": (1, 1), "pads": (pads,) * 4}
    return single("Conv", arrays, [(shape, "float32")], slides, [around, None])


def matmul(rows: int, inner: int, columns: int, equation: str = "ab,bc->ac") -> Program:
    arrays = [np.zeros((rows, inner), "float32"), np.zeros((inner, columns), "float32")]
    shape = (rows, columns) if equation.endswith("ac") else (columns, rows)
    return single("Einsum", arrays, [(shape, "float32")], {"equation": equation})


def test_interpolation_stays_between_its_neighbours() -> None:
    for size, rate in TABLE:
        assert interpolate(TABLE, size) == rate
    for (low, a), (high, b) in zip(TABLE, TABLE[1:], strict=False):
        between = [interpolate(TABLE, size) for size in range(low, high + 1)]
        assert between == sorted(between, reverse=b < a)
        assert min(a, b) <= min(between) and max(between) <= max(a, b)
    assert interpolate(TABLE, 10**6) == 50e9
    assert interpolate(TABLE[1:], 1) == 3e9


def test_more_work_takes_longer() -> None:
    assert seconds(conv(16, 32)) < seconds(conv(16, 64)) < seconds(conv(32, 64)) < seconds(conv(64, 64))
    assert seconds(matmul(64, 512, 512)) < seconds(matmul(128, 512, 512)) < seconds(matmul(128, 1024, 512))
    assert seconds(overhead(1)) < seconds(overhead(2))
    small, large = (single("Exp", [np.zeros(n, "float32")], [((n,), "float32")]) for n in (1 << 16, 1 << 20))
    assert 10 < seconds(large) / seconds(small) < 16


def test_arithmetic_follows_the_table_and_bytes_the_memory() -> None:
    program = conv(16, 34)
    rates = replace(NOMINAL, arithmetic={"Conv 2d window": ((144, 1e6),)}, instruction_seconds=0.5)
    flops = 2 * 16 * 32 * 32 * 16 * 9
    assert seconds(program, rates) == pytest.approx(flops / 1e6 + 0.5 + rates.program_seconds)
    rates = replace(NOMINAL, memory={"Exp": 1e6}, instruction_seconds=0.0, program_seconds=0.0)
    exp = single("Exp", [np.zeros(1000, "float64")], [((1000,), "float64")])
    assert seconds(exp, rates) == pytest.approx(2 * 8000 / 1e6)


def test_padded_and_cropped_copies_count() -> None:
    rates = replace(NOMINAL, arithmetic={"Conv 2d window": ((1, 1e15),)}, copy_bytes_per_second=1e3)
    copied = 4 * 16 * (34**2 + 32**2)
    assert seconds(conv(16, 32, pads=1), rates) - seconds(conv(16, 34), rates) == pytest.approx(copied / 1e3)
    x = np.zeros((8, 8), "float32")
    whole = single("Neg", [x], [((8, 8), "float32")])
    step = whole.instructions
    cropped = (operand(1, (4, 8), [(0, 4), (0, 8)]),)
    half = Program(whole.inputs, whole.input_shapes, whole.input_dtypes, step, cropped, "half")
    assert seconds(half, rates) - seconds(whole, rates) == pytest.approx(2 * 4 * 32 / 1e3)


def test_a_turned_product_pays_for_its_transposition() -> None:
    straight, turned = matmul(64, 64, 64), matmul(64, 64, 64, "ab,bc->ca")
    extra = 2 * 4 * 64 * 64 / NOMINAL.bytes_per_second("Transpose")
    assert seconds(turned) - seconds(straight) == pytest.approx(extra)


def test_empty_operands_take_no_time_to_speak_of() -> None:
    assert 0 <= seconds(matmul(0, 8, 8)) < 1e-3


def kind_of(step: Instruction) -> tuple[str, int] | None:
    return heavy_kind(step, [padded_shape(item) for item in step.operands])


@pytest.mark.parametrize("source", [convolutions, products, pools, in_bfloat16])
def test_heavy_probes_are_of_the_kind_that_they_say(source: type) -> None:
    for kind, size, probe in source(1.0):
        program = probe.program()
        [step] = program.instructions
        shapes = [padded_shape(item) for item in step.operands]
        assert heavy_kind(step, shapes, program.input_dtypes[0]) == (kind, size), probe
        assert kind in NOMINAL.arithmetic


def test_products_of_16_bits_have_rates_of_their_own() -> None:
    """All kinds of them, with results as ``rounded`` makes them: only convolutions forward have 16 bits."""
    wide = {kind for source in (convolutions, products) for kind, *_ in source(1.0)}
    assert {kind for kind, *_ in in_bfloat16(1.0)} == {kind + LOW for kind in wide}
    points: dict[str, Points] = {k: ((1, 1.0),) for k in NOMINAL.arithmetic if k.endswith(LOW)}
    slow = replace(NOMINAL, arithmetic={**NOMINAL.arithmetic, **points})
    for _, _, probe in in_bfloat16(0.01):
        program = probe.program()
        assert set(program.input_dtypes) == {"bfloat16"}
        [step] = program.instructions
        assert step.dtypes == ("bfloat16" if step.op in WINDOWED else "float32",)
        same = replace(probe, inputs=tuple((shape, "float32") for shape, _ in probe.inputs)).program()
        assert seconds(program, slow) > 1 > seconds(same, slow)


def test_every_operator_has_a_probe_and_a_nominal_rate() -> None:
    heavy: set[str] = {probe.op for source in (convolutions, products, pools) for *_, probe in source(1.0)}
    light = {probe.op for probe in streams(1.0)}
    assert not heavy & light
    assert heavy | light == {op for op, rule in RULES.items() if rule.axes is not None}
    assert light == set(NOMINAL.memory)
    assert all(kind_of(probe_step(probe)) is None for probe in streams(1.0))


def probe_step(probe: Probe) -> Instruction:
    """The instruction that a probe is for."""
    [step] = [step for step in probe.program().instructions if step.op == probe.op]
    return step


def test_json_round_trip() -> None:
    assert Rates.from_json(NOMINAL.to_json()) == NOMINAL


def changed(**parts: object) -> str:
    return json.dumps(json.loads(NOMINAL.to_json()) | parts)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        changed(memory={"Add": 0}),
        changed(memory={"Add": "fast"}),
        changed(memory=[1]),
        changed(arithmetic={"Einsum": []}),
        changed(arithmetic={"Einsum": [[4, 1e9], [1, 1e9]]}),
        changed(arithmetic={"Einsum": [[1, float("nan")]]}),
        changed(instruction_seconds=-1),
        changed(copy_bytes_per_second=float("inf")),
        changed(horses=3),
    ],
)
def test_what_is_no_rates_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate|table|overhead"):
        Rates.from_json(text)
