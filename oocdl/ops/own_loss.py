"""Parts of losses, and losses and metrics of a user's own: nodes, known by name and text, or an ONNX file.

A file is of (prediction, target); its nodes are put into the graph of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from oocdl.errors import InputError, ModelError
from oocdl.graph.ir.formula import digest_of
from oocdl.graph.ir.graph import Role, is_float
from oocdl.graph.ir.op_rule import Builder
from oocdl.graph.onnx.own_operators import digests
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops._broadcast import cure
from oocdl.ops.expression import Lifted, apply, lift
from oocdl.ops.metric_functions import METRICS, Metric, Sums, ratio


@dataclass(frozen=True)
class OwnLoss:
    """A loss that ``register`` has been given. A run that was begun with it needs it again, and the same."""

    name: str
    digest: str


Formula = Callable[[Builder, str, str], str]
"""(builder, prediction, target) -> the loss, all but the builder names of values; the loss has shape ()."""
FORMULAS: dict[str, tuple[OwnLoss, Formula]] = {}


def sum_of(values: Iterable[Lifted]) -> Lifted:
    """Add the sum of values of one shape, in the dtype of the first."""
    return reduce(lambda total, value: total + value.cast(total.dtype), values)


def mean(build: Builder, value: str) -> str:
    """Add the mean of all elements, of shape ()."""
    return lift(build, value).mean().name


def aligned(build: Builder, logits: str, target: str) -> str:
    """Return the target in the dtype and shape of the logits; it may lack a channel axis of extent one."""
    return truth_of(lift(build, logits), target).name


def truth_of(x: Lifted, target: str) -> Lifted:
    """Return the target in the dtype and shape of the logits; it may lack a channel axis of extent one."""
    truth = x.to(target)
    shape, wanted = truth.shape, x.shape
    if [n for n in shape if n != 1] != [n for n in wanted if n != 1]:
        why = f"target '{target}' has shape {list(shape)}, but output '{x.name}' has {list(wanted)}"
        is_labels = len(wanted) > 1 and shape == (wanted[0], *wanted[2:])
        classes = "; of classes, use a loss such as 'cross_entropy' or 'dice_ce'"
        raise InputError(why + (classes if is_labels else cure(shape, wanted)))
    return (truth if shape == wanted else apply("Reshape", truth, shape=wanted)).cast(x.dtype)


def add_own(x: Lifted, spec: OwnLoss, target: str, further: Mapping[str, str]) -> Lifted:
    """Append a loss of the user's; InputError if it is not registered, is another, or gives no number."""
    known, formula = FORMULAS.get(spec.name, (None, None))
    if known != spec or formula is None:
        how = "is not known here" if known is None else "is another than the run's"
        way_out = "import what registers it with oocdl.losses.register first"
        raise InputError(f"the loss '{spec.name}' {how}: {way_out}")
    build = x.build
    loss = formula(build, x.name, target)
    if loss not in build.values or build.shape(loss) or not is_float(build.dtype(loss)):
        made = f"a value of shape {list(build.shape(loss))}" if loss in build.values else "no value"
        raise InputError(f"the loss '{spec.name}' gave {made}; it has to be a floating-point number")
    return x.to(loss)


@dataclass(frozen=True)
class FileLoss:
    """A loss in a file, made by ``file_loss``. A run that was begun with it needs it again, and the same."""

    path: str
    digest: str
    """Digest of the file and of the user's own operators in it."""
    labels: bool
    """Whether the target is whole numbers."""


def file_loss(path: str | Path) -> FileLoss:
    """Read what a file says of itself; InputError if it has not two inputs and one output."""
    place = Path(path).absolute()
    if not place.is_file():
        raise InputError(f"there is no file '{path}' with a loss")
    model = inspect_onnx(place)
    if len(model.inputs) != 2 or len(model.outputs) != 1:
        has = f"the loss '{path}' has {len(model.inputs)} inputs and {len(model.outputs)} outputs"
        raise InputError(f"{has}; it has to have two, prediction and target, and one")
    digest = "+".join((model.fingerprint(), *digests(model.nodes).values()))
    return FileLoss(str(place), digest, np.dtype(model.inputs[1].dtype).kind in "iu")


