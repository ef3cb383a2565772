"""The onnxruntime engine: small models of standard operators, and NumPy on what lies between.

Chains of elementwise instructions run block by block (``chains``): onnxruntime would make an array
of every one of them. What is left between them becomes sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from oocdl.engines.engine import Engine, Run
from oocdl.engines.ort.lowerings import BLOCKWISE, KERNELS
from oocdl.engines.ort.nchwc.conv_step import BlockConvolution, suits_blocks
from oocdl.engines.ort.nchwc.last_step import channels_last_kernel, suits_channels_last
from oocdl.engines.ort.ort_chain import ChainStep, crop
from oocdl.engines.ort.ort_record import Into
from oocdl.engines.ort.steps import (
    Kinds,
    NumpyStep,
    SessionStep,
    Slots,
    indices_of,
    numpy_kernel,
    suits_numpy,
)
from oocdl.errors import UnsupportedError
from oocdl.fusion.grouping import Chain, Group, arrange, makes_of, reads_of
from oocdl.fusion.loop_nest import is_loop
from oocdl.fusion.recompute import recomputed
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.ir.program_cost import ProgramScratch, most_scratch
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS

BLOCK_ELEMENTS = 1 << 17
"""Elements of a block of a chain: half a MiB of float32. With 64 Ki, chains took 10 %
longer for their calls."""

Step = ChainStep | NumpyStep | SessionStep


def _check_dtypes(program: Program) -> None:
    dtypes = {dtype for item in program.instructions for dtype in item.dtypes}
    if "bfloat16" in dtypes | set(program.input_dtypes):
        raise UnsupportedError("engine 'onnxruntime' takes no bfloat16 arrays; use engine='torch'")
    if "float64" in dtypes | set(program.input_dtypes):
        raise UnsupportedError("engine 'onnxruntime' has no float64 kernels; use engine='torch' for float64")


@dataclass(frozen=True, eq=False)
class _Stage:
    """A step, and which results can be copied out and freed after it."""

    step: Step
    done: tuple[int, ...]
    """Outputs of the program (by number) to be copied from their slots after it."""
    dying: tuple[int, ...]
    """Slots that nothing reads after it."""


def _numpy_kernel(item: Instruction, kinds: Kinds) -> Into | None:
    """Return the kernel on arrays that an instruction runs by; None where it is left to a session."""
    if suits_numpy(item):
        return numpy_kernel(item)
    if suits_blocks(item, kinds.orders):
        return BlockConvolution(item, kinds)
    return channels_last_kernel(item) if suits_channels_last(item, kinds.orders) else None


def _joined(groups: Sequence[Group], kinds: Kinds) -> list[Chain | list[Instruction]]:
    """Join neighbouring instructions that are left to sessions."""
    found: list[Chain | list[Instruction]] = []
    session = False
    for group in groups:
        if isinstance(group, Chain):
            found.append(group)
            session = False
            continue
        alone = _numpy_kernel(group, kinds) is not None
        last = found[-1] if session and not alone else None
        indices = indices_of(group)
        if isinstance(last, list) and not (
            indices and any(indices.slot in item.outputs for item in last)  # a session's are read before it
        ):
            last.append(group)
        else:
            found.append([group])
        session = not alone
    return found


class _Maker:
    """Makes the stages of a program."""

    def __init__(self, program: Program, elements: int, threads: int) -> None:
        self.program, self.threads = program, threads
        self.kinds = Kinds.of(program)
        arranged = arrange(program, elements, BLOCKWISE)
        groups, self.dtypes = recomputed(arranged, program, is_loop)
        self.parts = _joined(groups, self.kinds)
        self.reads = [self._of(part, reads_of) for part in self.parts]
        self.makes = [self._of(part, makes_of) for part in self.parts]
        self.last: dict[int, int] = {}
        for index, (reads, makes) in enumerate(zip(self.reads, self.makes, strict=True)):
            self.last |= dict.fromkeys(reads | makes, index)

    @staticmethod
    def _of(part: Chain | list[Instruction], slots_of: Callable[[Group], frozenset[int]]) -> frozenset[int]:
        groups = [part] if isinstance(part, Chain) else part
        return frozenset(slot for group in groups for slot in slots_of(group))

    def stages(self) -> list[_Stage]:
        """The program in the order it runs."""
        final = {operand.slot for operand in self.program.outputs}
        stages = []
        for index, part in enumerate(self.parts):
            later = {slot for slot in self.makes[index] if self.last[slot] > index}
            ending = frozenset(slot for slot, at in self.last.items() if at == index)
            done = [n for n, operand in enumerate(self.program.outputs) if operand.slot in ending]
            step: Step
            if isinstance(part, Chain):
                step = ChainStep(part, frozenset(later | (self.makes[index] & final)), self.dtypes)
            elif kernel := _numpy_kernel(part[0], self.kinds):
                step = NumpyStep(part[0], self.kinds, kernel)
            else:
                step = SessionStep(part, self.program, self.kinds, later, self.threads)
            stages.append(_Stage(step, tuple(done), tuple(sorted(ending))))
        return stages


def _direct(program: Program, stages: Sequence[_Stage], kinds: Kinds) -> dict[int, int]:
    """Slot -> number of the output that it is, uncropped: steps of NumPy make it where it belongs."""
    whole: set[int] = set()
    for stage in stages:
        if isinstance(stage.step, ChainStep):
            whole |= stage.step.full
        elif isinstance(stage.step, NumpyStep):
            whole |= set(stage.step.outputs)
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

    def __init__(self, threads_per_kernel: int = 1, block_elements: int = BLOCK_ELEMENTS) -> None:
        self.threads_per_kernel = threads_per_kernel
        self.block_elements = block_elements
        super().__init__()

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        """See ``Engine.scratch_of``."""
        return most_scratch(program, rules)

    def _make(self, program: Program) -> Run:
        _check_dtypes(program)
        maker = _Maker(program, self.block_elements, self.threads_per_kernel)
        stages = maker.stages()
        direct = _direct(program, stages, maker.kinds)
        made = {slot for stage in stages for slot in stage.dying}
        written = {n for stage in stages if isinstance(stage.step, SessionStep) for n in stage.step.numbers}
        written |= set(direct.values())
        rest = [n for n, item in enumerate(program.outputs) if item.slot not in made]

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            slots: Slots = dict(zip(program.inputs, arrays, strict=True))
            places = {slot: outs[number] for slot, number in direct.items()}

            def put(numbers: Sequence[int]) -> None:
                for number in numbers:
                    if number not in written:
                        item = program.outputs[number]
                        outs[number][...] = crop(slots[item.slot], item.crop).reshape(item.shape)

            # Infinities and what is not a number are values like others here.
            with np.errstate(all="ignore"):
                for stage in stages:
                    if isinstance(stage.step, SessionStep):
                        stage.step.run(slots, outs)
                    else:
                        stage.step.run(slots, places)
                    put(stage.done)
                    for slot in stage.dying:
                        slots.pop(slot, None)
                put(rest)

        return run


def make_engine(threads_per_kernel: int) -> OnnxRuntimeEngine:
    """Make the engine for ``get_engine``; products of NumPy then take as many threads, in all the process.

    Several programs run at once. Products with all cores each wait for each other: forty times as long.
    """
    threadpool_limits(threads_per_kernel, user_api="blas")
    return OnnxRuntimeEngine(threads_per_kernel)
