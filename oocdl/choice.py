"""Which engine runs each layer, where ``engine="measured"`` leaves that to measured rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oocdl.calibrate import WHOLE_THREADS, load_rates, rates_for
from oocdl.config import Settings
from oocdl.engines.engine import MEASURED, PRECISIONS, engines_of, get_engine
from oocdl.errors import BudgetError
from oocdl.graph.plan import LayerPlan, StepPlan
from oocdl.graph.rates import Rates, program_seconds
from oocdl.graph.rule import Rules
from oocdl.machine import anonymous_bytes, cores

MEASURING_BYTES = 340 << 20
"""What measuring takes of memory, a thread; more threads than ``WHOLE_THREADS`` share what these take."""


def rates_by_engine(settings: Settings) -> dict[str, Rates]:
    """Rates of all engines to choose from; empty where one engine runs everything.

    Those that are not known are measured now (half a minute an engine). Raises BudgetError
    where that would take more memory than there is.
    """
    if settings.engine != MEASURED:
        return {}
    names = [name for name in engines_of(MEASURED) if settings.precision in PRECISIONS[name]]
    found = {name: load_rates(name) for name in names}
    needed = anonymous_bytes() + min(cores(), WHOLE_THREADS) * MEASURING_BYTES
    if None in found.values() and needed > settings.memory_bytes:
        raise BudgetError(
            f"measuring engines takes {needed >> 20} MiB, the budget is {settings.memory_bytes >> 20} MiB; "
            f"run 'oocdl info --machine --engine {MEASURED}' once before"
        )
    return {name: rates or rates_for(name) for name, rates in found.items()}


def layer_seconds(layer: LayerPlan, rules: Rules, rates: Rates) -> float:
    """Predicted seconds of all units of a layer, one after another."""
    programs = {unit.program.key: unit.program for unit in layer.units}
    counts = Counter(unit.program.key for unit in layer.units)
    return sum(counts[key] * program_seconds(programs[key], rules, rates) for key in programs)


def fastest(
    layers: Sequence[LayerPlan], rates: Mapping[str, Rates], rules: Rules, unit_bytes: int
) -> tuple[str, ...]:
    """For each layer the engine with the fewest predicted seconds, of those whose units keep ``unit_bytes``.

    Of equals it is the one that ``rates`` names first.
    """

    def choose(layer: LayerPlan) -> str:
        able = [name for name in rates if run_by(layer, name, rules).peak_bytes <= unit_bytes]
        return min(able, key=lambda name: layer_seconds(layer, rules, rates[name]))

    return tuple(map(choose, layers))


def run_by(layer: LayerPlan, engine: str, rules: Rules) -> LayerPlan:
    """The same layer, run by ``engine``, with the memory that this takes."""
    needs_of = get_engine(engine).needs
    programs = {unit.program.key: unit.program for unit in layer.units}
    needs = {key: needs_of(program, rules) for key, program in programs.items()}
    most = max(one.work_bytes for one in needs.values())
    return replace(layer, engine=engine, needs=needs, work_bytes=most)


def assigned(plan: StepPlan, engines: Sequence[str], rules: Rules) -> StepPlan:
    """The same plan, its layers run by these engines; none: one engine runs them all."""
    if not engines:
        return plan
    layers = (run_by(layer, engine, rules) for layer, engine in zip(plan.layers, engines, strict=True))
    return replace(plan, layers=tuple(layers))
