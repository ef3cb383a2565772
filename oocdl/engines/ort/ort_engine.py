"""The onnxruntime engine: small models of standard operators, and NumPy on what lies between.

Chains of elementwise instructions run block by block (``ort_chain``): onnxruntime would make an array
of every one of them. What is left between them becomes sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from oocdl.engines.engine import Engine, Run
from oocdl.engines.ort.lowerings import BLOCKWISE, KERNELS
from oocdl.engines.ort.ort_chain import ChainStep
from oocdl.engines.ort.ort_record import Into
from oocdl.engines.ort.steps import ArrayStep, Kinds, SessionStep, Slots, indices_of
from oocdl.errors import UnsupportedError
from oocdl.fusion.executor import crop
from oocdl.fusion.grouping import Chain, arrange, makes_of, reads_of
from oocdl.fusion.recompute import recomputed
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import slot_dtypes
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.ir.program_cost import ProgramScratch, most_scratch
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block of a chain: half a MiB of float32. With 64 Ki, chains took 10 %
longer for their calls."""

Step = ChainStep | ArrayStep | SessionStep
Part = Chain | tuple[Instruction, Into] | list[Instruction]
"""Content of a step: a chain, an instruction for a kernel on arrays, or instructions for a session."""
Stage = tuple[Step, list[int]]
"""A step, and the slots that nothing reads after it."""


def _check_dtypes(program: Program) -> None:
    dtypes = set(slot_dtypes(program).values())
    if "bfloat16" in dtypes:
        raise UnsupportedError("engine 'onnxruntime' takes no bfloat16 arrays; use engine='torch'")
    if "float64" in dtypes:
        raise UnsupportedError("engine 'onnxruntime' has no float64 kernels; use engine='torch' for float64")


def _looks_up(item: Instruction, before: Sequence[Instruction]) -> bool:
    """Whether an instruction looks up indices that instructions ``before`` it make."""
    indices = indices_of(item)
    return indices is not None and any(indices.slot in one.outputs for one in before)


def _stages(program: Program, kinds: Kinds, elements: int) -> list[Stage]:
    """The steps of a program, in the order in which they run."""
    groups, dtypes = recomputed(arrange(program, elements, BLOCKWISE), program)
    parts: list[Part] = []
    last: dict[int, int] = {}
    for group in groups:
        if isinstance(group, Chain):
            parts.append(group)
        elif (kernel := KERNELS[group.op].on_arrays(group, kinds.orders)) is not None:
            parts.append((group, kernel))
        elif parts and isinstance(parts[-1], list) and not _looks_up(group, parts[-1]):
            parts[-1].append(group)
        else:
            parts.append([group])
        last |= dict.fromkeys(reads_of(group) | makes_of(group), len(parts) - 1)
    last |= dict.fromkeys((operand.slot for operand in program.outputs), len(parts))
    stages = []
    for index, part in enumerate(parts):
        later = frozenset(slot for slot, at in last.items() if at > index)
        step: Step
        if isinstance(part, Chain):
            step = ChainStep(part, later & makes_of(part), dtypes)
        elif isinstance(part, tuple):
            step = ArrayStep(part[0], kinds, part[1])
        else:
            step = SessionStep(part, kinds, later)
        stages.append((step, [slot for slot, at in last.items() if at == index]))
    return stages


def _direct(program: Program, stages: Sequence[Stage], kinds: Kinds) -> dict[int, int]:
    """Slot -> number of the output that it is, uncropped: steps make it where it belongs."""
    whole = {slot for step, _ in stages for slot in step.full}
    found: dict[int, int] = {}
    for number, item in enumerate(program.outputs):
        if item.slot in whole and item.crop is None and item.shape == kinds.shapes[item.slot]:
            found.setdefault(item.slot, number)
    return found


class OnnxRuntimeEngine(Engine):
    """Runs programs with onnxruntime on the CPU.

    Chains of elementwise instructions run in blocks of ``block_elements``.
    """

    name = "onnxruntime"
    operators = frozenset(KERNELS)
    thin_slab_elements = THIN_SLAB_ELEMENTS  # 152 GFLOP/s of 16 channels, of thicker slabs 104

    def __init__(self, block_elements: int = BLOCK_ELEMENTS) -> None:
        self.block_elements = block_elements
        super().__init__()

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """See ``Engine.scratch_of``."""
        return most_scratch(program, rules)

    def _make(self, program: Program) -> Run:
        _check_dtypes(program)
        kinds = Kinds.of(program)
        stages = _stages(program, kinds, self.block_elements)
        direct = _direct(program, stages, kinds)

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            slots: Slots = dict(zip(program.inputs, arrays, strict=True))
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
