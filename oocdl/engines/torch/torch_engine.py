"""The torch engine: instructions run one after another on PyTorch's CPU kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from oocdl.engines.convolution import without_group_axes
from oocdl.engines.engine import Engine, Run
from oocdl.engines.torch.conv.dispatch import pad
from oocdl.engines.torch.layout import channels_last
from oocdl.engines.torch.scratch import overwritten, placed, scratch_bytes
from oocdl.engines.torch.split_concat import in_parts
from oocdl.engines.torch.torch_chain import ChainStep, Spare
from oocdl.engines.torch.torch_kernels import KERNELS
from oocdl.engines.torch.torch_record import Result
from oocdl.engines.torch.torch_record import Run as KernelRun
from oocdl.engines.torch.torch_threads import team_of
from oocdl.engines.torch.transfer import shared, to_torch
from oocdl.fusion.chain import Chain, Group, arrange, crop, makes_of, reads_of
from oocdl.fusion.recompute import recomputed
from oocdl.graph.ir.graph import Array
from oocdl.graph.ir.op_rule import Rules
from oocdl.graph.ir.operands import pads_of
from oocdl.graph.ir.program import Instruction, Program
from oocdl.graph.ir.program_cost import ProgramScratch
from oocdl.graph.ir.slabs import THIN_SLAB_ELEMENTS
from oocdl.graph.transforms.channels_last import SPATIAL_RANKS

Prepare = Callable[[Tensor], Tensor]
SMALL_ELEMENTS = 1 << 9
"""Maximum elements of arrays that are not worth a loop."""


def _preparation(instruction: Instruction, index: int, is_channels_last: bool) -> Prepare:
    """The function that makes an operand of its slot: it crops, reshapes, orders in memory, pads."""
    operand = instruction.operands[index]
    pads = None if KERNELS[instruction.op].takes_unpadded else pads_of(operand)

    def prepare(tensor: Tensor) -> Tensor:
        tensor = crop(tensor, operand.crop)
        if tensor.shape != operand.shape:
            tensor = tensor.reshape(operand.shape)
        if is_channels_last:
            tensor = channels_last(tensor)
        return tensor if pads is None else pad(tensor, pads, instruction.fill)

    return prepare


class Step:
    """One instruction, with all that can be decided before it runs."""

    def __init__(
        self, instruction: Instruction, channels_last_slots: Collection[int], on_device: bool = False
    ) -> None:
        """Binds the kernel of ``instruction``; ``channels_last_slots`` have their channels last."""
        self.instruction = instruction
        kernel = KERNELS[instruction.op]
        self.are_placed, self.kernel = kernel.placed > 0, (on_device and kernel.on_device) or kernel.run
        if on_device and kernel.on_host:
            self.kernel = partial(_by_processor, kernel.run)
        self.slots = [operand.slot for operand in instruction.operands]
        wanted = _operands_channels_last(instruction, channels_last_slots)
        self.prepare = [_preparation(instruction, i, wanted[i]) for i in range(len(instruction.operands))]
        self.dtypes = [getattr(torch, dtype) for dtype in instruction.dtypes]
        made = range(len(instruction.outputs))
        self.arrange = [_arrangement(instruction, i, channels_last_slots) for i in made]

    def run(self, slots: dict[int, Tensor], places: Mapping[int, Tensor]) -> None:
        """Read operands from ``slots``, put results there; in the memory of ``places`` where given."""
        item = self.instruction
        args = [make(slots[slot]) for make, slot in zip(self.prepare, self.slots, strict=True)]
        if self.are_placed:
            known = zip(item.outputs, item.kernel_shapes, strict=True)
            where = [places[slot].view(shape) if slot in places else None for slot, shape in known]
            results = self.kernel(args, item, where)
        elif item.outputs[0] in places:
            place = places[item.outputs[0]]
            (made,) = self.kernel(args, item, channels_last(place.view(item.kernel_shapes[0])))
            assert made.data_ptr() == place.data_ptr(), "a result went to a copy of its place"
            slots[item.outputs[0]] = place
            return
        else:
            results = self.kernel(args, item)
        for index, result in enumerate(results):
            if result.shape != item.kernel_shapes[index] or result.dtype != self.dtypes[index]:
                wanted = f"{item.dtypes[index]} {item.kernel_shapes[index]}"
                raise ValueError(f"{item.op} gave {result.dtype} {tuple(result.shape)}, wanted {wanted}")
            arrange = self.arrange[index]
            if arrange is not None:
                result = arrange(result)
            seen = item.shapes[index]
            slots[item.outputs[index]] = result if result.shape == seen else result.reshape(seen)


def _by_processor(kernel: KernelRun, args: list[Tensor], item: Instruction) -> list[Tensor]:
    """Run a kernel on copies of its operands in the memory of the host."""
    made = kernel([tensor.cpu() for tensor in args], item)
    return [result.to(args[0].device) for result in made]


def _operands_channels_last(instruction: Instruction, channels_last_slots: Collection[int]) -> list[bool]:
    """Return which operands the kernel is given with their channels last."""
    found = [o.slot in channels_last_slots and len(o.shape) in SPATIAL_RANKS for o in instruction.operands]
    convolution = KERNELS[instruction.op].convolution
    if convolution is None or len(instruction.operands[0].shape) not in SPATIAL_RANKS:
        return found  # a line is no image, also where its slot has an axis more, of groups
    if any(found) or any(slot in channels_last_slots for slot in instruction.outputs):
        for index in convolution.data:  # a kernel that gets data of both orders would sort the other
            found[index] = True
    return found


def _arrangement(
    instruction: Instruction, index: int, channels_last_slots: Collection[int]
) -> Prepare | None:
    """The function that orders a kernel's result in memory as its slot wants it; None if it lies so."""
    has_space = len(instruction.kernel_shapes[index]) in SPATIAL_RANKS
    if has_space and instruction.outputs[index] in channels_last_slots:
        return channels_last
    return Tensor.contiguous if KERNELS[instruction.op].planes else None


