"""What of a plain file is trained: exactly what PyTorch trains, or it is said before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from oocdl.errors import ModelError
from oocdl.graph.onnx.metadata import Fact, Metadata, write_metadata
from oocdl.graph.onnx.reader import Imported, inspect_onnx
from oocdl.graph.onnx.trained import Part
from oocdl.ops.registry import RULES
from oocdl.report.trained_view import UNSAID, trained_text
from tests.kit.models import GPT, ResNet, UNet3d, export
from tests.kit.nets import save
from tests.kit.onnx_kit import F
from tests.kit.plain_files import MODULES, WAYS, export_as, far, losses_of_file, losses_of_module
from tests.kit.turns import some_of

EXACT = 1e-5
"""Numbers of the code, such as an epsilon, are float32 in a file."""
SAID: dict[str, dict[str, str]] = {
    # module -> way -> a word of the remark, where the file trains another network, or may
    "buffer": {"torchscript": "may be a buffer"},
    "odd-buffer": {"torchscript": "may be a buffer"},
    "frozen-norm": {"torchscript": "may be buffers", "dynamo": "computed by the exporter"},
    "norms": {"dynamo": "BatchNormalization folded in"},
    "norm-asleep": {"dynamo": "BatchNormalization folded in"},
    "norms-asleep": {way: "in evaluation mode" for way in WAYS} | {"dynamo": "BatchNormalization folded in"},
    "equal-norms": {"dynamo": "merge tensors"},
    "zero-biases": {"dynamo": "drops biases"},
    "zero-convolution": {"dynamo": "drops biases"},
    "copied-layers": {"dynamo": "merge tensors"},
    "gpt-tied": {"dynamo": "was tied to another weight"},
    "unet": {"dynamo": "merge tensors"},
}
UNSAID_FREEZES: dict[str, tuple[str, ...] | None] = {
    # what no file holds: the user says it by ``freeze``; None: nothing of ours does the same
    "requires-grad": ("0.*",),
    "detach": ("a.*",),
    "padding": None,
}
Read = Callable[..., tuple[Imported, list[float], list[float]]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A module's file as it is read, and the losses of both."""
    folder, files = tmp_path_factory.mktemp("plain"), dict[tuple[str, str], tuple[Path, list[float]]]()

    def call(name: str, way: str, *freeze: str) -> tuple[Imported, list[float], list[float]]:
        make, example = MODULES[name]
        torch.manual_seed(0)
        module, x = make(), [example()]
        if (name, way) not in files:
            path = export_as(module, x, folder / f"{name}-{way}.onnx", way)
            files[name, way] = path, losses_of_module(module, x)
        path, wanted = files[name, way]
        imported = inspect_onnx(path).bind(RULES, precision="float64", freeze=freeze)
        return imported, losses_of_file(imported, x), wanted

    return call


@pytest.mark.parametrize(
    ("name", "way"), some_of([name for name in MODULES if name not in UNSAID_FREEZES], WAYS)
)
def test_a_plain_file_trains_the_module_or_says_that_it_may_not(name: str, way: str, read: Read) -> None:
    imported, found, wanted = read(name, way)
    remarks = imported.trained.remarks
    word = SAID.get(name, {}).get(way)
    if word is None:
        assert remarks == ()
        assert far(found, wanted) < EXACT
    else:
        assert any(word in remark.text for remark in remarks), remarks
        assert all("oocdl.from_torch(module, example, path)" in remark.cure for remark in remarks)
        assert far(found, wanted) > EXACT, "there was nothing to say"


@pytest.mark.parametrize("name", UNSAID_FREEZES)
def test_what_no_file_holds_is_the_users_to_say(name: str, read: Read) -> None:
    imported, found, wanted = read(name, "torchscript")
    assert far(found, wanted) > EXACT and imported.trained.remarks == ()
    assert UNSAID in trained_text(imported.trained)
    freeze = UNSAID_FREEZES[name]
    if freeze is not None:
        imported, found, wanted = read(name, "torchscript", *freeze)
        assert far(found, wanted) < EXACT
        assert f"frozen: 2 tensors, 72 parameters (freeze pattern '{freeze[0]}' × 2)" in trained_text(
            imported.trained
        )


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("buffer", ("pe",)),
        ("odd-buffer", ("offset",)),
        ("frozen-norm", ("1.*",)),
        ("norms-asleep", ("*running_mean", "*running_var")),
    ],
)
def test_the_cure_cures(name: str, freeze: tuple[str, ...], read: Read) -> None:
    imported, _, _ = read(name, "torchscript")
    (remark,) = imported.trained.remarks
    assert remark.cure.startswith(f"freeze={list(freeze)} ")
    imported, found, wanted = read(name, "torchscript", *freeze)
    assert imported.trained.remarks == () and far(found, wanted) < EXACT


@pytest.mark.parametrize("way", ["torchscript", "plain"])
def test_a_norm_in_evaluation_mode_beside_others_stays_so(way: str, read: Read) -> None:
    trained = read("norm-asleep", way)[0].trained
    asleep = "its norm is in evaluation mode in the file"
    assert {record.name: record.why for record in trained.of(Part.FROZEN)} == {
        "1.running_mean": asleep,
        "1.running_var": asleep,
    }
    assert [record.name for record in trained.of(Part.STATISTICS)] == ["4.running_mean", "4.running_var"]


