"""The minimum cost MultiCut of a graph: into how many parts, and which, its edges' costs say by themselves.

Joining the two ends of an edge is rewarded where its cost is positive and punished where it is negative:
what is sought is the partition with the least sum of costs of edges between parts. That is NP-hard. Here
greedy joins (GAEC) are improved by Kernighan-Lin moves with joins (KLj), both of Keuper et al. 2015,
arXiv:1505.06973, in plain Python: quick enough for graphs of some hundred nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Graph = list[dict[int, float]]
"""Of each node: neighbour -> cost of the edge."""
LEAST_GAIN = 1e-9
"""Gains below it are taken for rounding, so that the search ends."""


def multicut(nodes: int, edges: Sequence[tuple[int, int]], costs: Sequence[float]) -> list[int]:
    """Return the part of each node: numbers from 0 in the order of the parts' first nodes.

    Every part is connected. Costs of edges that are listed twice add up; an edge from a node to itself is
    a ``ValueError``. No join of two parts, no move of a node to another part and none into a part of its
    own makes the result better; that is less than the optimum, which small graphs have almost always.

    >>> multicut(4, [(0, 1), (1, 2), (2, 3), (0, 3)], [2.0, -3.0, 2.0, 1.0])
    [0, 0, 1, 1]
    """
    graph: Graph = [{} for _ in range(nodes)]
    for (one, other), cost in zip(edges, costs, strict=True):
        if one == other:
            raise ValueError(f"an edge from node {one} to itself cannot be cut")
        for here, there in ((one, other), (other, one)):
            graph[here][there] = graph[here].get(there, 0.0) + float(cost)
    parts = greedy_joins(graph)
    while _improve(graph, parts):
        parts = _connected(graph, parts)
    return _connected(graph, parts)


def cut_cost(edges: Sequence[tuple[int, int]], costs: Sequence[float], parts: Sequence[int]) -> float:
    """Return what a partition costs: the sum over edges between parts.

    >>> cut_cost([(0, 1), (1, 2)], [2.0, -3.0], [0, 0, 1])
    -3.0
    """
    return sum(cost for (a, b), cost in zip(edges, costs, strict=True) if parts[a] != parts[b])


def greedy_joins(graph: Graph) -> list[int]:
    """Join the two parts of the greatest sum of costs while it is positive; return the part of each node."""
    rest = [dict(row) for row in graph]
    into = list(range(len(graph)))
    heap = [(-cost, a, b) for a, row in enumerate(graph) for b, cost in row.items() if a < b and cost > 0]
    heapq.heapify(heap)
    while heap:
        cost, a, b = heapq.heappop(heap)
        if rest[a].get(b) != -cost:  # of parts that have changed since
            continue
        if len(rest[a]) < len(rest[b]):
            a, b = b, a
        into[b] = a
        for other, more in rest[b].items():
            del rest[other][b]
            if other != a:
                total = rest[a].get(other, 0.0) + more
                rest[a][other] = rest[other][a] = total
                if total > 0:
                    heapq.heappush(heap, (-total, min(a, other), max(a, other)))
        rest[b] = {}
    return _connected(graph, [_root(into, node) for node in range(len(graph))])


def _root(into: list[int], node: int) -> int:
    while into[node] != node:
        node = into[node]
    return node


def _connected(graph: Graph, parts: Sequence[int]) -> list[int]:
    """Number connected parts from 0; what moves have torn becomes parts of its own, at the same cost."""
    found = [-1] * len(graph)
    count = 0
    for first in range(len(graph)):
        if found[first] >= 0:
            continue
        found[first], stack = count, [first]
        while stack:
            node = stack.pop()
            for other in graph[node]:
                if found[other] < 0 and parts[other] == parts[first]:
                    found[other] = count
                    stack.append(other)
        count += 1
    return found


def _improve(graph: Graph, parts: list[int]) -> bool:
    """Try each pair of touching parts, then each part with an empty one; returns whether one gained."""
    members: dict[int, set[int]] = {}
    for node, part in enumerate(parts):
        members.setdefault(part, set()).add(node)
    touching = {(parts[a], parts[b]) for a, row in enumerate(graph) for b in row if parts[a] < parts[b]}
    gained = False
    for one, other in sorted(touching):
        gained |= _exchange(graph, members[one], members[other])
    for part in sorted(members):
        apart: set[int] = set()
        while _exchange(graph, members[part], apart):
            gained = True
            members[len(members)], apart = apart, set()
    for part, nodes in members.items():
        for node in nodes:
            parts[node] = part
    return gained


def _exchange(graph: Graph, one: set[int], other: set[int]) -> bool:
    """Move nodes between two parts, or join them into ``one``, whichever gains most; True if that is a gain.

    All nodes are moved, each once, the best next one first, even at a loss; the best of all the states on
    that way is taken. So the search leaves optima that no single move leaves.
    """
    if not one:
        return False
    side = dict.fromkeys(one, False) | dict.fromkeys(other, True)
    gains = {
        node: sum(
            cost if side[near] != side[node] else -cost for near, cost in graph[node].items() if near in side
        )
        for node in side
    }
    join = sum(cost for node in one for near, cost in graph[node].items() if near in other)
    total = best = 0.0
    moved: list[int] = []
    count = 0
    while gains:
        node = max(gains, key=gains.__getitem__)
        total += gains.pop(node)
        side[node] = not side[node]
        moved.append(node)
        for near, cost in graph[node].items():
            if near in gains:
                gains[near] += 2 * cost if side[near] != side[node] else -2 * cost
        if total > best + LEAST_GAIN:
            best, count = total, len(moved)
    if join > best + LEAST_GAIN:
        one |= other
        other.clear()
        return True
    for node in moved[:count]:
        source, target = (other, one) if node in other else (one, other)
        source.remove(node)
        target.add(node)
    return count > 0
