"""Writes names, types, regions, attributes and keys in printed plans, each in one way.

Texts are the same on every machine. Names come from files that others wrote: a name that could be taken
for anything else is quoted, and none breaks a line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.index import Region, region_shape
from oocdl.graph.ir.program import Operand
from oocdl.planning.pass_plan import LayerPlan
from oocdl.planning.task_key import TaskKey, TaskKind

Row = tuple[str, ...]
INDENT = "    "
MOST_CELL_CHARACTERS = 48
"""Widest column, in characters; longer cells move the rest of their line to the right."""
MOST_NUMBERS = 12
"""Tuples of more numbers than these are written by their ends."""
_PLAIN = re.compile(r"[^\s,;=#|>%(){}\[\]\"\\]+")


def name_text(name: str) -> str:
    r"""Write the name of a value, node or layer.

    >>> print(name_text("down1.conv1"), name_text("a = b\n"))
    down1.conv1 "a = b\n"
    """
    return name if _PLAIN.fullmatch(name) and name.isprintable() else json.dumps(name)


def key_text(key: TaskKey) -> str:
    """Write the key of a task, or of the chunk that it makes.

    >>> key_text(TaskKey(TaskKind.RESULT, "down1.conv1", "norm1:0", 2))
    'down1.conv1 result norm1:0 #2'
    """
    layer, value = (name_text(name) if name else "" for name in (key.layer, key.value))
    kind = "" if key.kind is TaskKind.UNIT else str(key.kind)
    return " ".join(filter(None, (layer, kind, value, f"#{key.number}")))


def title_text(planned: LayerPlan) -> str:
    """Write the index and the name of a layer."""
    return f"{planned.layer.index:03d} {name_text(planned.layer.name)}"


def type_text(dtype: str, shape: Shape) -> str:
    """Write a dtype and a shape: float32 of (2, 8) is ``f32[2,8]``."""
    short = dtype.replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{short}{shape_text(shape)}"


def shape_text(shape: Iterable[int]) -> str:
    """Write a shape: ``[2,8]``."""
    return f"[{','.join(map(str, shape))}]"


def region_text(region: Region, shape: Shape) -> str:
    """Write a region of an array of ``shape`` as a slice, ``[:,3:5]``: colons stand for whole axes."""
    axes = zip(region, shape, strict=True)
    parts = (":" if part == (0, extent) else f"{part[0]}:{part[1]}" for part, extent in axes)
    return f"[{','.join(parts)}]"


def order_text(order: Order) -> str:
    """Write the order of axes in memory, ``order 0,2,3,1``; nothing where they lie as they are numbered."""
    return f"order {','.join(map(str, order))}" if order else ""


def attribute_text(value: Any) -> str:
    """Write an attribute: numbers and texts as they are, arrays and long tuples in short.

    >>> attribute_text((1, 2.5)), attribute_text(np.zeros((2, 3), "float32")), attribute_text(range(99))
    ('(1,2.5)', 'f32[2,3]', '(0,1,..,98: 99)')
    """
    if isinstance(value, np.ndarray):
        return type_text(value.dtype.name, value.shape)
    if isinstance(value, tuple | list | range):
        parts = [attribute_text(part) for part in value]
        if len(parts) > MOST_NUMBERS:
            return f"({','.join(parts[:2])},..,{parts[-1]}: {len(parts)})"
        return f"({','.join(parts)})"
    if isinstance(value, float):
        return f"{value:.9g}"  # the last digits are those of the machine's mathematical functions
    return json.dumps(value) if isinstance(value, str) else str(value)


def attributes_text(attrs: Mapping[str, Any]) -> str:
    """Write all attributes of a node, sorted by name: ``{axis=0, pads=(1,1)}`` behind a space."""
    inside = ", ".join(f"{name}={attribute_text(value)}" for name, value in sorted(attrs.items()))
    return f" {{{inside}}}" if inside else ""


def operand_text(operand: Operand, held: Shape, fill: float) -> str:
    """Write what is done to a slot, whose array has the shape ``held``, before a kernel sees it.

    >>> operand_text(Operand(3, ((0, 4), (1, 3)), (1, 4, 2), ((0, 0), (1, 0), (0, 0))), (4, 8), 0.0)
    '%3[:,1:3].reshape(1,4,2).pad(0:0,1:0,0:0)'
    >>> operand_text(Operand(3, None, (4,), ((1, 1),)), (4,), float("-inf"))
    '%3.pad(1:1, fill=-inf)'
    """
    text = f"%{operand.slot}"
    if operand.crop is not None:
        text += region_text(operand.crop, held or (1,))
        held = region_shape(operand.crop)
    if operand.shape != held:
        text += f".reshape({','.join(map(str, operand.shape))})"
    if operand.pads is not None:
        pads = ",".join(f"{before}:{after}" for before, after in operand.pads)
        text += f".pad({pads}{f', fill={fill:.9g}' if fill else ''})"
    return text


def noted(text: str, notes: Iterable[str]) -> str:
    """Write the text of a line with remarks behind it, each once: ``= Relu(x)  ; stored, order 1,0``."""
    inside = ", ".join(dict.fromkeys(note for note in notes if note))
    return f"{text}  ; {inside}" if inside else text


def aligned(rows: Sequence[Row]) -> list[str]:
    """Write rows of equally many cells as indented lines whose columns stand below each other."""
    columns = zip(*rows, strict=True)
    widths = [
        max((len(cell) for cell in column if len(cell) <= MOST_CELL_CHARACTERS), default=0)
        for column in columns
    ]
    return [
        INDENT + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def sections(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Write rows of several kinds as one aligned block; the first row of a kind has the kind in front.

    >>> sections({"reads": [("a",), ("b",)], "stores": [], "makes": [("c",)]})
    ['    reads  a', '           b', '    makes  c']
    """
    return aligned(
        [("" if number else kind, *row) for kind, same in rows.items() for number, row in enumerate(same)]
    )
