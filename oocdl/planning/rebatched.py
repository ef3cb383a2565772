"""Compares a file whose batch is fixed with what it becomes for another: sample by sample, by numbers.

Where the constants of a file hold the size of its batch, they are read as the batch of the run. That is a
guess until a batch of two is what two of one are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from oocdl.engines.engine import get_engine
from oocdl.errors import UnsupportedError
from oocdl.graph.ir.graph import Array, Role
from oocdl.graph.ir.index import as_slices
from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.reader import Imported, OnnxModel
from oocdl.graph.partition.tiling import whole_unit
from oocdl.graph.transforms.canonicalize import canonicalize
from oocdl.graph.transforms.factorize import factorize
from oocdl.ops import RULES

MOST_BYTES = 1 << 30
"""Limit for all values of the network together; a larger network is refused, not compared."""
_EQUAL = 1e-9
"""Relative, in float64: what is off by less is equal."""


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""(input, shape) of each."""


def check_rebatched(model: OnnxModel, imported: Imported) -> None:
    """Raise UnsupportedError if a file whose constants were read as the batch is no longer itself."""
    if imported.rebatched:
        values = imported.graph.values
        shapes = tuple((name, values[name].shape) for name in imported.inputs)
        _check(model, shapes, tuple(name for name, _ in imported.outputs))


@lru_cache(maxsize=8)
def _check(model: OnnxModel, shapes: Shapes, outputs: tuple[str, ...]) -> None:
    """Compare predictions for two batches of the file's size at once with those for each alone."""
    size = next(port.dims[0] for port in model.inputs if isinstance(port.dims[0], int))
    one, two = (
        model.bind(
            RULES,
            {name: (n * size, *shape[1:]) for name, shape in shapes},
            precision="float64",
            training=False,
            outputs=outputs,
        )
        for n in (1, 2)
    )
    cure = f"export it with an open batch, or pass batch_size={size}"
    if sum(value.nbytes for value in two.graph.values.values()) > MOST_BYTES:
        raise UnsupportedError(
            f"the batch of {shown(model.path.name)} is fixed to {size}, and its network is too large to see "
            f"what becomes of it with another: {cure}"
        )
    random = np.random.default_rng(0)
    given = {v.name: _numbers(random, v.shape, v.dtype) for v in two.graph.of_role(Role.INPUT)}
    whole = _predicted(two, given)
    halves = [
        _predicted(one, {name: array[half] for name, array in given.items()})
        for half in (slice(size), slice(size, None))
    ]
    for (name, _), both, *parts in zip(two.outputs, whole, *halves, strict=True):
        apart = np.concatenate(parts) if parts[0].ndim else parts[0]
        scale = float(np.abs(both).max(initial=0.0)) or 1.0
        if apart.shape != both.shape or not np.allclose(
            both, apart, rtol=0, atol=_EQUAL * scale, equal_nan=True
        ):
            raise UnsupportedError(
                f"{shown(model.path.name)} was exported for a batch of {size}, and does something else with "
                f"another: output {shown(name)} of two batches is not that of each alone; {cure}"
            )


def _numbers(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    if dtype.startswith("float"):
        return random.normal(size=shape)
    return random.integers(0, 2, shape).astype(dtype)


def _predicted(imported: Imported, given: Mapping[str, Array]) -> list[Array]:
    """Compute the outputs of a graph on whole arrays."""
    small = canonicalize(imported.graph, RULES)
    factored = factorize(small, RULES)
    unit = whole_unit(factored, RULES, [factored.stored(name) for name in small.outputs])
    arrays: list[Array] = []
    for name, region in unit.reads:
        value = small.values[name]
        if value.role in (Role.WEIGHT, Role.STATE):
            array = imported.weights[name].read()
        elif value.role is Role.RANDOM:
            array = np.full(value.shape, 0.5)
        else:
            array = given[name] if name in given else small.constants[name]
        whole = np.asarray(array, value.dtype).reshape(factored.shapes[name])
        arrays.append(np.array(whole[as_slices(region)], order="C"))
    results = get_engine("numpy").compile(unit.program)(arrays)
    made = {name: array for (name, _), array in zip(unit.makes, results, strict=True)}
    names = dict(zip(imported.graph.outputs, small.outputs, strict=True))  # merging may have renamed some
    return [
        made[factored.stored(names[value])].reshape(small.values[names[value]].shape)
        for _, value in imported.outputs
    ]
