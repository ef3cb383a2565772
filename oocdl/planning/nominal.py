"""The nominal rates, which count where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator

from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.ir.speed import Computing, RateTable, Streaming
from oocdl.ops.registry import RULES
from oocdl.planning.cost_model import BFLOAT16_SUFFIX, Rates


def _arithmetic(rules: Rules) -> Iterator[tuple[str, RateTable]]:
    """Nominal tables of the heavy operators, by kind."""
    for rule in rules.values():
        if isinstance(rule.speed, Computing):
            yield from rule.speed.rate_tables.items()
            yield from (
                (kind + BFLOAT16_SUFFIX, points) for kind, points in rule.speed.bfloat16_rate_tables.items()
            )


def _memory(rules: Rules) -> Iterator[tuple[str, float]]:
    """Nominal rates of the operators that are bound by memory; ValueError if one has none."""
    for op, rule in rules.items():
        if isinstance(rule.speed, Streaming):
            like = rules[rule.speed.like].speed
            rate_of_like = like.bytes_per_second if isinstance(like, Streaming) else None
            rate = rule.speed.bytes_per_second or rate_of_like
            if rate is None:
                raise ValueError(f"neither '{op}' nor '{rule.speed.like}', which it is like, has a rate")
            yield op, rate


NOMINAL = Rates(
    arithmetic=dict(_arithmetic(RULES)),
    memory=dict(_memory(RULES)),
    copy_bytes_per_second=2.4e10,
    instruction_seconds=2.7e-6,
    program_seconds=2.3e-5,
    disk_read_bytes_per_second=1.9e9,
    disk_write_bytes_per_second=3.6e9,
    thin_slab_elements=THIN_SLAB_ELEMENTS,
)
"""What ``planning.calibrate`` measured with the torch engine on two cores of an AMD EPYC (Zen 5), a quiet
virtual machine and its virtual disk, rounded to two digits. Rates of operators stand in their rules."""
