"""Cuts of weights, for networks whose weights are more than their activations: tensor parallelism.

Each weight is cut along one of its axes, so that each worker has, reads and updates a part of it, and neither
weights nor their gradients travel. Layers take turns: one makes a part of its channels on each worker, the
next reads these, and what it makes are partial sums of all channels, which travel. So classes of channels
fall into two sets, of which either may be cut. (Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053.)
"""

from __future__ import annotations

from collections import Counter, defaultdict

from oocdl.graph.ir.graph import Role
from oocdl.planning.slot_search import MIN_CHANNELS
from oocdl.planning.tile_search import Layering


def weight_bytes(layering: Layering) -> int:
    """Bytes of all weights."""
    return sum(value.nbytes for value in layering.factored.graph.of_role(Role.WEIGHT))


def weight_cuts(layering: Layering) -> tuple[tuple[int, ...], ...]:
    """Two sets of classes, or fewer: no weight has two axes of the first, which has those of most bytes.

    Of a perceptron the first has, for instance, the columns of its first weight, which are the rows of the
    second, and so on; the second set has all others.
    """
    classes, nbytes = layering.classes, Counter[int]()
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for value in layering.factored.graph.of_role(Role.WEIGHT):
        cuts = {
            cut
            for cut in classes.of_axes.get(value.name, ())
            if classes.names[cut].startswith("channels") and classes.extents[cut] >= 2 * MIN_CHANNELS
        }
        for cut in cuts:
            nbytes[cut] += value.nbytes
            beside[cut] |= cuts - {cut}
    first: list[int] = []
    for cut in sorted(nbytes, key=lambda cut: (-nbytes[cut], cut)):
        if beside[cut].isdisjoint(first):
            first.append(cut)
    second = [cut for cut in sorted(nbytes) if cut not in first]
    return tuple(tuple(found) for found in (first, second) if found)


def travelling_seconds(
    layering: Layering, cuts: tuple[int, ...], workers: int, bytes_per_second: float
) -> float:
    """The least seconds in which one worker gets the others' partial sums of what it combines."""
    values, of_axes = layering.factored.graph.values, layering.classes.of_axes
    nbytes = 0.0
    for layer in layering.layers(cuts):
        for name in layer.partials:
            shared = workers if not set(of_axes[name]).isdisjoint(cuts) else 1
            nbytes += values[name].nbytes * (workers - 1) / shared
    return nbytes / bytes_per_second
