"""Which values of a program are made where they belong: in the memory of its outputs, or over an input.

What lies there takes nothing of the heap, faults in no page, and is not copied in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from oocdl.engines.operands import crop_of, pads_of, slot_dtypes, slot_shapes, spatial_pads
from oocdl.engines.torch_chain import ChainStep
from oocdl.engines.torch_columns import has_few_taps
from oocdl.engines.torch_pads import evened, flipped_pads, rows_alone
from oocdl.engines.torch_points import FULL, has_onednn, is_point
from oocdl.engines.torch_windows import LANDING
from oocdl.graph.layout import SPACED
from oocdl.graph.program import Instruction, Program, padded_shape

ONEDNN = frozenset({"float32", "bfloat16"})
"""Precisions of its convolutions."""


def lands(item: Instruction, ordered: Collection[int]) -> bool:
    """Whether the kernel of an instruction that runs by itself makes its result where it is told to.

    ``ordered``: slots that have their channels last.
    """
    if item.op not in LANDING or not {item.operands[0].slot, item.outputs[0]} <= set(ordered):
        return False
    made = item.kernel_shapes[0]
    if item.op == "MaxPoolGrad":
        whole = made == padded_shape(item.operands[0]) and not any(crop_of(item))
        return whole and len(made) in SPACED and made[1] > 1
    data, weights = item.operands
    outside = data.pads is not None and any(map(any, data.pads[:2]))
    if (
        item.dtypes[0] not in ONEDNN
        or not has_onednn()
        or len(made) not in SPACED
        or pads_of(weights) is not None
    ):
        return False
    if item.fill or outside or any(crop_of(item)[:2]) or 0 in (*data.shape, *made):
        return False
    shape = weights.shape if item.op == "Conv" else (weights.shape[1], weights.shape[0], *weights.shape[2:])
    return shape[0] == made[1] and _slides(item, shape)


def _slides(item: Instruction, weights: Sequence[int]) -> bool:
    """Whether it is a convolution with ``weights[d, c, ..]`` that need not make more than is wanted."""
    data, rank = item.operands[0], len(weights) - 2
    strides = tuple(item.attrs.get("strides") or (1,) * rank)
    dilations = tuple(item.attrs.get("dilations") or (1,) * rank)
    pads: Sequence[tuple[int, int]] = spatial_pads(data)
    if item.op == "ConvTranspose":
        if set(strides) != {1}:
            return False
        pads = flipped_pads(item, dilations)
        if prod(weights[2:]) == 1:
            return not any(map(any, pads)) and min(weights[:2]) >= FULL
    elif is_point(weights, pads):
        return min(weights[:2]) >= FULL
    elif has_few_taps(weights, strides) and weights[0] >= FULL and item.dtypes[0] != "bfloat16":
        return False
    seen = [extent + min(b, 0) + min(a, 0) for extent, (b, a) in zip(data.shape[2:], pads, strict=True)]
    outside = [(max(b, 0), max(a, 0)) for b, a in pads]
    if min(seen) <= 0:
        return False
    even = evened(outside, seen, weights[2:], strides, dilations)
    if even[0][0] == even[0][1]:
        return True
    shape, rows = (*data.shape[:2], *seen), item.kernel_shapes[0][2]
    return rows_alone(shape, weights[2], even, strides, dilations, rows) > 0


def placed(program: Program, steps: Sequence[ChainStep | Instruction]) -> dict[int, int]:
    """Slot -> number of the output in whose memory it is made.

    An output that is not cropped lies where it belongs. So does a value before it that a chain
    writes it over.
    """
    ordered = frozenset(slot for slot, _ in program.orders)
    able = {slot for step in steps for slot in _able(step, ordered)}
    found: dict[int, int] = {}
    for number, item in enumerate(program.outputs):
        if item.slot in able and item.crop is None:
            found.setdefault(item.slot, number)
    dtypes, shapes, orders = slot_dtypes(program), slot_shapes(program), dict(program.orders)

    def kind(slot: int) -> object:
        return dtypes[slot], shapes[slot], orders.get(slot)

    for step in reversed(steps):
        for slot, old in step.reuse.items() if isinstance(step, ChainStep) else ():
            if slot in found and old in able and kind(slot) == kind(old):
                found[old] = found[slot]
    return found


def _able(step: ChainStep | Instruction, ordered: Collection[int]) -> Collection[int]:
    """Slots that a chain or an instruction makes whole, where it is told to."""
    if isinstance(step, ChainStep):
        return step.full
    return step.outputs[:1] if lands(step, ordered) else ()


def overwritten(program: Program, steps: Sequence[ChainStep | Instruction]) -> frozenset[int]:
    """Numbers of the inputs that chains write over."""
    taken = {old for step in steps if isinstance(step, ChainStep) for old in step.reuse.values()}
    return frozenset(number for number, slot in enumerate(program.inputs) if slot in taken)
