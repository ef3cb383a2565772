"""A file that is another network than its module is refused, however little of it was changed."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import oocdl
from oocdl.errors import UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.pytorch import export as exporting
from oocdl.pytorch.exporters import Call, with_torchscript

IMAGE = torch.zeros(2, 2, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1), nn.AvgPool2d(2)
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Conv2d(4, 3, 1), nn.Softmax(1))


def node(proto: onnx.ModelProto, op: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if node.op_type == op)


def attribute(op: str, name: str, value: object) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        kept = [one for one in node(proto, op).attribute if one.name != name]
        del node(proto, op).attribute[:]
        node(proto, op).attribute.extend([*kept, onnx.helper.make_attribute(name, value)])

    return change


def another(op: str, now: str) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        found = node(proto, op)
        found.op_type = now
        del found.attribute[:]

    return change


def without(op: str) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        gone = node(proto, op)
        for other in proto.graph.node:
            other.input[:] = [gone.input[0] if name == gone.output[0] else name for name in other.input]
        proto.graph.node.remove(gone)

    return change


CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "a slope": (attribute("LeakyRelu", "alpha", 0.101), "leaky_relu in '2'"),
    "an activation": (another("LeakyRelu", "Relu"), "leaky_relu in '2'"),
    "an epsilon": (attribute("BatchNormalization", "epsilon", 1.1e-5), "in '1'"),
    "a momentum": (attribute("BatchNormalization", "momentum", 0.8), "running_"),
    "a padding": (attribute("Conv", "pads", [2, 2, 0, 0]), "in '0'"),
    "an axis": (attribute("Softmax", "axis", 2), "softmax in '6'"),
    "a norm that is gone": (without("BatchNormalization"), "batch_norm in '1'"),
    "a dropout that is gone": (without("Dropout"), "draws random numbers"),
    "an average that is a maximum": (another("AveragePool", "GlobalAveragePool"), "draws random numbers"),
}


def changed(edit: Callable[[onnx.ModelProto], None]) -> Callable[[nn.Module, Call, Path], None]:
    """An exporter whose files are changed."""

    def export(module: nn.Module, call: Call, path: Path) -> None:
        with_torchscript(module, call, path)
        proto = onnx.load(path)
        edit(proto)
        onnx.save(proto, path)

    return export


def test_files_that_were_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One exporter is tried after the other, and what was wrong with the file of each is told."""
    monkeypatch.setattr(exporting, "EXPORTERS", {name: changed(edit) for name, (edit, _) in CHANGES.items()})
    with pytest.raises(UnsupportedError, match="Sequential cannot be written as ONNX. a slope: ") as told:
        oocdl.from_torch(network(), IMAGE, tmp_path / "net.onnx", dynamic="batch")
    found = dict(one.split(": ", 1) for one in str(told.value).partition(". ")[2].split(" | "))
    assert found.keys() == CHANGES.keys() and not list(tmp_path.iterdir())
    for name, (_, message) in CHANGES.items():
        assert message in found[name], name


