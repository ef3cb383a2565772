"""The onnxruntime engine: single operators of onnxruntime, and NumPy for what lies between.

Chains of elementwise instructions run as loops, all else an instruction at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from oocdl.engines.engine import Engine, Run
from oocdl.engines.numpy_moves import operand_of
from oocdl.engines.ort.ort_kernels import KERNELS
from oocdl.engines.ort.ort_record import Orders
from oocdl.engines.ort.ort_session import forget_sessions
from oocdl.errors import UnsupportedError
from oocdl.fusion.chain import Chain, Kind, arrange, crop, makes_of, reads_of
from oocdl.fusion.executor import AnyChainStep
from oocdl.fusion.recompute import recomputed
from oocdl.graph.ir.array_layout import ordered
from oocdl.graph.ir.graph import Array, Shape
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import slot_dtypes, slot_shapes
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.ir.program_cost import ProgramScratch, most_scratch
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS

SMALL_ELEMENTS = 1 << 15
"""Maximum elements of arrays that are not worth a loop."""

Arrays = dict[int, Array]
"""Slot -> its array."""


class _ChainStep(AnyChainStep[Array]):
    def _whole(self, slot: int, kind: Kind, slots: Mapping[int, Array], places: Mapping[int, Array]) -> Array:
        if slot not in places:
            return np.empty(*kind)
        place = self._seen(places[slot], kind[0])
        assert np.shares_memory(place, places[slot]), "a result would go to a copy of its place"
        return place

    def _address(self, array: Array) -> int:
        return int(array.ctypes.data)

    def _lying(self, array: Array) -> tuple[Shape, tuple[int, ...]]:
        return array.shape, array.strides

    def _unit(self, array: Array) -> int:
        return 1

    def _copy(self, array: Array) -> Array:
        return array.copy()

    def _of_numpy(self, array: Array, dtype: str) -> Array:
        return array.astype(dtype)


class _Step:
    """A step of one instruction by a kernel on whole arrays."""

    def __init__(self, item: Instruction, orders: Orders) -> None:
        self._item, self._orders = item, orders
        self._kernel = KERNELS[item.op].bind(item, orders)
        self.full: Collection[int] = item.outputs
        """Slots that are made where they belong."""

    def run(self, slots: Arrays, places: Mapping[int, Array]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        item, orders, unpadded = self._item, self._orders, KERNELS[self._item.op].takes_unpadded
        args = [operand_of(slots[operand.slot], item, operand, unpadded) for operand in item.operands]
        outs = []
        kinds = zip(item.outputs, item.shapes, item.kernel_shapes, item.dtypes, strict=True)
        for slot, stored, shape, dtype in kinds:
            place = places.get(slot)
            slots[slot] = ordered(np.empty, stored, dtype, orders.get(slot, ())) if place is None else place
            outs.append(slots[slot].reshape(shape))
            if not np.shares_memory(outs[-1], slots[slot]):  # axes were split or joined, and lie apart
                last = (0, *range(2, len(shape)), 1) if slot in orders else ()
                outs[-1] = ordered(np.empty, shape, dtype, last)
        self._kernel(args, outs)
        for slot, out in zip(item.outputs, outs, strict=True):
            if not np.shares_memory(out, slots[slot]):
                slots[slot][...] = out.reshape(slots[slot].shape)


Stage = tuple[_ChainStep | _Step, list[int]]
"""A step, and the slots that nothing reads after it."""


def _stages(program: Program, small: int) -> list[Stage]:
    groups, dtypes = recomputed(arrange(program, small), program)
    last, orders = dict[int, int](), dict(program.orders)
    for index, group in enumerate(groups):
        last |= dict.fromkeys(reads_of(group) | makes_of(group), index)
    last |= dict.fromkeys((operand.slot for operand in program.outputs), len(groups))
    stages: list[Stage] = []
    for index, group in enumerate(groups):
        ending = [slot for slot, at in last.items() if at == index]
        if isinstance(group, Chain):
            stages.append((_ChainStep(group, makes_of(group) - {*ending}, dtypes, np), ending))
        else:
            stages.append((_Step(group, orders), ending))
    return stages


def _direct(program: Program, stages: Sequence[Stage]) -> dict[int, int]:
    """Slot -> number of the output that it is, uncropped: steps make it where it belongs."""
    orders, shapes = dict(program.orders), slot_shapes(program)

    def lying(slot: int, shape: Shape, dtype: str) -> Array:
        return ordered(np.empty, shape, dtype, orders.get(slot, ()))

    each = (step.able(lying) if isinstance(step, _ChainStep) else step.full for step, _ in stages)
    whole = {slot for able in each for slot in able}
    found: dict[int, int] = {}
    for number, item in enumerate(program.outputs):
        if item.slot in whole and item.crop is None and item.shape == shapes[item.slot]:
            found.setdefault(item.slot, number)
    return found


class OnnxRuntimeEngine(Engine):
    """Runs programs with onnxruntime on the CPU; instructions on up to ``small_elements`` are in no loop."""

    name = "onnxruntime"
    operators = frozenset(KERNELS)
    thin_slab_elements = THIN_SLAB_ELEMENTS  # 152 GFLOP/s of 16 channels, of thicker slabs 104

    def __init__(self, small_elements: int = SMALL_ELEMENTS) -> None:
        self.small_elements = small_elements
        super().__init__()

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        known = self._scratch
        if program.key not in known:
            stages = _stages(program, self.small_elements)
            steps = [step for step, _ in stages if isinstance(step, _ChainStep)]
            sums = max((step.loop.scratch_bytes for step in steps), default=0)
            known[program.key] = ProgramScratch(most_scratch(program, rules).scratch_bytes + sums)
        return known[program.key]

    def forget(self) -> None:
        super().forget()
        forget_sessions()

    def _make(self, program: Program) -> Run:
        dtypes = set(slot_dtypes(program).values())
        if "bfloat16" in dtypes:
            raise UnsupportedError("engine 'onnxruntime' takes no bfloat16 arrays; use engine='torch'")
        if "float64" in dtypes:
            raise UnsupportedError("engine 'onnxruntime' has no float64 kernels; use engine='torch' for it")
        stages = _stages(program, self.small_elements)
        direct = _direct(program, stages)

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            slots: Arrays = dict(zip(program.inputs, arrays, strict=True))
            places = {slot: outs[number] for slot, number in direct.items()}

            # Infinities and what is not a number are values like others here.
            with np.errstate(all="ignore"):
                for step, ending in stages:
                    step.run(slots, places)
                    for slot in ending:
                        slots.pop(slot, None)
            for number, item in enumerate(program.outputs):
                if direct.get(item.slot) != number:
                    outs[number][...] = crop(slots[item.slot], item.crop).reshape(item.shape)

        return run


def make_engine() -> OnnxRuntimeEngine:
    """Make the engine for ``get_engine``; products of NumPy then take one thread, in all the process.

    Several programs run at once. Products with all cores each wait for each other: forty times as long.
    """
    threadpool_limits(1, user_api="blas")
    return OnnxRuntimeEngine()
