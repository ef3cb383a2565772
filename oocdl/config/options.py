"""The record of options: the name, type, default, check and description of each, once.

Keys of a ``TypedDict`` are names; what else is known is in its annotation, and in the text below. Docstrings,
settings, the command line and `docs/reference/options.md` come of them.
"""
# Annotations are evaluated where they stand, as they hold the records: no "from __future__" here.

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from oocdl.augmentation.nnunet import Augment
from oocdl.config import option_checks as checks
from oocdl.config.option_checks import Check
from oocdl.host.paths import path_of
from oocdl.ops.loss_functions import Loss
from oocdl.ops.metric_functions import Metric
from oocdl.ops.optimizers import Optimizer
from oocdl.ops.schedules import Rate

LossLike = str | Path | Loss | Mapping[str, str | Loss | tuple[str | Loss, float]]
Size = int | float | str
"""Bytes, as a number or as a text with a unit."""
Names = str | Sequence[str]
Pieces = Literal["auto"] | Mapping[str, int | Sequence[int]]
Validation = str | Path | float | Sequence[int] | Any
ParamGroup = str | Mapping[str, Any]
"""Weights that are updated alike: a pattern "params" and fields of the optimizer; or "no_decay_1d"."""
ParamGroups = ParamGroup | Sequence[ParamGroup] | None
Precision = Literal["float32", "bfloat16", "float64"]
SpillDtype = Literal["bfloat16"] | None
Metrics = str | Metric | Sequence[str | Metric]
Normalize = str | Mapping[str, str] | None

CHECKS: Mapping[Any, Check] = {
    bool: checks.flag,
    int: checks.whole,
    float: checks.seconds,
    str: checks.text,
    int | None: checks.whole,
    Size | None: lambda name, value: checks.parse_bytes(value),
    Names: checks.names,
    Mapping[str, str] | None: checks.mapping_of(checks.text),
    Mapping[str, int] | None: checks.mapping_of(checks.whole),
    Mapping[str, float] | None: checks.mapping_of(checks.finite),
}
ANY_WHOLE = partial(checks.whole, least=None)
PATH: Check = lambda name, value: str(path_of(name, value))  # noqa: E731
THREADS = partial(checks.whole, most=checks.MOST_THREADS)


@dataclass(frozen=True)
class Option:
    """Everything that is known of an option."""

    default: Any
    changes: Literal["plan", "bits", "neither"]
    """Effect of a change: on the plan, and so on rounding; on other bits of the results; on neither."""
    check: Check | None = None
    """None: the check that goes with the type. It is not asked of None where that is the default."""
    fixed: Literal["run", "plan"] | None = None
    """The run, or its plan (``replan`` makes it anew), if it cannot go on with another value; else None."""
    predicts: bool = False
    """Whether a run predicts and evaluates with it."""
    type: Any = None
    """Filled in from the annotation."""
    kind: str = ""
    """Filled in from the annotation: the type as it is written."""
    doc: str = ""
    """Filled in from the text below the key: sentences, of which the first is the command line's help."""

    @property
    def first_sentence(self) -> str:
        return self.doc.partition(". ")[0].rstrip(".").replace("`", "") + "."

    def checked(self, name: str, value: Any) -> Any:
        if value is None and self.default is None:
            return None
        literal = checks.one_of(*get_args(self.type)) if get_origin(self.type) is Literal else None
        return (self.check or literal or CHECKS[self.type])(name, value)

    def __repr__(self) -> str:
        return f"Option({self.default!r})"


@cache
def options_of(kind: type) -> Mapping[str, Option]:
    """Return the records of a ``TypedDict``, by name."""
    texts, found = {**_texts(__name__), **_texts(kind.__module__)}, dict[str, Option]()
    for name, hint in get_type_hints(kind, include_extras=True).items():
        written, doc = texts[name]
        found[name] = replace(hint.__metadata__[0], type=hint.__origin__, kind=written, doc=doc)
    return found


@cache
def _texts(module: str) -> Mapping[str, tuple[str, str]]:
    """Return the type of each key of a module's classes, and the text below it on one line, as written."""
    tree, found = ast.parse(inspect.getsource(sys.modules[module])), {}
    for one in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for key, below in itertools.pairwise(one.body):
            match key, below:
                case ast.AnnAssign(ast.Name(name), ast.Subscript(slice=ast.Tuple([kind, _]))), ast.Expr(
                    ast.Constant(str(text))
                ):
                    found[name] = ast.unparse(kind), " ".join(text.split())
    return found


def entry(name: str, text: str) -> str:
    """Return the entry of a parameter as a docstring has it, in numpydoc's form."""
    lines = textwrap.fill(text, 96, break_long_words=False, break_on_hyphens=False)
    return f"{name}\n{textwrap.indent(lines, '    ')}"


