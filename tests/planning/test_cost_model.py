"""Rates as data, and the seconds that they predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from oocdl.graph.ir.program import Program
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.ir.speed import Computing, Heavy, Probe, RateTable, Scale
from oocdl.ops import RULES
from oocdl.ops._speed import EXPONENTIAL
from oocdl.ops.pointwise import Row, elementwise
from oocdl.ops.sequences.attention import TILE_SECONDS
from oocdl.planning.cost_model import (
    ARRANGED_ELEMENTS_PER_SECOND,
    BFLOAT16_SUFFIX,
    HEAVY_SECONDS,
    NOMINAL,
    Rates,
    cold_seconds,
    heavy_kind,
    interpolate,
    program_seconds,
    scratch_ratio,
)
from oocdl.planning.probes import (
    bfloat16_probes,
    computing_probes,
    overhead_program,
    probe_program,
    streaming_probes,
)
from tests.kit.programs import operand, single

LARGE = Scale(thin_slab_elements=THIN_SLAB_ELEMENTS)
TABLE: RateTable = ((1, 1e9), (4, 3e9), (16, 2e9), (64, 50e9))


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


def test_scratch_that_took_more_here_is_counted_more() -> None:
    measured = replace(NOMINAL, scratch_ratios={"Conv 2d window": ((9, 3.0), (36, 1.0))})
    assert all(Rates.from_json(rates.to_json()) == rates for rates in (measured, NOMINAL))
    two, four, none = (scratch_ratio(conv(channels, 6), RULES, measured) for channels in (1, 2, 4))
    assert (two, none) == (3.0, 1.0) and 1 < four < 3
    assert scratch_ratio(matmul(2, 3, 4), RULES, measured) == scratch_ratio(conv(1, 6), RULES, NOMINAL) == 1


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
    assert seconds(overhead_program(1)) < seconds(overhead_program(2))
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
    extra = 2 * 4 * 64 * 64 / NOMINAL.bytes_per_second("Transpose", RULES)
    assert seconds(turned) - seconds(straight) == pytest.approx(extra)


def attention(pairs: int, queries: int, band: tuple[int | None, int | None]) -> Program:
    shape = (1, pairs, 1, queries, 64)
    given = tuple((one, "float32") for one in (shape, (1, pairs, queries, 64), (1, pairs, queries, 64)))
    attrs = {"scale": 0.125, "band": band, "unseen": -np.inf, "blind": 0.0}
    return probe_program(Probe("Attend", given, attrs))


def test_attention_in_small_tiles_pays_for_each() -> None:
    """Those of the probe, of 2^18 scores, are part of its rate."""
    assert cold_seconds(attention(2, 1024, (None, None)), RULES) == HEAVY_SECONDS
    small = 32 - 32 * 384 * 384 / 2**18
    found = cold_seconds(attention(32, 384, (None, None)), RULES)
    assert found == pytest.approx(HEAVY_SECONDS + small * TILE_SECONDS["Attend"])
    assert cold_seconds(attention(32, 384, (None, 0)), RULES) > found  # in rows of 256 queries


def test_convolutions_arrange_their_weights_in_each_call() -> None:
    arranged = 16 * 16 * 9 / ARRANGED_ELEMENTS_PER_SECOND
    assert cold_seconds(conv(16, 32), RULES) == pytest.approx(HEAVY_SECONDS + arranged)
    assert cold_seconds(conv(16, 64), RULES) == cold_seconds(conv(16, 32), RULES)
    assert cold_seconds(matmul(64, 64, 64), RULES) == HEAVY_SECONDS
    assert cold_seconds(overhead_program(3), RULES) == 0


def test_empty_operands_take_no_time_to_speak_of() -> None:
    assert 0 <= seconds(matmul(0, 8, 8)) < 1e-3


def kind_of(program: Program, thin_slab_elements: int) -> tuple[str, int]:
    [step] = program.instructions
    speed = RULES[step.op].speed
    assert isinstance(speed, Computing)
    return heavy_kind(step, RULES[step.op], speed, program.input_dtypes[0], thin_slab_elements)


@pytest.mark.parametrize("thin", [0, THIN_SLAB_ELEMENTS])
@pytest.mark.parametrize("source", [computing_probes, bfloat16_probes])
def test_heavy_probes_are_of_the_kind_that_they_say(
    source: Callable[[Scale], Iterator[Heavy]], thin: int
) -> None:
    kinds = set()
    for kind, size, probe in source(Scale(thin_slab_elements=thin)):
        assert kind_of(probe_program(probe), thin) == (kind, size), probe
        kinds.add(kind)
    wanted = {
        kind for kind in NOMINAL.arithmetic if kind.endswith(BFLOAT16_SUFFIX) == (source is bfloat16_probes)
    }
    assert kinds == {kind for kind in wanted if thin or "thin" not in kind}


def test_products_of_16_bits_have_rates_of_their_own() -> None:
    """All kinds of them, with results as ``use_bfloat16`` makes them: of convolutions forward in bfloat16."""
    points: dict[str, RateTable] = {k: ((1, 1.0),) for k in NOMINAL.arithmetic if k.endswith(BFLOAT16_SUFFIX)}
    slow = replace(NOMINAL, arithmetic={**NOMINAL.arithmetic, **points})
    for _, _, probe in bfloat16_probes(replace(LARGE, share=0.01)):
        program = probe_program(probe)
        assert set(program.input_dtypes) == {"bfloat16"}
        [step] = program.instructions
        assert set(step.dtypes) == {"bfloat16" if step.op in ("Conv", "ConvTranspose") else "float32"}
        same = probe_program(replace(probe, inputs=tuple((shape, "float32") for shape, _ in probe.inputs)))
        assert seconds(program, slow) > 1 > seconds(same, slow)


def test_every_operator_that_runs_has_a_probe_and_a_nominal_rate() -> None:
    probed = {probe.op for *_, probe in computing_probes(LARGE)} | {
        probe.op for probe in streaming_probes(1.0)
    }
    assert probed == {op for op, rule in RULES.items() if rule.axes is not None}
    for probe in streaming_probes(1.0, bfloat16=True):
        steps = [step.op for step in probe_program(probe).instructions]
        assert probe.op in steps and len(steps) == 1 + probe.chained


@pytest.mark.parametrize("cores", [1, 5, 6, 7, 8, 64, 1000])
def test_probes_are_planned_for_any_count_of_cores(cores: int) -> None:
    """Arrays are smaller on more cores, down to any extent."""
    share = min(1.0, 4 / cores)
    for probe, whole in zip(streaming_probes(share), streaming_probes(1.0), strict=True):
        if probe.op in ("Reshape", "Slice"):
            small, large = (sum(map(prod, probe_program(one).input_shapes)) for one in (probe, whole))
            assert 0 < small <= 1.5 * share * large


def test_an_operator_that_was_not_measured_costs_like_another() -> None:
    """As with a cache of rates that was measured before there was such an operator."""
    rules = {**RULES, "New": elementwise(Row("New", 1, None, scratch=0, like=EXPONENTIAL))}
    x = [np.zeros(1000, "float32")]
    new, old = (single(op, x, [((1000,), "float32")]) for op in ("New", "Exp"))
    assert program_seconds(new, rules, NOMINAL) == program_seconds(old, rules, NOMINAL)
    nothing = replace(NOMINAL, memory={})
    assert nothing.bytes_per_second("New", rules) == NOMINAL.copy_bytes_per_second


def test_a_kind_that_was_not_measured_has_its_nominal_rates() -> None:
    nothing = replace(NOMINAL, arithmetic={})
    for _, _, probe in (*computing_probes(LARGE), *bfloat16_probes(LARGE)):
        program = probe_program(probe)
        assert seconds(program, nothing) == seconds(program)


def test_slabs_are_thin_where_the_engine_says_so() -> None:
    [thin] = [probe for kind, size, probe in computing_probes(LARGE) if "thin" in kind and size == 16 * 27]
    program = probe_program(thin)
    knows = replace(NOMINAL, arithmetic={**NOMINAL.arithmetic, "ConvWeightGrad 3d thin window": ((1, 1.0),)})
    assert seconds(program, knows) > 1e6
    assert seconds(program, replace(knows, thin_slab_elements=0)) < 1
