"""A program as an ONNX model: operands cropped, reshaped and padded, lowered one after the other."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from oocdl.engines.ort.emit import Emitter, Val, tensor_type
from oocdl.engines.ort.lowerings import KERNELS
from oocdl.graph.ir.array_layout import Order
from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.operands import is_empty, pads_of
from oocdl.graph.ir.program import Instruction, Operand, Program, padded_shape

OPSET = 18
IR_VERSION = 8


def _operand(emit: Emitter, value: Val, instruction: Instruction, index: int) -> Val:
    """The slot as the kernel sees it."""
    operand = instruction.operands[index]
    fill = instruction.fill
    pads = None if KERNELS[instruction.op].takes_unpadded else pads_of(operand)
    if pads is not None and is_empty(operand):
        return emit.full(padded_shape(operand), fill, value.dtype)
    if operand.crop is not None:
        value = emit.slice(value, operand.crop)
    value = emit.reshape(value, operand.shape)
    return value if pads is None else emit.pad(value, pads, fill)


def _input(index: int, shape: Shape, dtype: str, order: Order) -> Val:
    """An input as it lies in memory."""
    return Val(f"x{index}", tuple(shape[axis] for axis in order) or shape, dtype)


def _output(emit: Emitter, value: Val, operand: Operand, order: Order, taken: set[str]) -> Val:
    """An output under a name of its own: of neither an input nor another output."""
    if operand.crop is not None:
        value = emit.slice(value, operand.crop)
    value = emit.reshape(value, operand.shape)
    if order:
        value = emit.transpose(value, order)
    if value.name in taken:
        value = emit.node("Identity", [value], value.shape)
    taken.add(value.name)
    return value


def model_of(program: Program) -> tuple[onnx.ModelProto, list[Val]]:
    """The program as a model, and the model's outputs; inputs and outputs lie as their orders say."""
    emit = Emitter()
    orders = dict(program.orders)
    kinds = zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True)
    inputs = [_input(i, shape, dtype, orders.get(slot, ())) for i, (slot, shape, dtype) in enumerate(kinds)]
    slots = dict(zip(program.inputs, inputs, strict=True))
    for slot, value in slots.items():
        if slot in orders:
            slots[slot] = emit.transpose(value, [int(axis) for axis in np.argsort(orders[slot])])
    for item in program.instructions:
        args = [
            _operand(emit, slots[operand.slot], item, index) for index, operand in enumerate(item.operands)
        ]
        lowering = KERNELS[item.op].lowering
        assert lowering is not None, f"{item.op} is left to NumPy"
        results = lowering(emit, args, item)
        for index, result in enumerate(results):
            if result.shape != item.kernel_shapes[index] or result.dtype != item.dtypes[index]:
                raise ValueError(
                    f"{item.op} gave {result.dtype} {result.shape}, "
                    f"wanted {item.dtypes[index]} {item.kernel_shapes[index]}"
                )
            slots[item.outputs[index]] = emit.reshape(result, item.shapes[index])
    taken = {value.name for value in inputs}
    outputs = [
        _output(emit, slots[operand.slot], operand, order, taken)
        for operand, order in zip(program.outputs, program.output_orders, strict=True)
    ]
    given, made = (
        [helper.make_tensor_value_info(v.name, tensor_type(v.dtype), list(v.shape)) for v in values]
        for values in (inputs, outputs)
    )
    graph = helper.make_graph(emit.nodes, "program", given, made, emit.initializers)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION), outputs
