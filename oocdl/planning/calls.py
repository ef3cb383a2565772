"""What a call of a step reads and makes, in bytes: for whoever counts without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oocdl.graph.ir.array_layout import itemsize
from oocdl.graph.ir.index import region_size
from oocdl.planning.partial_sums import Key
from oocdl.planning.task_graph import CombineCall, UnitCall


def made_of(call: UnitCall | CombineCall) -> list[tuple[Key, int, tuple[int, ...]]]:
    """(key, bytes, uses) of each result."""
    if isinstance(call, UnitCall):
        makes: Sequence[tuple[str, Any]] = call.unit.makes
        dtypes: Sequence[str] = call.dtypes
    else:
        makes, dtypes = [(name, call.region) for name in call.values], call.dtypes
    single = len(makes) == 1
    return [
        (
            call.key if single else (f"{call.key[0]} > {name}", call.key[1]),
            region_size(region) * itemsize(dtype),
            uses,
        )
        for (name, region), dtype, uses in zip(makes, dtypes, call.uses, strict=True)
    ]


def parts_of(call: UnitCall | CombineCall) -> list[tuple[Key, int]]:
    """(chunk, bytes that the call reads of it)."""
    if isinstance(call, CombineCall):
        sizes = [nbytes for _, nbytes, _ in made_of(call)]
        return [(key, sizes[n % len(sizes)]) for n, key in enumerate(call.arguments)]
    found = [
        (call.arguments[number], region_size(part) * itemsize(read.dtype))
        for read in call.reads
        for number, part in read.chunks
    ]
    for index, lane in enumerate(call.lanes):
        if lane is not None:
            found.append((call.arguments[lane[0]], made_of(call)[index][1]))
    return found
