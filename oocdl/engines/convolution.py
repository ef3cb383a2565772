"""The parts that operands and results play in convolutions and their gradients, for the engines' records.

Engines see instructions and no rules. A test holds ``data`` to the rules' ``Product.data``.
"""

from __future__ import annotations

from dataclasses import dataclass

from oocdl.graph.ir.graph import Shape
from oocdl.graph.ir.program import Instruction, padded_shape


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution, a transposed one, or the gradient of its weights."""

    data: tuple[int, ...]
    """The operands that are data ``[batch, channels, *space]``: kernels want all of them with their channels
    last if one of them has them so. Of one, the result is data, too; of two, it is weights."""
    transposed: bool

    @property
    def makes_weights(self) -> bool:
        """Whether the result is the gradient of weights."""
        return len(self.data) == 2

    def weights(self, item: Instruction) -> Shape:
        """The shape of the weights, or of their gradient."""
        return item.kernel_shapes[0] if self.makes_weights else padded_shape(item.operands[1])

    def other_data(self, item: Instruction) -> Shape:
        """The shape of the data that is not operand 0: of the result, or of its gradient without padding."""
        return item.operands[1].shape if self.makes_weights else item.kernel_shapes[0]


CONV = Convolution(data=(0,), transposed=False)
CONV_TRANSPOSE = Convolution(data=(0,), transposed=True)
CONV_WEIGHT_GRAD = Convolution(data=(0, 1), transposed=False)