def test_the_record_says_what_each_tensor_is_for(read: Read) -> None:
    trained = read("buffer", "plain")[0].trained
    assert trained.count(Part.TRAINED) == (4, 99)
    (buffer,) = trained.of(Part.CONSTANT)
    assert (buffer.name, buffer.shape, buffer.why) == ("pe", (8,), "buffer, as the exporter says")
    (tied,) = read("gpt-tied", "torchscript")[0].trained.tied
    assert tied.name == "wte.weight" and tied.modules == ("wte", "head")
    assert "tied: 'wte.weight' is one tensor of 'wte', 'head'" in trained_text(
        read("gpt-tied", "torchscript")[0].trained
    )


def test_a_file_that_says_itself_what_is_trained_gets_no_remarks(tmp_path: Path) -> None:
    make, example = MODULES["frozen-norm"]
    path = export_as(make(), [example()], tmp_path / "plain.onnx", "torchscript")
    kinds = {"0": "parameter", "1": "buffer", "3": "parameter"}
    facts = {
        name: Fact(kind=kinds[name[0]], names=(name,), requires_grad=name[0] == "3")
        for name in inspect_onnx(path).initializers
    }
    model = onnx.load(path)
    write_metadata(model, Metadata(module="Sequential", exporter="torchscript", facts=facts))
    onnx.save(model, tmp_path / "told.onnx")
    trained = inspect_onnx(tmp_path / "told.onnx").bind(RULES).trained
    assert trained.remarks == ()
    assert trained_text(trained).splitlines() == [
        "trained: 2 tensors, 15 parameters (parameter, as the file says × 2)",
        "frozen: 2 tensors, 40 parameters (requires_grad=False, as the file says × 2)",
        "constant: 4 tensors (buffer, as the file says × 4)",
    ]


def test_strict_lists_all_remarks(read: Read) -> None:
    trained = read("copied-layers", "dynamo")[0].trained
    assert len(trained.remarks) == 2
    with pytest.raises(ModelError, match=r"for 2 remarks .* \(1\) .*merge tensors.*; \(2\) .*drops biases"):
        trained.refuse()
    read("unet", "torchscript")[0].trained.refuse()  # nothing to refuse


@pytest.mark.parametrize("family", ["unet", "unet-batch", "unet-group", "resnet", "gpt", "gpt-tied"])
def test_healthy_files_are_left_alone(family: str, tmp_path: Path) -> None:
    make = {
        "unet": lambda: UNet3d(base=2, depth=1),
        "unet-batch": lambda: UNet3d(base=2, depth=1, norm="batch", down="stride", up="trilinear"),
        "unet-group": lambda: UNet3d(base=2, depth=1, norm="group", up="nearest"),
        "resnet": ResNet,
        "gpt": GPT,
        "gpt-tied": lambda: GPT(tied=True, gelu="tanh"),
    }[family]
    x = {"r": torch.randn(2, 3, 16, 16), "g": torch.randint(0, 50, (2, 12))}.get(
        family[0], torch.randn(1, 1, 8, 8, 8)
    )
    path = export(make(), (x,), tmp_path / "m.onnx")
    assert inspect_onnx(path).bind(RULES).trained.remarks == ()


def test_a_gap_in_a_row_of_biases_of_an_unknown_exporter(tmp_path: Path) -> None:
    def layers(*with_bias: int) -> Imported:
        nodes, weights, x = [], {}, "x"
        for n in range(4):
            names = [x, f"blocks.{n}.weight"] + ([f"blocks.{n}.bias"] if n in with_bias else [])
            x = "y" if n == 3 else f"a{n}"
            nodes.append(helper.make_node("Gemm", names, [x], f"n{n}"))
            weights |= {name: np.ones((3, 3) if name.endswith("weight") else 3, F) for name in names[1:]}
        path = save(tmp_path / "m.onnx", nodes, weights, ["batch", 3], {"y": ["batch", 3]})
        return inspect_onnx(path).bind(RULES, {"x": (2, 3)})

    (remark,) = layers(0, 2, 3).trained.remarks
    assert remark.text.startswith("1 bias is missing in a row of numbered ones ('blocks.1.bias')")
    assert layers(0, 1, 2).trained.remarks == ()  # a last layer without a bias is common
    assert layers(0, 1, 2, 3).trained.remarks == ()


def added(path: Path, name: str, producer: str) -> Imported:
    """x + name, of an exporter."""
    node = helper.make_node("Add", ["x", name], ["y"], "add")
    model = onnx.load(save(path, [node], {name: np.arange(3, dtype=F)}, ["b", 3], {"y": ["b", 3]}))
    model.producer_name = producer
    onnx.save(model, path)
    return inspect_onnx(path).bind(RULES, {"x": (2, 3)})


@pytest.mark.parametrize(
    ("name", "of_torch", "of_others"),
    [
        *(
            (name, True, True)
            for name in ("pe", "m.pos_embed", "position_table", "m.running_mean", "attn_mask")
        ),
        *((name, True, False) for name in ("m.mean", "blur.kernel", "anything")),
        *(
            (name, False, False)
            for name in (
                "m.weight",
                "m.in_proj_bias",
                "m.gamma",
                "cls_token",
                "m.weight_g",
                "logit_scale",
                "w",
            )
        ),
    ],
)
def test_names_of_buffers(name: str, of_torch: bool, of_others: bool, tmp_path: Path) -> None:
    for producer, wanted in (("pytorch", of_torch), ("", of_others)):
        remarks = added(tmp_path / "m.onnx", name, producer).trained.remarks
        assert any("may be a buffer" in remark.text for remark in remarks) == wanted


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    name = "pe\x1b[31m\nall is well"
    text = trained_text(added(tmp_path / "m.onnx", f"m.{name}", "pytorch").trained)
    assert "m.pe\\x1b[31m\\nall is well" in text and "\x1b" not in text
    assert "all is well" not in [line.strip() for line in text.splitlines()]
