"""Signs that a plain file trains another network than the module it was made of, and the cure of each.

Exporters write files for inference: they fold norms into convolutions, merge tensors that are equal at the
start, drop biases of zeros, and do not tell buffers from parameters. tf2onnx, which Keras exports by,
multiplies norms into weights; only names still tell of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.onnx_file import LAYERS, TracedFile
from oocdl.graph.onnx.roles import TENSORFLOW, batch_norm_modes

EXPORT = "export with oocdl.from_torch(module, example, path), which keeps the network as it is"
NAMED = 3
"""Number of names in a remark; the others are counted."""
PATTERNS = 8
"""Number of patterns in a cure; ``oocdl info MODEL --weights`` lists all tensors."""

_BUFFER = re.compile(r"(pe|pos(_.*|ition.*)?|running_.*|num_batches_tracked|.*mask|inv_freq|anchors?)")
_PARAMETER = re.compile(
    r".*(weight|bias|gamma|beta|alpha|token|scale|query|prompt|latent|temperature)s?"
    r"|.*(weight|bias)_.*|original\d*|(?!pos).*embed.*|[wbgv]",
    re.IGNORECASE,
)
"""Last parts of names: of what is a buffer more often than not, and of what always is a parameter."""
_FUSED = re.compile(r"_v_\d+$|\w+Fusion_.*")
"""Names that onnxsim and ONNX Runtime's optimizer give to what they compute of weights."""
_GENERATED = re.compile(rf"(onnx::|/).*|\d+$|val_\d+$|{_FUSED.pattern}")
_FOLDED = re.compile(r".*(/batchnorm/(mul|sub)|merged_input)(:0|__\d+)?$|.*_(weights|bias)_fused_bn.*")
_OF_NORM = re.compile(r".*/(moments|batchnorm)/.*")
"""Names of tf2onnx: of weights with a norm in them, and within a norm."""
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class Remark:
    """Something that looks wrong."""

    text: str
    cure: str
    """The remedy; one line of code."""


def _freeze(file: TracedFile, names: Sequence[str]) -> str:
    """Write the option that freezes these names only: by whole modules, equal last parts, or one by one."""
    left, patterns = dict.fromkeys(names), []
    modules = (f"{_literal(name.rpartition('.')[0])}.*" for name in names if "." in name)
    parts = (f"*{_literal(name.rpartition('.')[2])}" for name in names)
    for pattern in dict.fromkeys((*modules, *parts)):
        meant = [name for name in file.model.initializers if fnmatchcase(name, pattern)]
        if len(meant) > 1 and left.keys() >= set(meant):
            patterns.append(pattern)
            left = {name: None for name in left if name not in meant}
    patterns += map(_literal, left)
    more = ", ..." if len(patterns) > PATTERNS else ""
    return f"freeze=[{', '.join(map(shown, patterns[:PATTERNS]))}{more}]"


def _literal(name: str) -> str:
    """Return the pattern that matches one name only."""
    return re.sub(r"[\[*?]", lambda special: f"[{special[0]}]", name)


Find = Callable[[TracedFile], list[str]]


def _tensors(shows: Callable[[TracedFile, str], bool]) -> Find:
    """Return the trained tensors that show a sign."""
    return lambda file: [name for name in file.trained if shows(file, name)]


def _nodes(shows: Callable[[TracedFile, OnnxNode], bool]) -> Find:
    """Return the nodes that show a sign."""
    return lambda file: [node.name for node in file.model.nodes if shows(file, node)]