@dataclass(frozen=True, eq=False)
class _Stage:
    """A group of instructions, and which results can be copied out and freed after it."""

    part: ChainStep | Instruction
    done: tuple[int, ...]
    """Outputs of the program (by number) whose slots nothing reads after it."""
    dying: tuple[int, ...]
    """Slots that nothing reads after it."""


def _overwritable(program: Program, groups: Sequence[Group]) -> frozenset[int]:
    """Slots that lie in memory of their own, and that no other slot is a view of."""
    own: set[int] = set(program.inputs)
    seen: set[int] = {item.slot for item in program.outputs}
    for group in groups:
        fresh = isinstance(group, Chain) or KERNELS[group.op].result is Result.OWN
        (own if fresh else seen).update(makes_of(group))
        if not fresh:
            seen.update(reads_of(group))
    return frozenset(own - seen)


def _stages(program: Program, small: int) -> list[_Stage]:
    """The program in the order it runs."""
    groups, dtype_of = recomputed(arrange(program, small), program)
    last_use = {slot: index for index, group in enumerate(groups) for slot in makes_of(group)}
    for index, group in enumerate(groups):
        last_use |= dict.fromkeys(reads_of(group), index)
    final: defaultdict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(program.outputs):
        final[item.slot].append(number)
    own = _overwritable(program, groups)
    ends: list[set[int]] = [set() for _ in groups]
    for slot, at in last_use.items():
        ends[at].add(slot)
    team, stages = team_of(program.threads), []
    for group, ending in zip(groups, map(frozenset, ends), strict=True):
        if isinstance(group, Chain):
            needed = frozenset(slot for slot in makes_of(group) if slot not in ending or slot in final)
            spare = _spare(program, ending & own, group.channels_last)
            part: Instruction | ChainStep = ChainStep(group, needed, spare, dtype_of, team)
        else:
            part = group
        done = tuple(sorted(number for slot in ending for number in final.get(slot, ())))
        stages.append(_Stage(part, done, tuple(sorted(ending))))
    return stages


def _spare(program: Program, slots: frozenset[int], is_channels_last: bool) -> Spare:
    """``ChainStep``'s ``spare_of``, from ``slots`` that nothing reads after the chain.

    Inputs come first: what the program has made is freed then. But a result that is made in the memory of
    an output wants no input, only that the value it is written over lies there, too.
    """
    whole = {item.slot for item in program.outputs if item.crop is None}
    channels_last_slots = {slot for slot, _ in program.orders}
    alike = {slot for slot in program.inputs if (slot in channels_last_slots) == is_channels_last}
    inputs, made = sorted(slots & alike), sorted(slots - set(program.inputs))
    return lambda slot: made if slot in whole else [*inputs, *made]


class TorchEngine(Engine):
    """Runs programs with PyTorch on the CPU; instructions on up to ``small_elements`` are in no loop."""

    name = "torch"
    operators = frozenset(KERNELS)
    thin_slab_elements = THIN_SLAB_ELEMENTS

    def __init__(self, small_elements: int = SMALL_ELEMENTS) -> None:
        super().__init__()
        self.small_elements = small_elements
        self.runs_together = team_of(2).library is not None
        self.has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def scratch_of(self, program: Program, rules: Rules) -> ProgramScratch:
        known, key = self._scratch, program.key
        if key not in known:
            program = in_parts(without_group_axes(program))
            stages = _stages(program, self.small_elements)
            parts = [stage.part for stage in stages]
            ends = ((stage.part, stage.dying) for stage in stages)
            nbytes = scratch_bytes(program, ends, placed(program, parts), rules)
            known[key] = ProgramScratch(nbytes, overwritten(program, parts))
        return known[key]

    def _make(self, program: Program) -> Run:
        program = in_parts(program)
        stages = _stages(program, self.small_elements)
        parts = [stage.part for stage in stages]
        direct, own = placed(program, parts), overwritten(program, parts)
        orders = dict(program.orders)
        steps = [part if isinstance(part, ChainStep) else Step(part, orders) for part in parts]
        made = {slot for stage in stages for slot in stage.dying}
        rest = [number for number, item in enumerate(program.outputs) if item.slot not in made]

        def run(arrays: Sequence[Array], outs: Sequence[Array], rooms: Mapping[int, Array]) -> None:
            for number in own - rooms.keys():
                if not arrays[number].flags.writeable:
                    raise ValueError(f"input {number} is written over, but may only be read")
            torch.set_num_threads(program.threads)  # of kernels that this thread calls
            with torch.inference_mode():
                slots = dict(zip(program.inputs, map(to_torch, arrays), strict=True))
                places = {slot: shared(outs[number]) for slot, number in direct.items()}
                places |= {program.inputs[number]: shared(room) for number, room in rooms.items()}

                def put(numbers: Iterable[int]) -> None:
                    for number in numbers:
                        item = program.outputs[number]
                        if direct.get(item.slot) != number:
                            found = crop(slots[item.slot], item.crop).reshape(item.shape)
                            shared(outs[number]).copy_(found)

                for step, stage in zip(steps, stages, strict=True):
                    step.run(slots, places)
                    put(stage.done)
                    for slot in stage.dying:
                        slots.pop(slot, None)
                put(rest)

        return run


def make_engine() -> TorchEngine:
    """Make the engine for ``get_engine``."""
    return TorchEngine()