def test_a_crash_of_an_exporter_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(module: nn.Module, call: Call, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    monkeypatch.setattr(exporting, "EXPORTERS", {"one": crashes})
    with pytest.raises(UnsupportedError, match=r"PyTorch's one exporter crashed \(signal SIGSEGV\)$"):
        oocdl.from_torch(network(), IMAGE, tmp_path / "net.onnx")
    monkeypatch.setattr(exporting, "EXPORTERS", {"one": crashes, "two": with_torchscript})
    assert oocdl.from_torch(network(), IMAGE, tmp_path / "net.onnx").exporter == "two"


def test_a_file_that_was_not_compared_says_so(tmp_path: Path) -> None:
    file = oocdl.from_torch(network(), IMAGE, tmp_path / "net.onnx", verify=False)
    model = inspect_onnx(file)
    assert model.metadata is not None and not model.metadata.compared
    assert file.notes == ("verify=False: the file was not compared with the module",)
    assert model.bind(exporting.RULES, {"input": (2, 2, 8, 8)}).trained.notes == file.notes


class Does(nn.Module):
    """Parts, and what is done with them and the input."""

    def __init__(self, what: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.what = what
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


class OfTokens(Does):
    """The same of tokens and a mask."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.what(self, ids, mask)


MASKED = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)


def shorter(bonus: float) -> nn.Module:
    """Has a shorter way where no token is masked, which is left out where the code is traced."""

    def what(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        if not torch.jit.is_tracing() and bool((mask == 1).all()):
            return x.sum(1) + bonus
        return (x * (mask != 0).to(x.dtype)[..., None]).sum(1)

    return OfTokens(what, words=nn.Embedding(5, 4))


def clamped(self: Does, x: Tensor) -> Tensor:
    """Tames large numbers, but not where the code is traced."""
    is_large = not torch.jit.is_tracing() and bool(x.abs().max() > 100)
    return x.clamp(-100, 100) if is_large else x * 2


def dropping(rate: float) -> nn.Module:
    """Drops a layer at random, as encoders of transformers do."""

    def what(self: Any, x: Tensor) -> Tensor:
        is_dropped = self.training and torch.rand([]) < rate
        made: Tensor = x if is_dropped else x + self.layer(x)
        return made

    return Does(what, layer=nn.Linear(4, 4))


def placed(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Looks up the place of a token by a sum over the mask: whole numbers are flags there."""
    made: Tensor = self.words(ids) + self.places(mask.cumsum(1))
    return made


def hidden(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Adds the least number to the scores of masked keys, which for some samples are all."""
    q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.parts(self.words(ids)).chunk(3, -1))
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask != 1, torch.finfo(q.dtype).min)
    return nn.functional.scaled_dot_product_attention(q, k, v, bias[:, None, None])


def gram(self: Any, x: Tensor) -> Tensor:
    """Products of features after a norm, whose gradient of one sample has an order that PyTorch misreads."""
    y: Tensor = self.norm(x).flatten(2).transpose(1, 2)
    return y @ y.transpose(1, 2)


def neighbours() -> nn.Module:
    """The largest difference of features to those of the nearest points, some of which are equally near."""

    def what(self: Any, x: Tensor) -> Tensor:
        square = x.square().sum(-1)
        far = square[:, :, None] + square[:, None] - 2 * x @ x.transpose(1, 2)
        near = far.topk(3, largest=False).indices[..., None].expand(-1, -1, -1, x.shape[2])
        there = x[:, None].expand(-1, x.shape[1], -1, -1).gather(2, near)
        made: Tensor = self.edges(torch.cat([there - x[:, :, None], there], -1)).amax(2)
        return made

    return Does(what, edges=nn.Linear(6, 4))


WRITTEN: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...]]] = {
    "a short way that changes nothing": (lambda: shorter(0.0), MASKED, ("batch", "ids_1")),
    "a rate of 0": (lambda: dropping(0.0), torch.zeros(2, 4), ("batch", "4")),
    "sums that look up rows": (
        lambda: OfTokens(placed, words=nn.Embedding(50, 8), places=nn.Embedding(14, 8)), MASKED,
        ("batch", "ids_1")),
    "no key is seen": (
        lambda: OfTokens(hidden, words=nn.Embedding(20, 8), parts=nn.Linear(8, 48)), MASKED,
        ("batch", "ids_1")),
    "gradients that PyTorch gets wrong": (
        lambda: Does(gram, norm=nn.BatchNorm2d(4)), torch.zeros(2, 4, 3, 3), ("batch", "4", "x_2", "x_3")),
    "equally near points": (neighbours, torch.zeros(2, 20, 3), ("batch", "x_1", "3")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_no_difference_is_written(name: str, tmp_path: Path) -> None:
    make, example, dims = WRITTEN[name]
    file = oocdl.from_torch(make(), example, tmp_path / "net.onnx")
    assert {tuple(map(str, port.dims)) for port in inspect_onnx(file).inputs} == {dims}
    told = "the code decides by data in 'OfTokens' (test_comparison.py:"
    assert any(note.startswith(told) for note in file.notes[:1]) == (
        name == "a short way that changes nothing"
    )


@pytest.mark.parametrize(
    ("make", "example", "why"),
    [
        (lambda: shorter(0.1), MASKED, "its file is another network: its output"),
        (lambda: Does(clamped), torch.zeros(2, 4), "a number that depends on data is read"),
        (lambda: dropping(0.1), torch.zeros(2, 4), "a number that depends on data is read"),
    ],
)
def test_what_data_decide_unless_it_is_traced_is_refused(
    make: Callable[[], nn.Module], example: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=why):
        oocdl.from_torch(make(), example, tmp_path / "net.onnx")


def test_a_file_that_takes_other_points_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farthest = changed(attribute("TopK", "largest", 1))
    monkeypatch.setattr(exporting, "EXPORTERS", {"one": farthest})
    with pytest.raises(UnsupportedError, match="one: its file is another network"):
        oocdl.from_torch(neighbours(), torch.zeros(2, 20, 3), tmp_path / "net.onnx")


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_outputs_of_training_alone_are_no_difference(tmp_path: Path, factor: float) -> None:
    """Two in training mode, and the first one, times a factor, in evaluation mode."""

    def heads(self: Any, x: Tensor) -> Any:
        outputs = [self.first(x), self.second(x)]
        return outputs if self.training else factor * outputs[0]

    module = Does(heads, first=nn.Linear(4, 3), second=nn.Linear(4, 3))
    made = oocdl.from_torch(module, torch.zeros(2, 4), tmp_path / "heads.onnx")
    assert any("its output output_0 is off" in note for note in made.notes) == (factor != 1)
    assert not any("tensors" in note for note in made.notes)


@pytest.mark.parametrize(("is_nested", "masks"), [(True, True), (False, True), (True, False)])
def test_an_encoder_that_sets_padding_to_zero_is_told(tmp_path: Path, is_nested: bool, masks: bool) -> None:
    """It does so in evaluation mode, without gradients; in training it does not."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=is_nested)

    def what(self: Any, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = {"src_key_padding_mask": mask == 0} if masks else {}
        made: Tensor = self.encoder(self.words(ids), **hidden)
        return made

    module = OfTokens(what, words=nn.Embedding(5, 8), encoder=encoder)
    told = oocdl.from_torch(module, MASKED, tmp_path / "net.onnx").notes
    zeros = [note for note in told if "'encoder' gives zeros at padding" in note]
    assert bool(zeros) == (is_nested and masks), told


class Chooses(nn.Module):
    """One part for training, its copy for predictions: averaged weights, or a norm for clean data."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.fc, self.part, self.copy = nn.Linear(3, 3), part, copy.deepcopy(part).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = (self.part if self.training else self.copy)(self.fc(x))
        return made


@pytest.mark.parametrize("part", [nn.Linear(3, 2), nn.BatchNorm1d(3)])
def test_predictions_of_parts_that_start_equal_are_told_apart(part: nn.Module, tmp_path: Path) -> None:
    made = oocdl.from_torch(Chooses(part), torch.zeros(4, 3), tmp_path / "net.onnx")
    assert any(
        note.startswith("in evaluation mode the module computes something else") for note in made.notes
    )