def _is_merged(file: TracedFile, name: str) -> bool:
    """Whether a tensor feeds several modules, and was equal to others at the start."""
    readers, feeds = file.model.readers.get(name, ()), file.modules(name)
    if file.is_torchscript:  # it leaves the names that merged tensors had
        feeds = tuple(dict.fromkeys(reader.name for reader in readers))
    if len(feeds) < 2:  # two parameters of one module, where a node is no module of its own
        plain = [reader for reader in readers if reader.node.op in ("Add", "Sub", "Mul", "Div", "PRelu")]
        return file.is_dynamo and len(plain) > 1 and file.is_uniform(name)
    if not file.is_dynamo and not file.is_torchscript:
        return all(reader.node.op.endswith("Normalization") for reader in readers)
    twins = len({re.sub(r"\d+", "#", feed) for feed in feeds}) < len(feeds)
    return twins or file.is_uniform(name)


def _has_folded(file: TracedFile, node: OnnxNode) -> bool:
    """Whether a BatchNormalization was folded into a layer."""
    if node.op not in LAYERS:
        return False
    weight, biases = node.inputs[1], node.inputs[2:]
    named = file.is_torchscript and node.op.startswith("Conv") and weight.startswith("onnx::Conv")
    by_onnxscript = weight.endswith("weight") and f"{weight}_bias" in biases
    return "FuseBatchNorm" in node.rule or "BnFusion_" in weight or named or by_onnxscript


def _folded(file: TracedFile) -> list[str]:
    folded = [node.name for node in file.model.nodes if _has_folded(file, node)]
    convolutions = [node for node in file.model.nodes if node.op in ("Conv", "ConvTranspose")]
    biased = [node.name for node in convolutions if len(node.inputs) > 2]
    # An older exporter does not say what it did, and onnxsim drops what others say, but for names of nodes.
    biased = [name for name in biased if file.is_dynamo or re.fullmatch(r"node_Conv\w*_\d+", name)]
    has_norm = any(node.op.endswith("Normalization") for node in file.model.nodes)
    silent = not file.model.kinds and not has_norm and len(biased) > 1
    return folded or (biased if silent else [])


def _is_copy(file: TracedFile, name: str) -> bool:
    """Whether what an initializer was computed from is in the file as well."""
    sources, others = file.model.folded.get(name, ()), {*file.trained} - {name}
    copied = any(other in sources or file.model.folded.get(other) == sources for other in others)
    return len(sources) == 1 and copied


def _is_computed(file: TracedFile, name: str) -> bool:
    """Whether a trained tensor is no parameter, or a copy of one."""
    model, readers = file.model, file.model.readers.get(name, ())
    if any(_has_folded(file, reader.node) and reader.place for reader in readers):
        return False
    if file.is_torchscript or _FUSED.match(name):
        return _GENERATED.match(name) is not None
    if model.producer != "pytorch" or not model.kinds or name in model.kinds:
        return False
    products = all(reader.node.op in ("MatMul", "Gemm") for reader in readers)
    return not (products and len(model.folded.get(name, ())) == 1) or _is_copy(file, name)


def _lost_slopes(file: TracedFile) -> list[str]:
    """Weights that look like numbers of the code, because an exporter has computed them."""
    model, lost = file.model, []
    takes_weights = re.compile(r"PRelu|Conv|ConvTranspose|Gemm|.*Normalization")
    for name, role in file.roles.items():
        computed = any(re.search(r"\.|weight|bias", source) for source in model.folded.get(name, ()))
        readers = (one for one in model.readers.get(name, ()) if takes_weights.fullmatch(one.node.op))
        constant = role is Role.CONSTANT and model.initializers[name].is_float and name not in model.kinds
        if constant and computed and any(reader.place for reader in readers):
            lost.append(name)
    return lost


def _constant_weights(file: TracedFile) -> list[str]:
    """Weights of layers that are numbers of Constant nodes, of the graph or of a function that it calls."""
    made = {node.outputs[0] for node in file.model.nodes if node.op == "Constant"}
    if file.model.producer == "pytorch":  # whose parameters are initializers, until onnxsim folds numbers in
        made = set(filter(_FUSED.match, made))
    weighs = [node for node in file.model.nodes if node.op in (*LAYERS, "LSTM", "GRU", "RNN")]
    return list(dict.fromkeys(name for node in weighs for name in node.inputs[1:3] if name in made))


