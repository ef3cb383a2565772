"""Signs that a plain file trains another network than the module it was made of, and the cure of each.

Exporters and their optimizers write files for inference: they fold norms into convolutions, merge tensors
that are equal at the start, drop biases of zeros, and do not tell buffers from parameters. tf2onnx, which
Keras exports by, multiplies norms in evaluation mode into weights; only names still tell of it. A file of
``oocdl.from_torch`` says itself what is trained.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.onnx_file import TracedFile
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
_GENERATED = re.compile(r"(onnx::|/).*|\d+$|val_\d+$")
_FOLDED = re.compile(r".*(/batchnorm/(mul|sub)|merged_input)(:0|__\d+)?$|.*_(weights|bias)_fused_bn.*")
_OF_NORM = re.compile(r".*/(moments|batchnorm)/.*")
"""Names of tf2onnx: of weights with a norm in them, and within a norm."""
_LAYERS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class Remark:
    """Something that looks wrong."""

    text: str
    """The observation and its meaning; one line."""
    cure: str
    """The remedy; one line of code."""


def some(names: Sequence[str]) -> str:
    """Write the first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(shown(name) for name in names[:NAMED]) + more


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


def _merged(file: TracedFile) -> list[str]:
    """Tensors that feed several modules, and were equal at the start."""

    def is_merged(name: str) -> bool:
        readers, feeds = file.readers[name], file.modules(name)
        if file.is_torchscript:  # it leaves the names that merged tensors had
            feeds = tuple(dict.fromkeys(reader.name for reader in readers))
        if len(feeds) < 2:  # two parameters of one module, where a node is no module of its own
            plain = [reader for reader in readers if reader.node.op in ("Add", "Sub", "Mul", "Div", "PRelu")]
            return file.is_dynamo and len(plain) > 1 and file.is_uniform(name)
        if not file.is_dynamo and not file.is_torchscript:
            return all(reader.node.op.endswith("Normalization") for reader in readers)
        twins = len({re.sub(r"\d+", "#", feed) for feed in feeds}) < len(feeds)
        return twins or file.is_uniform(name)

    return [name for name in file.trained if is_merged(name)]


def _has_folded(file: TracedFile, node: OnnxNode) -> bool:
    """Whether a BatchNormalization was folded into a convolution."""
    named = file.is_torchscript and node.op.startswith("Conv") and node.inputs[1].startswith("onnx::Conv")
    return "FuseBatchNorm" in node.rule or named


def _folded(file: TracedFile) -> list[str]:
    nodes = file.model.nodes
    convolutions = [node for node in nodes if node.op in ("Conv", "ConvTranspose")]
    folded = [node.name for node in convolutions if _has_folded(file, node)]
    has_norm = any(node.op.endswith("Normalization") for node in nodes)
    biased = [node.name for node in convolutions if len(node.inputs) > 2]
    # An older exporter does not say what it did.
    silent = file.is_dynamo and not file.model.kinds and not has_norm and len(biased) > 1
    return folded or (biased if silent else [])


def _is_copy(file: TracedFile, name: str) -> bool:
    """Whether what an initializer was computed from is in the file as well."""
    sources = file.model.folded.get(name, ())
    others = (other for other in file.trained if other != name)
    return len(sources) == 1 and any(
        other == sources[0] or file.model.folded.get(other) == sources for other in others
    )


def _computed(file: TracedFile) -> list[str]:
    """Trained tensors that are no parameters, or are copies of one."""
    model = file.model
    folded = {name for node in model.nodes if _has_folded(file, node) for name in node.inputs[1:]}

    def is_computed(name: str) -> bool:
        if file.is_torchscript:
            return _GENERATED.match(name) is not None
        if model.producer != "pytorch" or not model.kinds or name in model.kinds:
            return False
        products = all(reader.node.op in ("MatMul", "Gemm") for reader in file.readers[name])
        only_transposed = products and len(model.folded.get(name, ())) == 1
        return not only_transposed or _is_copy(file, name)

    return [name for name in file.trained if name not in folded and is_computed(name)]


def _lost_slopes(file: TracedFile) -> list[str]:
    """Weights that look like numbers of the code, because an exporter has computed them."""

    def takes_weights(node: OnnxNode) -> bool:
        return node.op in ("PRelu", "Conv", "ConvTranspose", "Gemm") or node.op.endswith("Normalization")

    model = file.model
    return [
        name
        for name, role in file.roles.items()
        if role is Role.CONSTANT
        and model.initializers[name].is_float
        and name not in model.kinds
        and any(re.search(r"\.|weight|bias", source) for source in model.folded.get(name, ()))
        and any(reader.place and takes_weights(reader.node) for reader in file.readers[name])
    ]


def _lost_biases(file: TracedFile) -> list[str]:
    """Layers without a bias; a convolution before a norm has none in most networks."""

    def before_norm(node: OnnxNode) -> bool:
        return all(reader.op.endswith("Normalization") for reader in file.into[node.outputs[0]])

    return [
        node.name
        for node in file.model.nodes
        if "RemoveOptionalBias" in node.rule
        and len(node.inputs) < 3
        and (node.op == "Gemm" or not before_norm(node))
    ]


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
        if len(there) > 1:
            inside = range(min(there), max(there))
            missing += [biases[number] for number in biases if number in inside and number not in there]
    return missing


