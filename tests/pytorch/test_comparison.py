"""A file that is another network than its module is refused, however little of it was changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

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


class Masked(nn.Module):
    """Has a shorter way where no token is masked, which is left out where the code is traced."""

    def __init__(self, bonus: float) -> None:
        super().__init__()
        self.words, self.bonus = nn.Embedding(5, 4), bonus

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        if not torch.jit.is_tracing() and bool((mask == 1).all()):
            return x.sum(1) + self.bonus
        return (x * (mask != 0).to(x.dtype)[..., None]).sum(1)


MASKED = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)


def test_what_is_decided_by_data_unless_it_is_traced_is_written_as_traced(tmp_path: Path) -> None:
    file = oocdl.from_torch(Masked(0.0), MASKED, tmp_path / "net.onnx")
    assert file.notes[0].startswith("the code decides by data in 'Masked' (test_comparison.py:")
    assert {port.dims for port in inspect_onnx(tmp_path / "net.onnx").inputs} == {("batch", "ids_1")}


def test_a_short_way_that_is_another_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="its file is another network: its output"):
        oocdl.from_torch(Masked(0.1), MASKED, tmp_path / "net.onnx")


class Clamped(nn.Module):
    """Tames large numbers, but not where the code is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_large = not torch.jit.is_tracing() and bool(x.abs().max() > 100)
        return x.clamp(-100, 100) if is_large else x * 2


def test_what_numbers_decide_unless_it_is_traced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a number that depends on data is read"):
        oocdl.from_torch(Clamped(), torch.zeros(2, 4), tmp_path / "net.onnx")


class Dropping(nn.Module):
    """Drops a layer at random, as encoders of transformers do."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(4, 4), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_dropped = self.training and torch.rand([]) < self.rate
        return x if is_dropped else x + self.layer(x)


def test_layers_that_are_dropped_at_a_rate_of_0_are_written(tmp_path: Path) -> None:
    oocdl.from_torch(Dropping(0.0), torch.zeros(2, 4), tmp_path / "net.onnx")
    assert inspect_onnx(tmp_path / "net.onnx").inputs[0].dims == ("batch", 4)
    with pytest.raises(UnsupportedError, match="a number that depends on data is read"):
        oocdl.from_torch(Dropping(0.1), torch.zeros(2, 4), tmp_path / "net.onnx")


class Placed(nn.Module):
    """Looks up the place of a token by a sum over the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 8), nn.Embedding(14, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids) + self.places(mask.cumsum(1))
        return x


def test_whole_numbers_are_flags_where_sums_of_them_look_up_rows(tmp_path: Path) -> None:
    oocdl.from_torch(Placed(), MASKED, tmp_path / "net.onnx")
    assert inspect_onnx(tmp_path / "net.onnx").inputs[0].dims == ("batch", "ids_1")


class Hidden(nn.Module):
    """Adds the least number to the scores of masked keys, which for some samples are all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.parts = nn.Embedding(20, 8), nn.Linear(8, 48)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (2, 8)).transpose(1, 2) for x in self.parts(self.words(ids)).chunk(3, -1))
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask != 1, torch.finfo(q.dtype).min)
        return nn.functional.scaled_dot_product_attention(q, k, v, bias[:, None, None])


def test_attention_that_sees_no_key_is_compared_by_its_formula(tmp_path: Path) -> None:
    oocdl.from_torch(Hidden(), MASKED, tmp_path / "net.onnx")


class Gram(nn.Module):
    """Products of features after a norm, whose gradient of one sample has an order that PyTorch misreads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x).flatten(2).transpose(1, 2)
        return y @ y.transpose(1, 2)


def test_gradients_of_norms_that_pytorch_gets_wrong_are_no_difference(tmp_path: Path) -> None:
    oocdl.from_torch(Gram(), torch.zeros(2, 4, 3, 3), tmp_path / "net.onnx")


class Neighbours(nn.Module):
    """The largest difference of features to those of the nearest points."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.square().sum(-1)
        far = square[:, :, None] + square[:, None] - 2 * x @ x.transpose(1, 2)
        near = far.topk(3, largest=False).indices[..., None].expand(-1, -1, -1, x.shape[2])
        there = x[:, None].expand(-1, x.shape[1], -1, -1).gather(2, near)
        made: torch.Tensor = self.edges(torch.cat([there - x[:, :, None], there], -1)).amax(2)
        return made


def test_which_of_equally_near_points_are_taken_is_no_difference(tmp_path: Path) -> None:
    oocdl.from_torch(Neighbours(), torch.zeros(2, 20, 3), tmp_path / "net.onnx")


def test_a_file_that_takes_other_points_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farthest = changed(attribute("TopK", "largest", 1))
    monkeypatch.setattr(exporting, "EXPORTERS", {"one": farthest})
    with pytest.raises(UnsupportedError, match="one: its file is another network"):
        oocdl.from_torch(Neighbours(), torch.zeros(2, 20, 3), tmp_path / "net.onnx")


class Heads(nn.Module):
    """Two outputs in training mode, and the first one, times a factor, in evaluation mode."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.heads = factor, nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        outputs = [head(x) for head in self.heads]
        return outputs if self.training else self.factor * outputs[0]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_outputs_of_training_alone_are_no_difference(tmp_path: Path, factor: float) -> None:
    made = oocdl.from_torch(Heads(factor), torch.zeros(2, 4), tmp_path / "heads.onnx")
    assert any("its output output_0 is off" in note for note in made.notes) == (factor != 1)
    assert not any("tensors" in note for note in made.notes)