def _has_lost_bias(file: TracedFile, node: OnnxNode) -> bool:
    """Whether a layer has no bias; a convolution before a norm has none in most networks."""
    if "RemoveOptionalBias" not in node.rule or len(node.inputs) > 2:
        return False
    readers = file.into[node.outputs[0]]
    return node.op == "Gemm" or not all(reader.op.endswith("Normalization") for reader in readers)


def _gaps(file: TracedFile) -> list[str]:
    """Numbered biases of which some in the middle are missing, in a file of which nothing else is known."""
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    # PyTorch's exporters say themselves what they did, or drop nothing.
    for name in file.model.initializers if file.model.producer != "pytorch" else ():
        if parts := re.fullmatch(r"(.*?)(\d+)([^\d]*)weight", name):
            rows[f"{parts[1]}#{parts[3]}"][int(parts[2])] = f"{parts[1]}{parts[2]}{parts[3]}bias"
    missing = []
    for biases in rows.values():
        there = [number for number, bias in biases.items() if bias in file.model.initializers]
        inside = range(min(there), max(there)) if there else ()
        missing += [bias for number, bias in biases.items() if number in inside and number not in there]
    return missing


def _may_be_buffer(file: TracedFile, name: str) -> bool:
    """Whether a trained tensor may be a buffer, where the exporter does not tell these from parameters."""
    module, _, last = name.rpartition(".")
    if file.model.kinds or _GENERATED.match(name):
        return False
    frozen_norm = f"{module}.running_var".lstrip(".") in file.trained
    unnamed = file.model.producer == "pytorch" and not _PARAMETER.fullmatch(last)
    return frozen_norm or unnamed or bool(_BUFFER.fullmatch(last))


def _asleep(file: TracedFile) -> list[str]:
    """Running statistics of norms that are all in evaluation mode."""
    modes = batch_norm_modes(file.model)
    pairs = [[file.model.owner[name] for name in node.inputs[3:5]] for node in modes]
    awake = [pair for pair in pairs if not any(modes.values()) and not {*file.frozen}.issuperset(pair)]
    return list(dict.fromkeys(name for pair in awake for name in pair))


def _norms_of_batches(file: TracedFile) -> list[str]:
    """BatchNormalizations of a model that tf2onnx exported in training mode, written out."""
    names = [node.name for node in file.model.nodes if file.model.producer == TENSORFLOW]
    means = {name.rpartition("/moments/")[0] for name in names if "/moments/" in name}
    roots = {name.removesuffix("/batchnorm/Rsqrt") for name in names if name.endswith("/batchnorm/Rsqrt")}
    return sorted(roots & means)


def _is_biased(file: TracedFile, name: str) -> bool:
    """Whether a bias is added to a value, or none is expected: a norm, or the second half of a layer."""
    for node in file.into.get(name, ()):
        added = node.op == "Add" and any(given in file.trained for given in node.inputs)
        within = name.endswith("/depthwise:0") and node.op == "Conv"
        if added or within or _OF_NORM.match(f"{node.name}/") or _OF_NORM.match(node.outputs[0]):
            return True
        if node.op in _MOVES and _is_biased(file, node.outputs[0]):
            return True
    return False


def _lost_by_tensorflow(file: TracedFile, node: OnnxNode) -> bool:
    if file.model.producer != TENSORFLOW or node.op not in LAYERS or len(node.inputs) != 2:
        return False
    weight = node.inputs[1]
    return weight in file.trained and not _FOLDED.match(weight) and not _is_biased(file, node.outputs[0])


@dataclass(frozen=True)
class Sign:
    """A trace of an exporter's change, and the effect of the change on training."""

    find: Find
    """Returns the nodes or tensors that show it."""
    seen: str
    """Text after the number of finds; words in braces are those of ``_WORDS``."""
    meaning: str
    cure: str = EXPORT
    """The remedy; ``{freeze}`` stands for the option that freezes these tensors."""