class CommonOptions(TypedDict, total=False):
    """Options that all verbs take, and that a newcomer meets."""

    loss: Annotated[LossLike, Option("cross_entropy", "plan", check=checks.losses, predicts=True)]
    """Loss to minimize: "cross_entropy", "dice", "dice_ce", "focal", "tversky", "bce", "mse", "l1", "huber",
    "ctc" or "deep_supervision". Or the name of a loss of your own (``oocdl.losses.register``); an object of
    ``oocdl.losses``, which has class weights and other fields; an ONNX file that computes one number from
    (prediction, target); or a mapping from output to loss or (loss, weight)."""
    optimizer: Annotated[str | Optimizer, Option("adam", "plan", check=checks.anything, fixed="run")]
    """Optimizer: "sgd", "adam", "adamw", "rmsprop", "lion" or "lamb". Or the name of one of your own
    (``oocdl.optim.register``), or an object of ``oocdl.optim``, which has momentum, weight decay, clipping
    and other fields."""
    lr: Annotated[Rate | None, Option(None, "bits", check=checks.anything)]
    """Learning rate of an optimizer given by name; default: 0.01 for "sgd" and "rmsprop", 0.0001 for "lion",
    0.001 for others. A number, a schedule of ``oocdl.optim``, or any function of the step, which counts from
    0."""
    batch_size: Annotated[int, Option(1, "plan", fixed="run")]
    """Number of samples that go through the network at once."""
    memory: Annotated[Size | None, Option(None, "plan", predicts=True)]
    """Memory budget of the process, such as "2GiB"; default: a safe share of what it may use. With a client,
    the budget of each worker process, by default what the workers may use; this process is not counted."""
    inputs: Annotated[Mapping[str, str] | None, Option(None, "plan", predicts=True)]
    """Mapping from model input to dataset array, where their names differ. A single input takes "image" by
    default, else the only array, else the only array of floats beside one of class labels."""
    targets: Annotated[Mapping[str, str] | None, Option(None, "plan", predicts=True)]
    """Mapping from model output to the dataset array that holds its target; default: the remaining array."""


class LengthOptions(TypedDict, total=False):
    """Options for the length of a run; ``search`` has its own."""

    epochs: Annotated[int, Option(1, "bits")]
    """Total number of epochs of the run."""
    steps: Annotated[int | None, Option(None, "bits")]
    """Total number of steps of the run, instead of epochs. A step is one update."""
    seed: Annotated[int, Option(0, "bits", check=ANY_WHOLE, fixed="run", predicts=True)]
    """Seed for shuffling and dropout."""


class PassOptions(TypedDict, total=False):
    """Options of an update and its passes; ``simulate``, which simulates one pass, has its own."""

    accumulate: Annotated[int, Option(1, "plan", fixed="run")]
    """Number of batches per update, which uses the mean of their gradients."""
    threads: Annotated[int | None, Option(None, "plan", check=THREADS)]
    """Compute threads; default: all cores, and one where a GPU computes.

    Where units are long, each thread runs units of its own; where they are short, all threads run each unit
    together."""