def add_file(x: Lifted, spec: FileLoss, target: str, further: Mapping[str, str]) -> Lifted:
    """Append the nodes of the file.

    InputError if the file is another than the run's, has weights, or gives no number of shape ().
    """
    if not Path(spec.path).is_file() or file_loss(spec.path) != spec:
        raise InputError(f"the loss '{spec.path}' is gone, or another than the run's; bring that file back")
    build, prediction, model = x.build, x.name, inspect_onnx(spec.path)
    given = dict(zip((port.name for port in model.inputs), (prediction, target), strict=True))
    shapes = {name: build.shape(value) for name, value in given.items()}
    try:
        imported = model.bind(build.rules, shapes, precision=x.dtype)
        for name, value in given.items():
            wanted = imported.graph.values[name].dtype
            if wanted != build.dtype(value):
                raise InputError(f"the loss takes {wanted} as '{name}', which is {build.dtype(value)}")
    except ModelError as error:
        raise type(error)(f"in the loss '{spec.path}': {error}") from error
    graph, ((_, loss),) = imported.graph, imported.outputs
    if imported.weights:
        held = ", ".join(f"'{name}'" for name in imported.weights)
        raise InputError(
            f"the loss '{spec.path}' has weights ({held}), which are not trained; make them Constant nodes"
        )
    made = graph.values[loss]
    if made.shape or np.dtype(made.dtype).kind != "f" or made.role is not Role.ACTIVATION:
        gives = f"{made.dtype} {list(made.shape)}"
        raise InputError(f"the loss '{spec.path}' gives {gives}; it has to be one number")
    names = dict(zip(imported.inputs, (prediction, target), strict=True))
    for name in graph.values:
        if name not in names:
            names[name] = build.unique(f"loss/{name}")
            build.values[names[name]] = replace(graph.values[name], name=names[name])
    build.constants |= {names[name]: array for name, array in graph.constants.items()}
    for node in graph.nodes:
        inputs = [names[name] for name in node.inputs]
        build.node(node.op, inputs, node.attrs, [names[name] for name in node.outputs], f"loss/{node.name}")
    return x.to(names[loss])


MetricFormula = Callable[[Builder, str, str], str | tuple[str, str]]
"""(builder, prediction, target) -> a value, or values and weights; all but the builder names of values."""
METRIC_FORMULAS: dict[str, MetricFormula] = {}
"""Name -> function of the registered metric that ``METRICS`` has."""


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A metric that ``register_metric`` has been given. A run that has it needs it again, and the same."""

    title: str
    digest: str
    """Digest of the formula's text (``digest_of``)."""
    output: str | None = None
    """The output that has it; None: each."""

    @property
    def name(self) -> str:
        return self.title

    @property
    def needs(self) -> tuple[str, ...]:
        return f"{self.title}/values", f"{self.title}/weights"

    def numbers(self, sums: Sums) -> dict[str, float]:
        values, weights = (sums[name].sum() for name in self.needs)
        return {self.name: float(ratio(values, weights, np.nan))}

    def formula(self) -> MetricFormula:
        """Return the function. Raises InputError if it is not registered, or another is."""
        if METRICS.get(self.title) != self:
            how = "is another than the run's" if self.title in METRICS else "is not known here"
            way_out = "import what registers it with oocdl.metrics.register first"
            raise InputError(f"the metric '{self.title}' {how}: {way_out}")
        return METRIC_FORMULAS[self.title]


def register_metric(name: str, output: str | None = None) -> Callable[[MetricFormula], MetricFormula]:
    """Return a decorator that makes a function a metric of this name, for ``metrics=name``.

    The function gets what ``oocdl.losses.register`` gives a loss: a builder and the names of a prediction and
    of its target. It adds nodes, and returns the name of a value whose first axis is that of samples: the
    metric is the mean of all its elements over all samples. Where it has the places of the labels, with
    classes or without, those whose label the loss ignores do not count, around padded samples too; reduce
    over places only where none is ignored. Or it returns two names, and the metric is the sum of all elements
    of the first over that of the second, which is zero for places that do not count. ``output`` names the
    output that has the metric; by default each has it. A run notes the text of the function: a resume without
    it, or with another, is refused. Raises InputError for a name that is taken. For example::

        @oocdl.metrics.register("bias")
        def bias(build, prediction, target):
            return build("Sub", prediction, oocdl.losses.aligned(build, prediction, target))
    """

    def keep(formula: MetricFormula) -> MetricFormula:
        if not name.isidentifier() or name in ("loss", "seconds"):
            raise InputError(f"a metric is named as a variable of Python, not loss or seconds; got '{name}'")
        if not isinstance(METRICS.get(name, OwnMetric(name, "")), OwnMetric):
            raise InputError(f"there is a metric '{name}' already; give yours another name")
        METRICS[name], METRIC_FORMULAS[name] = OwnMetric(name, digest_of(formula), output), formula
        return formula

    return keep