_WORDS = {
    "s": ("", "s"),
    "a": ("a ", ""),
    "is": ("is", "are"),
    "was": ("was", "were"),
    "has": ("has", "have"),
    "feeds": ("feeds", "feed"),
    "bias": ("bias", "biases"),
}
"""Forms of words for one and for several."""
SIGNS = (
    Sign(
        _tensors(_is_merged),
        "initializer{s} {feeds} several layers each",
        "they are trained as one; exporters merge tensors that are equal at the start",
    ),
    Sign(
        _folded,
        "layer{s} {has} a BatchNormalization folded in",
        "the norm is gone from the file, and is not trained",
    ),
    Sign(
        _tensors(_is_computed),
        "trained tensor{s} {was} computed by the exporter from parameters or buffers",
        "where that was more than a transposition, another network is trained",
    ),
    Sign(
        _tensors(lambda file, name: _is_computed(file, name) and _is_copy(file, name)),
        "trained tensor{s} {was} tied to another weight",
        "the exporter has made a copy, which is trained on its own",
    ),
    Sign(
        _constant_weights,
        "weight{s} {is} in {a}Constant node{s}",
        "only initializers are trained",
        "write them as initializers",
    ),
    Sign(_lost_slopes, "weight{s} {is} not trained", "the exporter has made constants of them"),
    Sign(
        _nodes(_has_lost_bias),
        "layer{s} {has} no bias",
        "the exporter drops biases that are zeros at the start, and these are not trained",
    ),
    Sign(
        _gaps,
        "{bias} {is} missing in a row of numbered ones",
        "optimizers of files drop biases of zeros, and then they are not trained",
    ),
    Sign(
        _tensors(_may_be_buffer),
        "tensor{s} {is} trained that may be {a}buffer{s} of the module",
        "the file does not tell buffers from parameters",
        f"{{freeze}} leaves them as they are, or {EXPORT}",
    ),
    Sign(
        _asleep,
        "running statistic{s} {is} of {a}BatchNormalization{s} in evaluation mode in the file",
        "the norms are trained in training mode, by the statistics of each batch",
        f"{{freeze}} keeps them in evaluation mode, or {EXPORT}",
    ),
    Sign(
        _tensors(lambda file, name: file.model.producer == TENSORFLOW and bool(_FOLDED.match(name))),
        "trained tensor{s} {has} a BatchNormalization folded in",
        "the norm is gone from the file, as in one for inference, and is not trained",
        "export in training mode, which keeps norms: "
        "tf2onnx.convert.from_function of tf.function(lambda x: model(x, training=True))",
    ),
    Sign(
        _norms_of_batches,
        "BatchNormalization{s} {has} no running statistics in the file",
        "training is exact, and predictions normalize by their batch, too",
        "predict with the batch size of training, or give the trained weights back to the Keras model",
    ),
    Sign(
        _nodes(_lost_by_tensorflow),
        "layer{s} {has} no bias",
        "TensorFlow's exports drop biases of zeros and scales of ones, as Keras starts them: these are not "
        "trained",
        "if the layers have biases in Keras, export after a step of training: then none is all zeros",
    ),
)


def remarks_of(file: TracedFile) -> tuple[Remark, ...]:
    """Return all that looks wrong; nothing where the file itself says what is trained."""
    remarks = []
    for sign in SIGNS if file.model.metadata is None else ():
        if names := sign.find(file):
            seen = sign.seen.format_map({word: forms[len(names) > 1] for word, forms in _WORDS.items()})
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            some = ", ".join(map(shown, names[:NAMED])) + more
            cure = sign.cure.replace("{freeze}", _freeze(file, names))
            remarks.append(Remark(f"{len(names)} {seen} ({some}): {sign.meaning}", cure))
    return tuple(remarks)
