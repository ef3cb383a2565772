"""CTC, the loss of sequences without alignment, over logits (Graves et al. 2006).

    Ctc(x, labels, label_lengths, frame_lengths){blank, zero_infinity} -> loss [N]
    CtcGrad(x, labels, label_lengths, frame_lengths, dloss){..}        -> dx

``x`` [N, T, C] are logits, whose softmax over C is taken inside; ``labels`` [N, S], ``label_lengths`` [N] and
``frame_lengths`` [N] are whole numbers. The loss of a sample is minus the logarithm of the probability that
its first frames emit its first labels, with blanks between them as one likes: infinite if the frames are too
few, or 0 then with ``zero_infinity``. With l the labels with a blank around each, and a_t(s), b_t(s) the
logarithms of the chances of all ways to place s of l up to frame t, and from there on to the end,

    a_t(s) = log p_t(l_s) + log(e^a_{t-1}(s) + e^a_{t-1}(s-1) + [l_s != blank, l_{s-2}] e^a_{t-1}(s-2))
    dx_t(c) = p_t(c) - sum over s with l_s = c of e^(a_t(s) + b_t(s) + loss)

all in log space. Where a label is the blank or no class, the loss is NaN. Only the batch is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oocdl.errors import InputError
from oocdl.graph.ir.graph import Node, Shape, Value, is_float
from oocdl.graph.ir.index import AxisRule, Whole
from oocdl.graph.ir.op_rule import Gradient, OpRule, Spec
from oocdl.graph.ir.speed import Probe
from oocdl.ops._broadcast import extents_by, fail, no_second_derivative, plain, plain_by, size
from oocdl.ops._speed import EXPONENTIAL, streaming
from oocdl.ops.expression import Lifted, apply

PLACE_FLOPS = 60
"""Operations for each frame and place of a label or blank: three exponentials and a logarithm."""


@dataclass(frozen=True)
class CTC:
    """Connectionist temporal classification with logits, as ``torch.nn.CTCLoss`` after ``log_softmax``.

    The output is [N, T, C], or [T, N, C] with ``batch_first=False``: a score of each of C classes, one of
    them the ``blank``, in each of T frames. Its target array [N, S] has the labels of each sample, none of
    them the blank, padded to S. Two further arrays [N] of the dataset, named here, have the lengths:

    ``target_lengths``: how many labels of each sample count. None: the array "target_lengths" if the dataset
    has it, else those before the first negative one, with which the labels are padded.
    ``input_lengths``: how many frames of the output count. None: the array "input_lengths" if the dataset has
    it, else all T.

    ``reduction``: "mean" divides the loss of each sample by its number of labels (at least 1) and takes the
    mean over samples, "sum" adds the losses up. ``zero_infinity`` leaves samples with too few frames out.

    >>> CTC(blank=28, zero_infinity=True).reduction
    'mean'
    """

    blank: int = 0
    reduction: str = "mean"
    zero_infinity: bool = False
    batch_first: bool = True
    target_lengths: str | None = None
    input_lengths: str | None = None

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise InputError(f"the reduction of ctc is 'mean' or 'sum', not '{self.reduction}'")
        if self.blank < 0:
            raise InputError(f"the blank of ctc must be a class, not {self.blank}")


LENGTHS = ("target_lengths", "input_lengths")
"""The further arrays of a CTC loss, by the names of its fields."""


def add_ctc(x: Lifted, spec: CTC, target: str, lengths: Mapping[str, str]) -> Lifted:
    """Append a CTC loss; returns its value, of shape (). ``lengths``: by the names in ``LENGTHS``.

    Raises InputError if shapes do not fit.
    """
    labels = x.to(target)
    if not spec.batch_first and len(x.shape) == 3:
        x = apply("Transpose", x, perm=(1, 0, 2))
    if len(x.shape) != 3 or len(labels.shape) != 2 or x.shape[0] != labels.shape[0]:
        wanted = "[N, T, C]" if spec.batch_first else "[T, N, C]"
        have = f"output and labels '{target}' have {list(x.shape)} and {list(labels.shape)}"
        raise InputError(f"ctc takes an output {wanted} and labels [N, S]; {have} (see CTC(batch_first=...))")
    samples, steps, classes = x.shape
    if spec.blank >= classes:
        raise InputError(f"the blank of ctc is class {spec.blank}, but the output has {classes} classes")
    for name, value in lengths.items():
        if x.to(value).shape != (samples,):
            raise InputError(f"{name} of ctc must be [N], not {list(x.to(value).shape)}")
    if "target_lengths" in lengths:
        counts = x.to(lengths["target_lengths"])
    else:
        counts = apply("ReduceSum", apply("Not", labels < 0).cast("int64"), axes=(1,))
        counts = apply("Reshape", counts, shape=(samples,))
    if "input_lengths" in lengths:
        frames = x.to(lengths["input_lengths"])
    else:
        frames = apply("Expand", counts.number(steps), shape=(samples,))
    losses = apply("Ctc", x, labels, counts, frames, blank=spec.blank, zero_infinity=spec.zero_infinity)
    if spec.reduction == "mean":
        losses = losses / (apply("Max", counts.cast(losses.dtype), 1.0) * float(samples))
    return losses.total()


def _infer(node: Node, inputs: Sequence[Value]) -> Sequence[Spec]:
    x, *whole = inputs[:4]
    extents_by(node, ("ntc", "nl", "n", "n", "n")[: len(inputs)], [value.shape for value in inputs])
    if len(whole) != 3 or not is_float(x.dtype) or {value.dtype for value in whole} != {"int64"}:
        fail(node, f"its operands must be x, floating point, labels and lengths, int64, not {x.dtype}, ..")
    return [(x.shape if node.op == "CtcGrad" else x.shape[:1], x.dtype)]


def _axes(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> AxisRule:
    """Only ``n`` is cut."""
    extents = dict(zip("ntc", outputs[0], strict=False))
    read = tuple((plain("n", extents["n"]), *map(Whole, shape[1:])) for shape in inputs)
    return AxisRule(read, plain_by(["ntc"], outputs), extents, uncut=frozenset(extents) - {"n"})


def _flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    (samples, steps, classes), (_, labels) = inputs[:2]
    return samples * steps * (13 * classes + PLACE_FLOPS * (2 * labels + 1))


def _scratch(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Count logarithms of probabilities twice, a and b and their sum, and what a frame takes."""
    (samples, steps, _), (_, labels) = inputs[:2]
    places = 2 * labels + 1
    return 3 * size(inputs[0]) + 4 * samples * steps * places + 12 * samples * places


def _rule(op: str, gigabytes: float, gradient: Gradient) -> OpRule:

    def probes(shape: Shape) -> Sequence[Probe]:
        samples, classes, whole = 4, 32, ((4,), "int64")
        x = ((samples, 8 * shape[2], classes), "float32")
        loss = (((samples,), "float32"),) * (op == "CtcGrad")
        operands = (x, ((samples, 8), "int64"), whole, whole, *loss)
        return [Probe(op, operands, {"blank": classes - 1, "zero_infinity": True})]

    return OpRule(
        op=op, infer=_infer, gradient=gradient, axes=_axes, flops=_flops, scratch_elements=_scratch,
        speed=streaming(EXPONENTIAL, gigabytes, probes), keeps_axes=False,
    )  # fmt: skip


RULES: tuple[OpRule, ...] = (
    _rule("Ctc", 0.15, lambda b, n, g: [b("CtcGrad", *n.inputs, g, **n.attrs), None, None, None]),
    _rule("CtcGrad", 0.17, no_second_derivative),
)