def _buffers(file: TracedFile) -> list[str]:
    """Trained tensors that may be buffers, where the exporter does not tell them from parameters."""
    torch = file.model.producer == "pytorch"

    def may_be_buffer(name: str) -> bool:
        module, _, last = name.rpartition(".")
        frozen_norm = f"{module}.running_var".lstrip(".") in file.trained
        return frozen_norm or bool(_BUFFER.fullmatch(last)) or (torch and not _PARAMETER.fullmatch(last))

    names = [] if file.model.kinds else file.trained
    return [name for name in names if not _GENERATED.match(name) and may_be_buffer(name)]


def _asleep(file: TracedFile) -> list[str]:
    """Running statistics of norms that are all in evaluation mode."""
    modes = batch_norm_modes(file.model)
    pairs = [node.inputs[3:5] for node in modes if not any(modes.values())]
    return list(dict.fromkeys(name for pair in pairs if not set(pair) <= {*file.frozen} for name in pair))


def _folded_by_tensorflow(file: TracedFile) -> list[str]:
    return [name for name in file.trained if file.model.producer == TENSORFLOW and _FOLDED.match(name)]


def _norms_of_batches(file: TracedFile) -> list[str]:
    """BatchNormalizations of a model that tf2onnx exported in training mode, written out."""
    names = [node.name for node in file.model.nodes if file.model.producer == TENSORFLOW]
    means = {name.rpartition("/moments/")[0] for name in names if "/moments/" in name}
    roots = {name.removesuffix("/batchnorm/Rsqrt") for name in names if name.endswith("/batchnorm/Rsqrt")}
    return sorted(roots & means)


def _lost_by_tensorflow(file: TracedFile) -> list[str]:
    trained = set(file.trained)

    def is_biased(name: str) -> bool:
        """Whether a bias is added to a value, or none is expected: a norm, or the second half of a layer."""
        for node in file.into.get(name, ()):
            added = node.op == "Add" and trained.intersection(node.inputs)
            within = name.endswith("/depthwise:0") and node.op == "Conv"
            if added or within or _OF_NORM.match(f"{node.name}/") or _OF_NORM.match(node.outputs[0]):
                return True
            if node.op in _MOVES and is_biased(node.outputs[0]):
                return True
        return False

    return [
        node.name
        for node in file.model.nodes
        if file.model.producer == TENSORFLOW
        and node.op in _LAYERS
        and len(node.inputs) == 2
        and node.inputs[1] in trained
        and not _FOLDED.match(node.inputs[1])
        and not is_biased(node.outputs[0])
    ]


@dataclass(frozen=True)
class Sign:
    """A trace of an exporter's change, and the effect of the change on training."""

    find: Callable[[TracedFile], list[str]]
    """Returns the nodes or tensors that show it."""
    seen: str
    """Text after the number of finds; words in braces are those of ``_WORDS``."""
    meaning: str
    cure: str = EXPORT
    """The remedy; ``{freeze}`` stands for the option that freezes these tensors."""

    def remarks(self, file: TracedFile) -> list[Remark]:
        """Return what is said of a file: nothing if it does not show the sign."""
        names = self.find(file)
        if not names:
            return []
        words = {word: forms[len(names) > 1] for word, forms in _WORDS.items()}
        text = f"{len(names)} {self.seen.format_map(words)} ({some(names)}): {self.meaning}"
        return [Remark(text, self.cure.replace("{freeze}", _freeze(file, names)))]


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
        _merged,
        "initializer{s} {feeds} several layers each",
        "they are trained as one; exporters merge tensors that are equal at the start",
    ),
    Sign(
        _folded,
        "convolution{s} {has} a BatchNormalization folded in",
        "the norm is gone from the file, and is not trained",
    ),
    Sign(
        _computed,
        "trained tensor{s} {was} computed by the exporter from parameters or buffers",
        "where that was more than a transposition, another network is trained",
    ),
    Sign(
        lambda file: [name for name in _computed(file) if _is_copy(file, name)],
        "trained tensor{s} {was} tied to another weight",
        "the exporter has made a copy, which is trained on its own",
    ),
    Sign(_lost_slopes, "weight{s} {is} not trained", "the exporter has made constants of them"),
    Sign(
        _lost_biases,
        "layer{s} {has} no bias",
        "the exporter drops biases that are zeros at the start, and these are not trained",
    ),
    Sign(
        _gaps,
        "{bias} {is} missing in a row of numbered ones",
        "optimizers of files drop biases of zeros, and then they are not trained",
    ),
    Sign(
        _buffers,
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
        _folded_by_tensorflow,
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
        _lost_by_tensorflow,
        "layer{s} {has} no bias",
        "TensorFlow's exports drop biases of zeros and scales of ones, as Keras starts them: these are not "
        "trained",
        "if the layers have biases in Keras, export after a step of training: then none is all zeros",
    ),
)
"""All signs, in the order in which they are said."""


def remarks_of(file: TracedFile) -> tuple[Remark, ...]:
    """Return all that looks wrong; nothing where the file itself says what is trained."""
    signs = SIGNS if file.model.metadata is None else ()
    return tuple(remark for sign in signs for remark in sign.remarks(file))
