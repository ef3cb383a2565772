"""Finds what looks wrong in a file whose exporter did not say what is trained, and names the cure.

Exporters and their optimizers write files for inference: they fold norms into convolutions, merge tensors
that are equal at the start, drop biases of zeros, and do not tell buffers from parameters. Such a file
trains another network than the module it was made of. Each function here knows one sign of that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from oocdl.graph.ir.graph import Role
from oocdl.graph.onnx.bounds import MOST_CONSTANT_BYTES
from oocdl.graph.onnx.metadata import Fact, Metadata
from oocdl.graph.onnx.model_file import OnnxNode, shown
from oocdl.graph.onnx.roles import batch_norm_modes, module_of
from oocdl.graph.onnx.tensors import WeightSource

EXPORT = "export with oocdl.from_torch(module, example, path), which keeps the network as it is"
NAMED = 3
"""So many names stand in a remark; of the others, the number."""
PATTERNS = 8
"""So many patterns stand in a cure; ``oocdl info MODEL --weights`` lists all tensors."""

_BUFFER = re.compile(r"(pe|pos(_.*|ition.*)?|running_.*|num_batches_tracked|.*mask|inv_freq|anchors?)")
_PARAMETER = re.compile(
    r".*(weight|bias|gamma|beta|alpha|token|scale|query|prompt|latent|temperature)s?"
    r"|.*(weight|bias)_.*|original\d*|(?!pos).*embed.*|[wbgv]",
    re.IGNORECASE,
)
"""Last parts of names: of what is a buffer more often than not, and of what always is a parameter."""
_GENERATED = re.compile(r"(onnx::|/).*|\d+$|val_\d+$")
_PLAIN = ("Add", "Sub", "Mul", "Div", "PRelu")
_MATRIX = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Remark:
    """Something that looks wrong."""

    text: str
    """What was seen, and what it means; one line."""
    cure: str
    """What to do about it; one line of code."""


@dataclass(frozen=True)
class Reader:
    """A node that reads an initializer."""

    node: OnnxNode
    index: int
    """Which of its inputs."""
    name: str
    """The name it reads it by: another one behind an Identity."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedFile:
    """A file with decided roles, and what its exporter left in it."""

    nodes: Sequence[OnnxNode]
    initializers: Mapping[str, WeightSource]
    producer: str
    opset: int
    kinds: Mapping[str, str]
    """Initializer -> PARAMETER, BUFFER or CONSTANT_TENSOR, where the exporter said."""
    folded: Mapping[str, tuple[str, ...]]
    """Initializer -> what an optimizer says it was computed from."""
    roles: Mapping[str, Role]
    """Role of each initializer that is read."""
    frozen: Collection[str]
    evaluated: Collection[str]
    """First outputs of the norms that use their running statistics in training, too."""
    metadata: Metadata | None
    """What the file itself says."""

    @cached_property
    def readers(self) -> Mapping[str, Sequence[Reader]]:
        """The nodes that read each initializer, also behind Identity nodes, which are none of them."""
        owner = {name: name for name in self.initializers}
        found: dict[str, list[Reader]] = defaultdict(list)
        for node in self.nodes:
            if node.op == "Identity" and node.inputs[0] in owner:
                owner[node.outputs[0]] = owner[node.inputs[0]]
                continue
            for index, name in enumerate(node.inputs):
                if name in owner:
                    found[owner[name]].append(Reader(node, index, name))
        return found

    @cached_property
    def is_dynamo(self) -> bool:
        """Whether PyTorch's dynamo exporter wrote the file: it says of what each node was made."""
        return bool(self.kinds) or any(node.origin for node in self.nodes)

    @cached_property
    def trained(self) -> list[str]:
        """The initializers that are trained."""
        return [name for name, role in self.roles.items() if role is Role.WEIGHT and name not in self.frozen]

    def fact(self, name: str) -> Fact | None:
        """What the metadata says of an initializer."""
        return self.metadata.facts.get(name) if self.metadata is not None else None

    def is_float(self, name: str) -> bool:
        """Whether an initializer is floating-point."""
        return self.initializers[name].is_float

    def is_uniform(self, name: str) -> bool:
        """Whether all its numbers are equal, as those of fresh norms and biases are."""
        item = self.initializers[name]
        if item.nbytes > MOST_CONSTANT_BYTES:
            return False
        data = item.raw()
        return data.size > 0 and bool((data == data.flat[0]).all())

    def modules(self, name: str) -> tuple[str, ...]:
        """The modules whose nodes read an initializer; the nodes, where the file knows no modules."""
        return tuple(dict.fromkeys(module_of(reader.node) for reader in self.readers.get(name, ())))

    def remarks(self) -> tuple[Remark, ...]:
        """Return all that looks wrong; nothing where the file itself says what is trained."""
        if self.metadata is not None:
            return ()
        return tuple(remark for sign in SIGNS for remark in sign(self))