class SettingOptions(TypedDict, total=False):
    """Further options that all verbs take."""

    shuffle: Annotated[bool, Option(True, "bits", fixed="run")]
    """Shuffle the samples in each epoch."""
    dims: Annotated[Mapping[str, int] | None, Option(None, "plan", predicts=True)]
    """Mapping from open dimension of the model to its size, where the dataset does not determine it."""
    pad_to_multiple_of: Annotated[int | None, Option(None, "plan", predicts=True)]
    """Number to whose multiples sizes are padded where samples differ in size; default: the smallest that the
    network takes. A larger one makes fewer different sizes, each of which is planned."""
    scale: Annotated[Mapping[str, float] | None, Option(None, "plan", fixed="run", predicts=True)]
    """Mapping from dataset array to the factor that multiplies its values."""
    normalize: Annotated[Normalize, Option(None, "plan", check=checks.normalize, fixed="run", predicts=True)]
    """Normalise each channel of each image that is an input: "zscore" by mean and deviation of the sample,
    "zscore_nonzero" by those of its voxels that are not zero, "percentiles" from its 0.5th and 99.5th to 0
    and 1, "ct" as nnU-Net does CT, by the labelled voxels of all samples trained on; or a mapping from array
    to method. Statistics are taken once, before the first step; predictions use the same method."""
    augment: Annotated[Augment, Option(None, "plan", check=checks.augment, fixed="run")]
    """Transforms of ``oocdl.transforms`` for samples that are trained on, or "nnunet" for nnU-Net's, which
    may stand among others. ``RandSpatialCrop`` in front of all others cuts a part out of each sample. They
    are functions of seed, pass, sample and voxel: a sample is never whole in memory, and the bits are the
    same however the work is cut."""
    logits: Annotated[Literal["strict", "auto"], Option("strict", "plan", fixed="run", predicts=True)]
    """"auto" drops a final Softmax or Sigmoid, which the losses contain."""
    allow_missing_chunks: Annotated[bool, Option(True, "neither", predicts=True)]
    """Read chunks that are not stored as their fill value, as Zarr defines; False refuses them."""
    strict: Annotated[bool, Option(False, "neither")]
    """Refuse a model that looks wrong instead of warning."""
    disk: Annotated[Size | None, Option(None, "neither")]
    """Limit for spill and run directory together, such as "50GiB"; default: the free space."""
    spill: Annotated[
        str | Path | None,
        Option(None, "neither", check=PATH, predicts=True),
    ]
    """Folder for data that does not fit in memory; default: $OOCDL_SPILL, else inside the run."""
    spill_dtype: Annotated[SpillDtype, Option(None, "plan", check=checks.one_of("bfloat16"), fixed="plan")]
    """"bfloat16" allows rounding activations to 16 bits between layers where that is faster."""
    parallel: Annotated[Pieces, Option("auto", "plan", check=checks.pieces, fixed="plan")]
    """Minimum number of pieces per kind of axis. For example ``{"batch": 2, "space": (3, 2, 1), "channels":
    2}``; "auto" asks for none."""
    engine: Annotated[str, Option("auto", "plan", predicts=True)]
    """"torch", "onnxruntime", "auto" (torch if installed), or for a GPU "torch:cuda", "torch:cuda:1"."""
    precision: Annotated[Precision, Option("float32", "plan", fixed="run", predicts=True)]
    """"float32", "float64", or "bfloat16" (of convolutions and products)."""
    freeze: Annotated[Names, Option((), "plan", fixed="run", predicts=True)]
    """Weights to leave unchanged, by name or by pattern such as "encoder.*"."""
    param_groups: Annotated[ParamGroups, Option(None, "plan", check=checks.param_groups, fixed="run")]
    """Weights with settings of their own, as PyTorch's: ``[{"params": "encoder.*", "lr": 1e-4}]``. The first
    group whose pattern matches a name of a weight gives it fields of the optimizer; a number for ``lr`` is
    what the optimizer's schedule begins from there. "no_decay_1d", alone or in the list, takes weight decay
    off weights of at most one axis (biases, norms) in every group."""
    ema: Annotated[float | None, Option(None, "plan", check=checks.decay, fixed="run")]
    """Decay of a moving average of the weights, such as 0.999. The run then has the average of each weight
    beside it, as large as the weight, as ``torch.optim.swa_utils.AveragedModel`` makes it."""
    keep: Annotated[Names, Option((), "plan", fixed="plan")]
    """Activations, or gradients as "grad/<weight>", of the last step to keep in the run (``Run.kept``)."""
    commit_seconds: Annotated[float, Option(30.0, "neither")]
    """Maximum seconds between commits."""


class ValidationOptions(TypedDict, total=False):
    """Options of a validation within a run; ``search`` has its own."""

    validation: Annotated[Validation, Option(None, "plan", check=checks.validation)]
    """Samples to validate on: a dataset with arrays of the same names; or the share of the samples to hold
    out, such as 0.2, chosen by the seed; or the indices of those to hold out. The history has their mean loss
    as ``val_loss``. A run resumes only with the same samples."""
    validation_freq: Annotated[int | Sequence[int], Option(1, "neither", check=checks.whole_or_several)]
    """Number of epochs between validations, or the epochs, counted from 1, after which to validate. There is
    always one after the last step."""
    validation_steps: Annotated[int | None, Option(None, "neither")]
    """Number of steps between validations, instead of epochs."""
    metrics: Annotated[Metrics, Option((), "plan", check=checks.metrics)]
    """Metrics of each validation, by name: "dice", "iou", "accuracy", "topk", "sensitivity",
    "specificity", "precision", "f1", "mae", "rmse", "r2", "psnr"; names of your own
    (``oocdl.metrics.register``); or objects of ``oocdl.metrics``."""


class SimulateOptions(CommonOptions, LengthOptions, SettingOptions, total=False):
    """Options that ``simulate`` shares with ``fit``."""


class AllSettings(CommonOptions, LengthOptions, PassOptions, SettingOptions, ValidationOptions, total=False):
    """The options of ``fit`` that ``Settings`` are made of."""


OPTIONS: Mapping[str, Option] = options_of(AllSettings)
"""The options of ``fit`` that ``Settings`` are made of, by name."""
