"""The facts of a plan that a dashboard needs, as plain data written once per run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from oocdl.errors import CorruptError
from oocdl.planning.calibrate import known_rates
from oocdl.planning.calls import PickCall
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.cost_model import NOMINAL
from oocdl.planning.simulation.timeline import Simulated
from oocdl.report.layer_facts import LayerFacts, layer_facts
from oocdl.report.plan_view import Plan

FORMAT = 1
NO_LAYER = -1
"""Layer index of a call that takes no time and is not shown."""


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """One kind of pass."""

    layers: tuple[LayerFacts, ...]
    layer_of: Sequence[int]
    """For each call in order: the index of its layer, or ``NO_LAYER``."""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All that is known of a run before its first step."""

    model: str
    engine: str
    threads: int
    """Programs that a process runs at once."""
    budget_bytes: int
    """Budget of each process."""
    base_bytes: int
    steps: int
    predicted_seconds: float
    predicted_peak_bytes: int
    predicted_spill_bytes: int
    """Predicted bytes that a step reads from and writes to the spill."""
    disk_read_rate: float
    """Bytes a second."""
    disk_write_rate: float
    rates_measured: bool
    """Whether rates were measured on this machine; else they are nominal."""
    dataset: str
    """Path of the dataset; empty if it has none."""
    group: str
    images: Sequence[Sequence[str]]
    """("input" or "target", array of the dataset) of all that the network reads."""
    passes: Mapping[str, PassFacts]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the call, as plain data; empty in files of earlier versions."""
    outputs: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)})


def facts_of(plan: Plan, steps: int) -> RunFacts:
    """Gather the facts of a run."""
    rates, source = known_rates(plan.machine.engine), plan.dataset.spec
    values = plan.compiled.plan.factored.graph.values
    read = ((values[name].role.value, of) for name, of in plan.compiled.feeds.items() if name in values)
    simulated = {plan_id: [one] for plan_id, one in zip(plan.pass_ids, plan.simulated, strict=True)}
    return RunFacts(
        model=plan.model,
        engine=plan.machine.engine,
        threads=plan.machine.threads,
        budget_bytes=plan.settings.memory_bytes,
        base_bytes=plan.process_bytes,
        steps=steps,
        predicted_seconds=plan.seconds,
        predicted_peak_bytes=plan.peak_bytes,
        predicted_spill_bytes=plan.spill_read_bytes + plan.spill_written_bytes,
        disk_read_rate=rates.disk_read_bytes_per_second,
        disk_write_rate=rates.disk_write_bytes_per_second,
        rates_measured=rates is not NOMINAL,
        dataset=source.source if isinstance(source.source, str) else "",
        group=source.group,
        images=list(dict.fromkeys(read)),
        passes={name: _pass_facts(kind, simulated.get(name, ())) for name, kind in plan.kinds.items()},
        settings=plan.settings.stored(),
        outputs=tuple(name for name, _ in plan.compiled.imported.outputs),
    )


def read_facts(text: str) -> RunFacts:
    """Read what ``to_json`` wrote. Raises CorruptError if it is anything else, or of another version."""
    try:
        body: dict[str, Any] = json.loads(text)
        if body.pop("format") != FORMAT:
            raise CorruptError("the run's dashboard files are of another version of oocdl")
        passes = {
            name: PassFacts(
                layers=tuple(LayerFacts(**layer) for layer in one["layers"]), layer_of=one["layer_of"]
            )
            for name, one in body.pop("passes").items()
        }
        known = {one.name: body[one.name] for one in fields(RunFacts) if one.name in body}
        return RunFacts(**known, passes=passes)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"the run's dashboard files are damaged ({error})") from error


def _pass_facts(compiled: CompiledPass, simulated: Iterable[Simulated]) -> PassFacts:
    number = {planned.layer.name: index for index, planned in enumerate(compiled.plan.layers)}
    layer_of = tuple(
        NO_LAYER if isinstance(call, PickCall) else number[call.key.layer] for call in compiled.graph.calls
    )
    return PassFacts(layers=layer_facts(compiled, simulated), layer_of=layer_of)