def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def some(names: Sequence[str]) -> str:
    """Write the first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(shown(name) for name in names[:NAMED]) + more


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words: ``many`` of them, or ``one`` with an s.

    >>> counted(1, "bias", "biases"), counted(3, "norm")
    ('1 bias', '3 norms')
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def _freeze(file: TracedFile, names: Sequence[str]) -> str:
    """Write the option that freezes these names only: by whole modules, equal last parts, or one by one."""
    left, patterns = dict.fromkeys(names), []
    modules = (f"{_literal(name.rpartition('.')[0])}.*" for name in names if "." in name)
    parts = (f"*{_literal(name.rpartition('.')[2])}" for name in names)
    for pattern in dict.fromkeys((*modules, *parts)):
        meant = [name for name in file.initializers if fnmatchcase(name, pattern)]
        if len(meant) > 1 and left.keys() >= set(meant):
            patterns.append(pattern)
            left = {name: None for name in left if name not in meant}
    patterns += map(_literal, left)
    more = ", ..." if len(patterns) > PATTERNS else ""
    return f"freeze=[{', '.join(map(shown, patterns[:PATTERNS]))}{more}]"


def _literal(name: str) -> str:
    """Return the pattern that matches one name only."""
    return re.sub(r"[\[*?]", lambda found: f"[{found[0]}]", name)


def merged_tensors(file: TracedFile) -> Iterator[Remark]:
    """One tensor that feeds several modules, which an exporter has merged because they were equal."""
    found = [name for name in file.trained if _is_merged(file, name)]
    if found:
        first = ", ".join(shown(module) for module in _feeds(file, found[0])[:NAMED])
        yield Remark(
            f"{counted(len(found), 'initializer feeds', 'initializers feed')} several layers each "
            f"({some(found)}; the first feeds {first}), trained as one: exporters merge tensors "
            "that are equal at the start",
            EXPORT,
        )


def _feeds(file: TracedFile, name: str) -> tuple[str, ...]:
    """What tells the readers of an initializer apart: modules, or the names that merged tensors had."""
    if file.producer == "pytorch" and not file.is_dynamo:
        return tuple(dict.fromkeys(reader.name for reader in file.readers[name]))
    return file.modules(name)


def _is_merged(file: TracedFile, name: str) -> bool:
    readers, feeds = file.readers[name], _feeds(file, name)
    if len(feeds) < 2:
        # Two parameters of one module, where a node is no module of its own.
        plain = [reader for reader in readers if reader.node.op in _PLAIN]
        return file.is_dynamo and len(plain) > 1 and file.is_uniform(name)
    if not file.is_dynamo and file.producer != "pytorch":
        return all(reader.node.op.endswith("Normalization") for reader in readers)
    twins = len({_unnumbered(feed) for feed in feeds}) < len(feeds)
    return twins or file.is_uniform(name)


def folded_norms(file: TracedFile) -> Iterator[Remark]:
    """BatchNormalizations that were folded into convolutions."""
    convolutions = [node for node in file.nodes if node.op in ("Conv", "ConvTranspose")]
    found = [node for node in convolutions if _is_folded(file, node)]
    has_norm = any(node.op.endswith("Normalization") for node in file.nodes)
    with_bias = [node for node in convolutions if len(node.inputs) > 2]
    if not found and file.is_dynamo and not file.kinds and not has_norm and len(with_bias) > 1:
        found = with_bias  # an older exporter, which does not say what it did
    if found:
        yield Remark(
            f"{counted(len(found), 'convolution has', 'convolutions have')} a BatchNormalization folded in, "
            f"first {shown(found[0].name)}: the norm is gone from the file, and is not trained",
            EXPORT,
        )


def _is_folded(file: TracedFile, node: OnnxNode) -> bool:
    if "FuseBatchNorm" in node.rule:
        return True
    plain = file.is_dynamo or file.producer != "pytorch"
    return not plain and node.op.startswith("Conv") and node.inputs[1].startswith("onnx::Conv")


def computed_weights(file: TracedFile) -> Iterator[Remark]:
    """Trained tensors that are no parameters: an exporter has computed them from some."""
    folded = {name for node in file.nodes if _is_folded(file, node) for name in node.inputs[1:]}
    found = [name for name in file.trained if name not in folded and _is_computed(file, name)]
    if found:
        tied = [name for name in found if _is_copy(file, name)]
        why = f"; {shown(tied[0])} was tied to another weight, and no longer is" if tied else ""
        yield Remark(
            f"{counted(len(found), 'trained tensor was', 'trained tensors were')} computed by the exporter "
            f"from parameters or buffers ({some(found)}): where that was more than a transposition, "
            f"another network is trained{why}",
            EXPORT,
        )


def _is_computed(file: TracedFile, name: str) -> bool:
    if file.producer != "pytorch":
        return False
    if not file.is_dynamo:
        return _GENERATED.match(name) is not None
    if not file.kinds or name in file.kinds:
        return False
    only_transposed = len(file.folded.get(name, ())) == 1 and all(
        reader.node.op in _MATRIX for reader in file.readers[name]
    )
    return not only_transposed or _is_copy(file, name)


def _is_copy(file: TracedFile, name: str) -> bool:
    """Whether what an initializer was computed from is in the file as well."""
    sources = file.folded.get(name, ())
    others = (other for other in file.trained if other != name)
    return len(sources) == 1 and any(
        other == sources[0] or file.folded.get(other) == sources for other in others
    )


def lost_slopes(file: TracedFile) -> Iterator[Remark]:
    """Weights that look like numbers of the code, because an exporter has computed them."""
    found = [
        name
        for name, role in file.roles.items()
        if role is Role.CONSTANT
        and file.is_float(name)
        and name not in file.kinds
        and any(re.search(r"\.|weight|bias", source) for source in file.folded.get(name, ()))
        and any(reader.index and _takes_weights(reader.node) for reader in file.readers[name])
    ]
    if found:
        yield Remark(
            f"{counted(len(found), 'weight is', 'weights are')} not trained ({some(found)}): the exporter "
            "has made constants of them",
            EXPORT,
        )


def _takes_weights(node: OnnxNode) -> bool:
    return node.op in ("PRelu", "Conv", "ConvTranspose", "Gemm") or node.op.endswith("Normalization")


def lost_biases(file: TracedFile) -> Iterator[Remark]:
    """Biases that an optimizer has dropped because they were zeros at the start."""
    into: dict[str, list[OnnxNode]] = defaultdict(list)
    for node in file.nodes:
        for name in node.inputs:
            into[name].append(node)
    found = []
    for node in file.nodes:
        # A convolution before a norm has no bias in most networks, and one would change nothing.
        norm = all(reader.op.endswith("Normalization") for reader in into[node.outputs[0]])
        if "RemoveOptionalBias" in node.rule and len(node.inputs) < 3 and (node.op == "Gemm" or not norm):
            found.append(node.name)
    if found:
        yield Remark(
            f"{counted(len(found), 'layer has', 'layers have')} no bias ({some(found)}): the exporter "
            "drops biases that are zeros at the start, and these are not trained",
            EXPORT,
        )


def gaps(file: TracedFile) -> Iterator[Remark]:
    """Numbered biases of which some in the middle are missing, in a file of which nothing else is known."""
    if file.producer == "pytorch":
        return  # says itself what it did, or drops nothing
    rows: dict[str, dict[int, str]] = defaultdict(dict)
    for name in file.initializers:
        found = re.fullmatch(r"(.*?)(\d+)([^\d]*)weight", name)
        if found:
            rows[f"{found[1]}#{found[3]}"][int(found[2])] = f"{found[1]}{found[2]}{found[3]}bias"
    missing = []
    for biases in rows.values():
        there = [number for number, bias in biases.items() if bias in file.initializers]
        if len(there) > 1:
            missing += [
                biases[number]
                for number in biases
                if number not in there and min(there) < number < max(there)
            ]
    if missing:
        yield Remark(
            f"{counted(len(missing), 'bias is', 'biases are')} missing in a row of numbered ones "
            f"({some(missing)}): optimizers of files drop biases of zeros, and then they are not trained",
            EXPORT,
        )


def buffers(file: TracedFile) -> Iterator[Remark]:
    """Trained tensors that may be buffers, where the exporter does not tell them from parameters."""
    if file.kinds:
        return
    is_torch = file.producer == "pytorch"
    found = []
    for name in file.trained:
        module, _, last = name.rpartition(".")
        if _GENERATED.match(name):
            continue
        frozen_norm = f"{module}.running_var".lstrip(".") in file.trained
        if frozen_norm or _BUFFER.fullmatch(last) or (is_torch and not _PARAMETER.fullmatch(last)):
            found.append(name)
    if found:
        yield Remark(
            f"{counted(len(found), 'tensor is', 'tensors are')} trained that may be "
            f"{'a buffer' if len(found) == 1 else 'buffers'} of the module ({some(found)}): the file does "
            "not tell buffers from parameters",
            f"{_freeze(file, found)} leaves them as they are, or {EXPORT}",
        )


def modes(file: TracedFile) -> Iterator[Remark]:
    """BatchNormalizations that are all in evaluation mode: as exported for inference, or on purpose."""
    found = batch_norm_modes(file.nodes, file.initializers.keys(), file.opset)
    asleep = [
        node
        for node, training in found.items()
        if not training and not all(name in file.frozen for name in node.inputs[3:5])
    ]
    if asleep and not any(found.values()):
        names = list(dict.fromkeys(name for node in asleep for name in node.inputs[3:5]))
        yield Remark(
            f"{counted(len(asleep), 'BatchNormalization is', 'BatchNormalizations are')} in evaluation "
            f"mode in the file, as in one for inference, first {shown(asleep[0].name)}: they are trained in "
            "training mode, by the statistics of each batch",
            f"{_freeze(file, names)} keeps them in evaluation mode, or {EXPORT}",
        )


SIGNS = (
    merged_tensors,
    folded_norms,
    computed_weights,
    lost_slopes,
    lost_biases,
    gaps,
    buffers,
    modes,
)
"""Each looks for one kind of sign."""
