"""What a placed pass takes on each worker: bytes held, sent and received, and its share of the work.

Counted from the very bundles that will travel (``hosts/exchange``) and the calls that each worker has:
nothing is simulated, and no clock runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from oocdl.planning.cost_model import call_seconds
from oocdl.planning.hosts.exchange import Exchange
from tests.kit.placed import worker_of


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """One worker in one pass."""

    held_bytes: int
    """Weights and state that it holds between passes."""
    sent_bytes: int
    received_bytes: int
    compute_seconds: float
    """Predicted, of all its calls one after another on one thread."""


def host_costs(exchange: Exchange, workers: int) -> tuple[HostCost, ...]:
    """What a pass takes on each of ``workers``, by number."""
    sent, received, held = ([0] * workers for _ in range(3))
    for bundle in exchange.bundles:
        sent[bundle.sender] += bundle.nbytes
        received[bundle.receiver] += bundle.nbytes
    for key in exchange.graph.inputs:
        held[exchange.homes[key]] += exchange.graph.input_bytes[key]
    taken = [0.0] * workers
    maker = worker_of(exchange.placed)
    for call, seconds in zip(exchange.graph.calls, call_seconds(exchange.graph.calls), strict=True):
        taken[maker[call.key]] += seconds
    return tuple(
        HostCost(
            held_bytes=held[worker],
            sent_bytes=sent[worker],
            received_bytes=received[worker],
            compute_seconds=taken[worker],
        )
        for worker in range(workers)
    )
