"""``simulate``: how a step would go on more hosts than there are, before a job is submitted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from oocdl.config import make_settings, parse_bytes
from oocdl.config.option_checks import shown, whole
from oocdl.config.options import SimulateOptions
from oocdl.errors import InputError
from oocdl.planning.calibrate import known_rates
from oocdl.planning.choice.pass_kinds import compile_within
from oocdl.planning.compiler import draft_pass
from oocdl.planning.cost_model import NOMINAL, Rates
from oocdl.planning.machine import discards_old_weights
from oocdl.planning.recipe import PassKind, Request
from oocdl.planning.simulation.hosts import SimulatedHosts, simulate_hosts
from oocdl.planning.simulation.network import Cluster
from oocdl.report.scaling import Scaling, ScalingRow
from oocdl.training.job import Job, job_of, planned_file
from oocdl.training.signature import public

HOSTS = (1, 2, 4, 8, 16, 32, 64)
MOST_LANES = 1024
"""Maximum threads of all hosts together; beyond it, several threads of a host count as one."""


@public
def simulate(
    model: Any,
    dataset: Any,
    *,
    hosts: Sequence[int] = HOSTS,
    cores: int = 16,
    network: float | str = "10Gbit",
    disk_rate: float | str | None = None,
    weak: bool = False,
    rates: Rates | None = None,
    **options: Unpack[SimulateOptions],
) -> Scaling:
    """Predict a step on numbers of hosts that need not be there; nothing runs.

    A pass is planned for each number of hosts as ``fit`` with so many workers plans it, and its tasks are
    simulated: their order on each host, memory, spill, what travels between hosts and Dask's scheduler.
    Seconds of tasks are by this machine's rates (``oocdl info --machine``), which stand for each core of the
    hosts. Where there are more than ``MOST_LANES`` cores, several of a host count as one that is as fast.

    Parameters
    ----------
    model
        As in ``fit``.
    dataset
        As in ``fit``.
    hosts
        Numbers of hosts; speed-ups are over the first.
    cores
        Compute threads of each host.
    network
        Of each host, in each direction: "10Gbit" a second, "1.25GB" a second, or bytes a second.
    disk_rate
        Of each host, reading and writing, as ``network``; default: this machine's.
    weak
        Whether the batch grows with the hosts: ``batch_size`` samples for each.
    rates
        Of one core; None: this machine's, as measured with all of its cores busy.
    memory
        Memory budget of each host, such as "60GB"; default: a safe share of what this process may use.

    Raises
    ------
    What ``plan`` raises; InputError for numbers that are none.

    Examples
    --------
    >>> print(oocdl.simulate("unet.onnx", "brain.zarr", hosts=[1, 4], memory="60GB"))  # doctest: +SKIP
    """
    settings = make_settings(**options, threads=cores)
    counts = [whole("each number of hosts", count) for count in (hosts if np.iterable(hosts) else ())]
    if not counts:
        raise InputError(f"hosts takes a list of numbers of hosts, such as [1, 4], got {shown(hosts)}")
    with planned_file(model, dataset, settings) as (path, data):
        job = job_of(path, data, settings)
        rates = rates or known_rates(job.machine.engine)
        nominal, speed = rates is NOMINAL, parse_rate("network", network)
        if disk_rate is not None:
            disk = parse_rate("disk_rate", disk_rate)
            rates = replace(rates, disk_read_bytes_per_second=disk, disk_write_bytes_per_second=disk)
        found = {count: _simulated(job, count, speed, rates, weak) for count in dict.fromkeys(counts)}
    batches = {count: job.settings.batch_size * (count if weak else 1) for count in found}
    first = next(iter(found.values()))
    base = batches[first.hosts] / first.seconds / first.hosts
    rows = tuple(
        ScalingRow(
            hosts=one.hosts,
            working=sum(share > 0 for share in one.busy_shares),
            batch=batches[count],
            seconds=one.seconds,
            speedup=batches[count] / one.seconds / base,
            efficiency=batches[count] / one.seconds / base / one.hosts,
            memory_bytes=job.machine.base_bytes + max(one.peak_tier_bytes),
            traffic_bytes=max(map(sum, zip(one.sent_bytes, one.received_bytes, strict=True))),
            spilled_bytes=max(one.spilled_bytes),
            limit=one.limit,
            details=one,
        )
        for count, one in found.items()
    )
    return Scaling(f"{job.model.path.name} on hosts of {cores} cores", weak, rows, nominal)


def parse_rate(name: str, rate: float | str) -> float:
    """Read bytes a second from a number or a text; InputError if it is none.

    >>> parse_rate("network", "10Gbit"), parse_rate("disk", "2GB"), parse_rate("disk", "100 MB/s")
    (1250000000.0, 2000000000.0, 100000000.0)
    """
    if not isinstance(rate, str):
        return float(parse_bytes(rate))
    text = re.sub(r"\s*/\s*s\s*$", "", rate)
    bits = re.fullmatch(r"\s*(.*?)bit\s*", text, re.IGNORECASE)
    try:
        return parse_bytes(bits[1] + "B") / 8 if bits else float(parse_bytes(text))
    except InputError:
        raise InputError(f"{name} takes a rate such as 10Gbit or 2GB (a second), got '{rate}'") from None


def _simulated(job: Job, hosts: int, network: float, rates: Rates, weak: bool) -> SimulatedHosts:
    cores = job.machine.threads
    lanes = max(min(cores, MOST_LANES // hosts), 1)
    machine = replace(job.machine, threads=lanes, workers=hosts if hosts > 1 else 0, sharing=hosts)
    settings, binding = replace(job.settings, threads=lanes), job.sized.crops or job.binding
    batch = settings.batch_size * (hosts if weak else 1)
    request = Request(model=job.model, binding=binding, settings=settings, batch=batch, kind=PassKind.WHOLE)
    compiled = compile_within(draft_pass(request), machine)
    plan = compiled.plan
    room = machine.capacity_bytes - machine.growth_bytes(plan.counts, plan.hosts)
    factor = cores / lanes  # cores that a lane counts for
    faster = replace(
        rates,
        arithmetic={k: tuple((n, factor * r) for n, r in points) for k, points in rates.arithmetic.items()},
        memory={name: factor * rate for name, rate in rates.memory.items()},
        copy_bytes_per_second=factor * rates.copy_bytes_per_second,
    )
    cluster = Cluster(hosts=hosts, bytes_per_second=network)
    return simulate_hosts(compiled, cluster, room, lanes, faster, not discards_old_weights(plan, machine))
