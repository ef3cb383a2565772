"""What hosts share in a simulation: a network, and a scheduler that looks at one task after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts of equal kind, and what is between them."""

    hosts: int
    bytes_per_second: float
    """Of each host's network interface, in each direction at once."""
    latency_seconds: float = 2e-5
    """From one host to another, of a message without bytes."""
    scheduler_seconds: float = 1e-3
    """What the scheduler takes for each task: measured, with two workers."""
    submit_seconds: float = 8e-5
    """What it takes beforehand for each task, before the first one starts: measured."""
    message_seconds: float = 7e-5
    """What a host's event loop takes for each message that it sends or gets, one after another: measured,
    0.29 ms there and back again between two workers."""
    notice_seconds: float = 2e-3
    """Until a message between a worker and the scheduler leaves: Dask collects them for so long."""


class Network:
    """Messages queue at the interface of the host that sends them, and at that of the one that takes them.

    The switches between have room for all that interfaces can send.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._out_free = [0.0] * cluster.hosts
        self._in_free = [0.0] * cluster.hosts
        self._loop_free = [0.0] * cluster.hosts
        self.loop_seconds = [0.0] * cluster.hosts
        self.sent_bytes = [0] * cluster.hosts
        self.received_bytes = [0] * cluster.hosts

    def handle(self, when: float, host: int) -> float:
        """When the event loop of a host has handled a message of which it hears at ``when``."""
        takes = self.cluster.message_seconds
        self._loop_free[host] = max(self._loop_free[host], when) + takes
        self.loop_seconds[host] += takes
        return self._loop_free[host]

    def transfer(self, now: float, sender: int, receiver: int, nbytes: int) -> float:
        """When a message that leaves now has arrived."""
        takes, latency = nbytes / self.cluster.bytes_per_second, self.cluster.latency_seconds
        leaves = max(now, self._out_free[sender])
        self._out_free[sender] = leaves + takes
        arrived = self._in_free[receiver] = max(leaves + latency, self._in_free[receiver]) + takes
        self.sent_bytes[sender] += nbytes
        self.received_bytes[receiver] += nbytes
        return arrived


class Scheduler:
    """Takes its time for one task after another."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free_at = self.busy_seconds = 0.0
        self.tasks = 0

    def handle(self, when: float, tasks: int = 1) -> float:
        """When the scheduler has handled ``tasks`` of which it hears at ``when``."""
        takes = tasks * self.cluster.scheduler_seconds
        self.free_at = max(self.free_at, when) + takes
        self.busy_seconds += takes
        self.tasks += tasks
        return self.free_at
