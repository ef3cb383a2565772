"""``from_torch``: what it refuses by name, what it leaves alone, names and sizes of what it writes."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oocdl
from oocdl.errors import InputError, ModelWarning, UnsupportedError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.ops import RULES
from oocdl.pytorch import export as exporting
from oocdl.pytorch.comparison.file_pass import inference_pass
from oocdl.pytorch.door import OLDEST, Exported
from oocdl.pytorch.exporters import EXPORTERS, Call
from tests.kit.commands import python
from tests.kit.nets import write_data
from tests.kit.processes import ROOT
from tests.kit.torch_modules import Encoding, Head, Words, error, frozen, in_evaluation, running
from tests.kit.turns import some_of

IMAGE = torch.zeros(2, 2, 8, 8)


class Does(nn.Module):
    """A linear layer, and whatever a test does with its input and its result."""

    def __init__(self, what: Callable[[Does, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x, self.fc(x))


def without_gradient(self: Does, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = self.fc(x)
    return y * z


def counts(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.get_buffer("seen").add_(1)
    return y


def hooked(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: 2 * gradient)
    return y


class Twice(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))


def hooked_module(kind: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    if kind == "module":
        module[0].register_full_backward_hook(lambda part, given, made: None)
    else:
        module[0].weight.register_hook(lambda gradient: 2 * gradient)
    return module


def overlapping() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = nn.Parameter(module[0].weight.data)
    return module


def reached_through(way: str) -> nn.Module:
    """A module that reads its weights, and not by its attributes."""
    module = Does(lambda self, x, y: self.reach(x, y))
    fc, ref = module.fc, weakref.ref(module.fc)
    module.reach = {  # type: ignore[assignment]
        "closure": lambda x, y: y @ fc.weight,
        "weak": lambda x, y: y @ (ref() or fc).weight,
        "constant": lambda x, y: y + module.seen,
    }.get(way, lambda x, y: y)
    if way == "hook":
        fc.register_forward_hook(lambda part, given, made: made + fc.bias)
    elif way == "wrapped":
        forward = fc.forward
        fc.forward = lambda x: forward(x) * 0.5  # type: ignore[method-assign, assignment]
    return module


def kept_in_a_list(what: Callable[[nn.Linear], Tensor], read: bool = True) -> nn.Module:
    module = Does(lambda self, x, y: y @ self.kept[0] if read else y)
    module.kept = [what(module.fc)]  # type: ignore[assignment]
    return module


class Steps(Does):
    """A count that all modules of the class share."""

    count = 0


class Slotted:
    """A count that no dictionary holds."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Called:
    """A count that each call raises."""

    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def raise_class(held: None) -> int:
    Steps.count += 1
    return Steps.count


def raise_default(held: None, kept: dict[str, int] = {"n": 0}) -> int:  # noqa: B006
    kept["n"] += 1
    return kept["n"]


def raise_captured() -> Callable[[None], int]:
    count = 0

    def raised(held: None) -> int:
        nonlocal count
        count += 1
        return count

    return raised


def hooked_count() -> nn.Module:
    """A count that lives in the closure of a hook."""
    module, count = Does(lambda self, x, y: y), 0

    def hook(part: nn.Module, given: Any, made: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return made * 2 if count > 5 else made

    module.fc.register_forward_hook(hook)
    return module


class Lazy(nn.Module):
    """A parameter that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.ones(3))
        return x * self.gain


GLOBAL = {"n": 0}


def counts_globally(self: Does, x: Tensor, y: Tensor) -> Tensor:
    GLOBAL["n"] += 1
    return y * 2 if GLOBAL["n"] > 5 else y


def with_lock() -> nn.Module:
    module = Does(lambda self, x, y: y)
    module.lock = threading.Lock()  # type: ignore[assignment]
    return module


def with_buffer(held: Tensor) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3))
    module.register_buffer("held", held)
    return module


def scripted(make: Callable[..., Any], *given: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are on their way out of PyTorch
        return nn.Sequential(make(nn.Linear(3, 3), *given))


def later(held: Any, count: Callable[[Any], int], hidden: int = 0) -> Callable[[], nn.Module]:
    """A module that does something else after the fifth call; so many classes of its name are above it."""

    def make() -> nn.Module:
        module = Steps(lambda self, x, y: y * (2 if self.count_of(self.held) > 5 else 1))
        module.held, module.count_of = held, count
        for _ in range(hidden):
            module.__class__ = type("Steps", (type(module),), {})
        return module

    return make


def counts_in_a_tensor(self: Does, x: Tensor, y: Tensor) -> Tensor:
    self.step = getattr(self, "step", torch.zeros(())) + 1
    return y * (1 + (self.step > 5).to(y.dtype))


def counts_for_nobody(self: Does, x: Tensor, y: Tensor) -> Tensor:
    Steps.count += 1
    return y


def caches(self: Does, x: Tensor, y: Tensor) -> Tensor:
    if not hasattr(self, "kept"):
        self.kept = torch.linspace(0, 1, 6)
    return y + self.kept[: y.shape[1]]


DICE = np.random.default_rng(7)


class LookedUpAndIndexed(Words):
    """A padding row that gets a gradient after all, from elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(self.table.weight[x])


def in_half_of_the_modes() -> nn.Module:
    norm = nn.BatchNorm1d(3)

    def both(self: Does, x: Tensor, y: Tensor) -> Tensor:
        y = norm(y)
        assert norm.running_mean is not None
        return F.batch_norm(y, self.get_buffer("m"), self.get_buffer("v")) + F.batch_norm(
            y, self.get_buffer("m"), self.get_buffer("v"), training=True
        )

    module = Does(both)
    module.register_buffer("m", torch.zeros(3))
    module.register_buffer("v", torch.ones(3))
    return module


THREE = torch.ones(2, 3)
IDS = torch.tensor([[1, 0, 2]])
REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "autograd.Function": (lambda: Does(lambda s, x, y: Twice.apply(y)), THREE, "autograd.Function.*Twice"),
    "a hook on a tensor": (lambda: Does(hooked), THREE, "hook on the gradient of a tensor"),
    "a hook on a parameter": (lambda: hooked_module("p"), THREE, "hook on the gradient of '0.weight'"),
    "a backward hook": (lambda: hooked_module("module"), THREE, "backward hook of '0'"),
    "a buffer that changes": (lambda: Does(counts), THREE, "'seen' is changed"),
    "data in an if": (
        lambda: Does(lambda s, x, y: y if x.sum() > 0 else -y), THREE, "a number that depends on data"),
    "data in NumPy": (
        lambda: Does(lambda s, x, y: y * float(np.mean(x.numpy()))), THREE, "leave PyTorch .numpy."),
    "data in a list": (lambda: Does(lambda s, x, y: y * x.tolist()[0][0]), THREE, "leave PyTorch .tolist."),
    "spectral_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))), THREE,
        "is changed by the forward pass in '0.parametrizations.weight.0'.*; call eval"),
    "old weight_norm": (old_weight_norm, THREE, "'0.weight' is computed from other tensors"),
    "InstanceNorm with statistics": (
        lambda: Head(nn.InstanceNorm2d(4, track_running_stats=True)), IMAGE,
        "'norm.running_mean' is changed"),
    "a cumulative average": (
        lambda: Head(nn.BatchNorm2d(4, momentum=None)), IMAGE, "momentum=None of 'norm'"),
    "one norm in both modes": (in_half_of_the_modes, THREE, "a norm that runs in both modes"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)), IDS, "'0.weight' is changed"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(5, 3, sparse=True)), IDS, "scale_grad_by_freq or sparse"),
    "indexed, too": (lambda: LookedUpAndIndexed(0), IDS, "'table.weight' has a padding_idx, and is indexed"),
    "data in a count": (
        lambda: Does(lambda s, x, y: y if (x > 6).nonzero().shape[0] else -y), THREE,
        r"a shape that depends on data \(nonzero; .*in 'Does'"),
    "data in what a mask takes": (
        lambda: Does(lambda s, x, y: y if x[x > 6].numel() else -y), THREE, r"a shape .* \(index;"),
    "different numbers": (
        lambda: Does(lambda s, x, y: y * len(torch.unique(x > 6))), THREE, "a shape that depends on data"),
    "padding of a table that is computed": (
        lambda: Does(lambda s, x, y: y + F.embedding((x > 0).long(), 2 * s.fc.weight, padding_idx=0)[:, 0]),
        THREE, "padding_idx of a table that is computed"),
    "a class counts": (later(None, raise_class), THREE, "'Steps.count' is changed by the forward pass"),
    "a class counts behind others of its name": (
        lambda: later(None, raise_class, hidden=2)(), THREE, "'Steps.*count' is changed by the forward pass"),
    "a default counts": (later(None, raise_default), THREE, r"'count_of.__defaults__\[0\]\['n'\]' is"),
    "a closure counts": (later(None, raise_captured()), THREE, "'count_of.count' is changed by the forward"),
    "a hook counts": (hooked_count, THREE, "'fc._forward_hooks.*count' is changed by the forward pass"),
    "a global counts": (lambda: Does(counts_globally), THREE, r"'.*GLOBAL\['n'\]' is changed by the forward"),
    "a parameter made late": (Lazy, THREE, "its first call makes the parameter 'gain' .call it once before"),
    "a lock": (with_lock, THREE, "Does cannot be copied .TypeError.* make what cannot be copied .locks"),
    "a script": (lambda: scripted(torch.jit.script), THREE, "'0' is a script of torch.jit: give the module"),
    "a traced part": (lambda: scripted(torch.jit.trace, THREE), THREE, "'0' is a script of torch.jit"),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(3, 3)), THREE, "of DataParallel: give its .module"),
    "no numbers": (lambda: nn.Linear(3, 3, device="meta"), THREE, "'weight' is on the device meta"),
    "no shape": (lambda: nn.Sequential(nn.LazyLinear(3)), THREE, "'0.weight' has no shape yet: call the"),
    "sparse numbers": (lambda: with_buffer(torch.eye(3).to_sparse()), THREE, "'held' is sparse: make it"),
    "complex numbers": (lambda: with_buffer(torch.ones(3) * 1j), THREE, "'held' holds complex numbers: hold"),
    "an iterator counts": (later(itertools.count(), next), THREE, "'held' is changed by the forward pass"),
    "slots count": (later(Slotted(), lambda held: held()), THREE, "'held.n' is changed by the forward pass"),
    "a callable counts": (later(Called(), lambda held: held()), THREE, "'held.n' is changed by the forward"),
    "a queue grows": (
        later(deque(maxlen=9), lambda held: held.append(1) or len(held)), THREE, "'held' is changed"),
    "a tensor counts": (
        lambda: Does(counts_in_a_tensor), THREE, "what an earlier call has computed is read in 'Does'"),
    "another generator": (
        later(None, lambda held: 9 if DICE.random() < 1e-9 else 0), THREE,
        r"a Generator of NumPy's is drawn from in 'Steps' \(test_from_torch"),
    "a closure": (lambda: reached_through("closure"), THREE, r"'fc.weight' is read through a closure"),
    "a weak reference": (lambda: reached_through("weak"), THREE, "'fc.weight' is .* or a weak reference"),
    "a forward hook": (lambda: reached_through("hook"), THREE, "'fc.bias' is read through .* a hook"),
    "a wrapped forward": (lambda: reached_through("wrapped"), THREE, "'fc.weight' is read through a closure"),
    "memory of a weight": (
        lambda: kept_in_a_list(lambda fc: fc.weight[:].detach()), THREE,
        r"'kept\[0\]' and 'fc.weight' are two tensors in the same memory .use one"),
    "one memory": (overlapping, THREE, "'0.weight' and '1.weight' are two tensors in the same memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_cannot_carry_is_refused(
    case: str, tmp_path: Path, capfd: Any, request: pytest.FixtureRequest
) -> None:
    if case == "another generator":  # it is found among all that importing this file has made
        request.getfixturevalue("thaws")
    make, example, message = REFUSED[case]
    with pytest.raises(UnsupportedError, match=message) as caught:
        oocdl.from_torch(make(), example, tmp_path / "net.onnx")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


UNHARMED: dict[str, Callable[[], nn.Module]] = {
    "memory of a weight that nothing reads": lambda: kept_in_a_list(
        lambda fc: fc.weight.detach(), read=False
    ),
    "a mask in a buffer": lambda: Does(lambda s, x, y: y[:, s.seen == 0]),
    "padding of a constant table": lambda: Does(
        lambda s, x, y: y + F.embedding((x > 0).long(), 2 * s.seen[:, None], padding_idx=0)[..., 0]
    ),
    "a class counts for nobody": lambda: Steps(counts_for_nobody),
    "a cache that is sliced": lambda: Does(caches),
    "a gradient that is cut and not used": lambda: Does(
        lambda s, x, y: (setattr(s, "last", y.detach() * 2), y)[1]
    ),
    "a weight in a list": lambda: kept_in_a_list(lambda fc: fc.weight),
    "a constant through a closure": lambda: reached_through("constant"),
}


@pytest.mark.parametrize("case", UNHARMED)
def test_what_looks_like_a_loss_and_is_none_is_written(case: str, tmp_path: Path) -> None:
    module = UNHARMED[case]()
    before = {*vars(module)}
    oocdl.from_torch(module, THREE, tmp_path / "net.onnx")
    assert vars(module).keys() == before


CUTS: dict[str, Callable[[Does, Tensor, Tensor], Tensor]] = {
    "detach": lambda s, x, y: y + torch.detach(y),
    "data": lambda s, x, y: F.linear(y, s.fc.weight.data),
    "no_grad": without_gradient,
    "straight through": lambda s, x, y: (y.round() - y).detach() + y,
    "distance": lambda s, x, y: F.pairwise_distance(y, y.detach() + 1e-3 * x),
}


@pytest.mark.parametrize("case", CUTS)
def test_a_gradient_that_is_cut_is_cut_in_the_file(case: str, tmp_path: Path) -> None:
    module, path = Does(CUTS[case]), tmp_path / "net.onnx"
    with torch.no_grad():  # that of the caller cuts nothing
        assert oocdl.from_torch(module, THREE, path).exporter == "TorchScript"
        wanted = module(THREE)
    [found] = onnxruntime.InferenceSession(path).run(None, {"x": THREE.numpy()})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(UnsupportedError, match=r"cut by .* in '\w+' \(.*: leave out verify=False"):
        oocdl.from_torch(module, THREE, path, verify=False)


def test_a_place_is_in_the_code_of_the_module(tmp_path: Path) -> None:
    discriminator = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedError, match=r"is changed by the forward pass in '[\w.]+'(;|$)"):
        oocdl.from_torch(discriminator, THREE, tmp_path / "net.onnx")
    discriminator[0].parametrizations.weight.eval()  # the way out
    oocdl.from_torch(discriminator, THREE, tmp_path / "net.onnx")


def test_an_exporter_that_does_not_see_cuts_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {"dynamo": EXPORTERS["dynamo"]})
    with pytest.raises(UnsupportedError, match="dynamo: it does not see that the gradient is cut by detach"):
        oocdl.from_torch(Does(CUTS["detach"]), THREE, tmp_path / "net.onnx")


def test_dropout_inside_attention_is_there(tmp_path: Path) -> None:
    """Exporters write it, without saying that it is active, which a module in training mode is."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = inspect_onnx(oocdl.from_torch(layer, torch.zeros(2, 5, 8), tmp_path / "net.onnx"))
    ops = [node.op for node in model.bind(RULES, {"src": (2, 5, 8)}).graph.nodes]
    assert ops.count("Dropout") == 4


CARELESS: dict[str, tuple[nn.Module, str]] = {
    "a norm": (Head(nn.BatchNorm2d(4)), "the exporter has folded 'conv.(weight|bias)' away and"),
    "a dropout": (
        Head(nn.Dropout(0.5)),
        r"the module draws random numbers \(bernoulli_\) of shape .*, its file nothing more",
    ),
}


@pytest.mark.parametrize("lost", CARELESS)
def test_an_exporter_that_loses_something_is_not_believed(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(module: nn.Module, call: Call, path: Path) -> None:
        torch.onnx.export(module.eval(), call.args, str(path), dynamo=False, input_names=["x"])

    module, message = CARELESS[lost]
    monkeypatch.setattr(exporting, "EXPORTERS", {"careless": careless})
    with pytest.raises(UnsupportedError, match=f"Head cannot be written as ONNX. careless: {message}"):
        oocdl.from_torch(module, IMAGE, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def bernoulli(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return x + y.new_empty((y.shape[0], 1)).bernoulli_(0.25).div_(0.25) * y if self.training else x + y


def connected(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return x + y / 0.25 * torch.floor(0.25 + torch.rand(y.shape[0], 1, dtype=y.dtype))


@pytest.mark.parametrize("kind", [bernoulli, connected])
def test_stochastic_depth_keeps_a_branch_of_some_samples(
    kind: Callable[[Does, Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """As torchvision and timm write it, and as MONAI does, of which predictions draw too."""
    torch.manual_seed(0)
    module, x = Does(kind), torch.randn(64, 3)
    branch = 4 * module.fc(x).detach()
    lost = ((x + branch).square().sum(1) - x.square().sum(1)) / (3 * 64)
    data = write_data(tmp_path / "data.zarr", {"x": x.numpy(), "y": np.zeros((64, 3), "f4")})
    options = {"inputs": {"x": "x"}, "loss": "mse", "lr": 1e-12, "batch_size": 64, "shuffle": False}
    options |= {"steps": 4, "progress": False}
    found = [
        [row["loss"] for row in oocdl.fit(module, data, workdir=tmp_path / f"{cut}.run",
                                          parallel={"batch": cut}, **options).history]
        for cut in (1, 4)
    ]  # fmt: skip
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert len(set(found[0])) == 4
    for loss in found[0]:  # what is above the loss without the branch is that of some samples' branches
        above = loss - float(x.square().mean())
        assert float(lost.clamp(max=0).sum()) < above < float(lost.clamp(min=0).sum())
    run = oocdl.open(tmp_path / "1.run")
    if kind is connected:
        with pytest.warns(ModelWarning, match="draws random numbers in predictions"):
            run.predict(data, tmp_path / "out.zarr")
        return
    made = np.asarray(run.predict(data, tmp_path / "out.zarr")["output"])
    np.testing.assert_allclose(made, (x + branch / 4).numpy(), rtol=1e-5, atol=1e-6)


def test_random_numbers_that_no_file_can_leave_out_of_predictions(tmp_path: Path) -> None:
    for module in (Head(nn.AlphaDropout(0.5)), Head(nn.FeatureAlphaDropout(0.5))):
        with pytest.raises(UnsupportedError, match="alpha_dropout in 'norm'"):
            oocdl.from_torch(module, IMAGE, tmp_path / "net.onnx")
    oocdl.from_torch(Does(noisy), THREE, tmp_path / "net.onnx")
    oocdl.from_torch(Head(nn.Dropout2d(0.5)), IMAGE, tmp_path / "net.onnx")


def drawn(self: Does, x: Tensor, y: Tensor) -> Tensor:
    y = F.gumbel_softmax(y, tau=0.5, hard=True, dim=1) * 10
    return y + torch.empty_like(y).uniform_(2, to=3) + torch.empty_like(y).exponential_(lambd=1e3)


def test_numbers_that_are_drawn_in_place(tmp_path: Path) -> None:
    module, x = Does(drawn), np.zeros((4000, 3), "f4")
    data = write_data(tmp_path / "data.zarr", {"x": x, "y": x})
    options = {"inputs": {"x": "x"}, "loss": "mse", "batch_size": 4000, "steps": 1, "progress": False}
    run = oocdl.fit(module, data, workdir=tmp_path / "run", **options)
    with pytest.warns(ModelWarning, match="draws random numbers in predictions"):
        made = np.asarray(run.predict(data, tmp_path / "out.zarr", batch_size=4000)["output"])
    chosen = made > 10
    assert (chosen.sum(1) == 1).all() and chosen.any(0).all()
    rest = made - 10 * chosen
    assert rest.min() >= 2 and rest.mean() == pytest.approx(2.501, abs=0.02) and rest.std() < 0.3
    assert run.history[0]["loss"] == pytest.approx(np.square(made).mean(), rel=0.02)


def noisy(self: Does, x: Tensor, y: Tensor) -> Tensor:
    return y + torch.randn_like(y)


def test_an_operator_that_is_not_there_is_named_once_for_each_exporter(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"TorchScript: .*Det.* \| dynamo: .*Det"):
        oocdl.from_torch(Does(with_determinant), torch.ones(3, 3), tmp_path / "net.onnx")


def with_determinant(self: Does, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = y * torch.linalg.det(y)
    return made


def state_of(module: nn.Module) -> list[Any]:
    tensors = [
        (n, t.requires_grad, t._version, t.clone()) for n, t in module.state_dict(keep_vars=True).items()
    ]
    return [[part.training for part in module.modules()], tensors]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_module_stays_as_it_was(exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(Head(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Dropout(0.5))))
    in_evaluation(frozen(running(module), "0.conv"), "0.norm.1")
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    before = state_of(module)
    dice = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    made = oocdl.from_torch(module, IMAGE, tmp_path / "net.onnx")
    assert made == Exported(tmp_path / "net.onnx", exporter)
    after = state_of(module)
    assert before[0] == after[0]
    for (name, *facts, old), (_, *now, new) in zip(before[1], after[1], strict=True):
        assert facts == now and torch.equal(old, new), name
    assert torch.equal(dice[0], torch.get_rng_state()) and dice[2] == random.getstate()
    assert dice[1] == np.random.get_state()[1].tolist()  # type: ignore[index]
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    check_file(tmp_path / "net.onnx", module, exporter)


def check_file(path: Path, module: nn.Module, exporter: str) -> None:
    """True contents by PyTorch's names, and the facts."""
    model = inspect_onnx(path)
    assert model.metadata is not None and model.metadata.exporter == exporter
    state = module.state_dict()
    for name, fact in model.metadata.facts.items():
        assert fact.names == (name,) and np.array_equal(model.initializers[name].raw(), state[name].numpy())
    kinds = {name: fact.kind for name, fact in model.metadata.facts.items()}
    assert kinds["0.norm.0.running_mean"] == "statistic" and kinds["0.norm.1.running_mean"] == "buffer"
    trained = {name for name, fact in model.metadata.facts.items() if fact.requires_grad}
    assert trained == {name for name, p in module.named_parameters() if p.requires_grad}
    assert {n: (c.start, c.per_pass) for n, c in model.metadata.counters.items()} == {
        "0.norm.0.num_batches_tracked": (5, 1)
    }
    found = model.bind(RULES, {"input": (3, 2, 8, 8)})
    assert found.frozen == ("0.conv.weight", "0.conv.bias")
    assert sum(node.op == "Dropout" for node in found.graph.nodes) == 1
    onnx.checker.check_model(str(path))


def test_equal_tensors_stay_apart_and_ties_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    module[1].bias.data.zero_()
    for name in EXPORTERS:
        monkeypatch.setattr(exporting, "EXPORTERS", {name: EXPORTERS[name]})
        made = oocdl.from_torch(module, torch.zeros(2, 8), tmp_path / f"{name}.onnx")
        known = inspect_onnx(made.path).metadata
        assert known is not None and set(known.facts) == set(module.state_dict())
        assert made.notes[0].startswith("the module is in evaluation mode")
        tied = oocdl.from_torch(Words(None, tied=True), IDS, tmp_path / f"{name}-tied.onnx")
        known = inspect_onnx(tied.path).metadata
        assert known is not None and known.initializer_of("head.weight") == "table.weight"


NUMBERS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "divided": (lambda: torch.tensor(1.0) / 3, "the code rounds to float32 in"),
    "filled": (lambda: torch.full((1,), 0.1), "the code rounds to float32 in"),
    "both": (lambda: 0.1 + torch.tensor(0.1), "the number 0.1 and its float32 rounding in a tensor"),
    "written out": (lambda: torch.tensor(0.1), None),
    "Python's": (lambda: 0.1, None),
}


@pytest.mark.parametrize(("name", "exporter"), some_of(NUMBERS, EXPORTERS))
def test_numbers_that_float64_does_not_have_are_told(
    name: str, exporter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, note = NUMBERS[name]
    monkeypatch.setattr(exporting, "EXPORTERS", {exporter: EXPORTERS[exporter]})
    for dtype in (torch.float64, torch.float32):
        module, x = Does(lambda self, x, y: y * number()).to(dtype), torch.ones(2, 3, dtype=dtype)
        notes = oocdl.from_torch(module, x, tmp_path / "net.onnx").notes
        if note is None or dtype == torch.float32:
            assert not notes
        else:
            assert note in " ".join(notes)


def test_axes_that_are_left_open(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1))
    made = oocdl.from_torch(net, torch.zeros(1, 1, 6, 6), tmp_path / "net.onnx", dynamic=(0, 2, 3))
    model = inspect_onnx(made)
    assert [isinstance(dim, str) for dim in model.inputs[0].dims] == [True, False, True, True]
    found = model.bind(RULES, {"input": (3, 1, 10, 8)})
    assert found.graph.values[dict(found.outputs)["output"]].shape == (3, 1, 10, 8)


class Two(nn.Module):
    """Two inputs, of which one may be left out; three forms of results."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.fc, self.form = nn.Linear(3, 2), form

    def forward(self, image: Tensor, age: Tensor, scale: Tensor | None = None) -> Any:
        y = self.fc(image) * age
        y = y if scale is None else y * scale
        return {"a": y, "image": y + 1} if self.form == "dict" else (y, y + 1) if self.form == "tuple" else y


def test_names_of_inputs_and_outputs(tmp_path: Path) -> None:
    age = torch.ones(2, 1)

    def ports(form: str, example: Any, **options: Any) -> tuple[list[str], list[str]]:
        model = inspect_onnx(oocdl.from_torch(Two(form), example, tmp_path / "net.onnx", **options))
        return [port.name for port in model.inputs], [port.name for port in model.outputs]

    assert ports("one", (THREE, age)) == (["image", "age"], ["output"])
    named = {"image": THREE, "age": age, "scale": age}
    assert ports("tuple", named) == (["image", "age", "scale"], ["output_0", "output_1"])
    assert ports("dict", {"image": THREE, "age": age})[1] == ["a", "image_out"]
    assert ports("tuple", [THREE, age], outputs=["left", "right"])[1] == ["left", "right"]


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        (torch.zeros(2, 4), {}, "Linear cannot be called with .2, 4. of torch.float32: .*mat1 and mat2"),
        ((), {}, "example_inputs is empty"),
        ((THREE.numpy(),), {}, "the example of input 'input' is ndarray"),
        (THREE, {"outputs": ["a", "b"]}, "outputs names a, b; the module returns 1"),
    ],
)
def test_bad_inputs(example: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        oocdl.from_torch(nn.Linear(3, 2), example, tmp_path / "net.onnx", **options)


def test_bad_modules_and_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"takes a torch.nn.Module, got str"):
        oocdl.from_torch("net.onnx", THREE, tmp_path / "net.onnx")
    with pytest.raises(InputError, match="there is no folder"):
        oocdl.from_torch(nn.Linear(3, 3), THREE, tmp_path / "no" / "net.onnx")
    with pytest.raises(InputError, match="returns no tensor"):
        oocdl.from_torch(Does(lambda s, x, y: 3), THREE, tmp_path / "net.onnx")


WITHOUT = """
import sys, importlib.abc
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch": raise ModuleNotFoundError(name)
sys.modules.pop("torch", None)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else real(name, package)
sys.meta_path.insert(0, Gone())
import oocdl
assert "torch" not in sys.modules
try:
    oocdl.from_torch(object(), (), "net.onnx")
except oocdl.errors.InputError as error:
    print(error)
"""


def test_without_pytorch() -> None:
    done = python("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "this needs PyTorch: pip install 'oocdl[torch]'"


def test_a_pytorch_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What oocdl asks of PyTorch's internals is not in releases before, which pip may have left in place."""
    asked = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "torch>=" in line]
    assert asked and all(f'torch>={".".join(map(str, OLDEST))}"' in line for line in asked)
    monkeypatch.setattr("oocdl.pytorch.door.installed_version", lambda package: "2.8.1+cpu")
    refusal = r"this needs PyTorch 2\.9 or newer, not 2\.8\.1\+cpu: pip install 'torch>=2\.9'$"
    arrays = {"image": np.zeros((2, 3), "float32"), "label": np.zeros((2, 2), "float32")}
    data = write_data(tmp_path / "data.zarr", arrays)
    with pytest.raises(InputError, match=refusal):
        oocdl.fit(nn.Linear(3, 2), data, workdir=tmp_path / "run", loss="mse", memory="1GiB")
    with pytest.raises(InputError, match=refusal):
        oocdl.from_torch(nn.Linear(3, 2), torch.zeros(2, 3), tmp_path / "net.onnx")


def test_both_exporters_write_the_same_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them could not write, the other would: the facts are equal."""
    found = []
    module = Encoding()
    for name in EXPORTERS:
        monkeypatch.setattr(exporting, "EXPORTERS", {name: EXPORTERS[name]})
        path = oocdl.from_torch(copy.deepcopy(module), torch.zeros(2, 5, 8), tmp_path / f"{name}.onnx")
        known = inspect_onnx(path).metadata
        assert known is not None
        found.append(known.facts)
    assert found[0] == found[1] and found[0]["pe"].kind == "buffer"


class OfWhole(nn.Module):
    """A linear layer of what each of some functions makes of whole numbers."""

    def __init__(self, *calcs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.calcs = nn.Linear(3, 3), calcs

    def forward(self, x: Tensor) -> Any:
        return tuple(self.fc(calc(x).double()) for calc in self.calcs)


def results_of(file: Exported, x: Tensor, precision: str) -> list[Tensor]:
    """What a file computes with the weights that it holds."""
    model = inspect_onnx(file)
    made = inference_pass(model, {"x": (2, 3)}, precision)
    held = {title: torch.as_tensor(item.raw()) for title, item in model.initializers.items()}
    return list(made.run(held, {"x": x}, {}).values())


WHOLE: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x // 3,
    lambda x: torch.fmod(x, 5),
    lambda x: x >> 1,
)
"""Exporters write what is so for 0 and 1; each is as in PyTorch, or refused."""
OF_BYTES: dict[str, Callable[[Tensor], Tensor]] = {
    "a byte that wraps around": lambda x: x * 2,
    "a byte as a float": lambda x: x.double() * 2,
}
OF_LONG: dict[str, Callable[[Tensor], Tensor]] = {
    "cast to a byte": lambda x: (3 * x).to(torch.uint8),
    "a float cast to a byte": lambda x: (3.3 * x.double()).to(torch.uint8),
    "a float cast to int16": lambda x: (3e7 * x.double()).to(torch.int16),
    "a float cast to int32": lambda x: (3e7 * x.double()).to(torch.int32) * 1e-9,
    "bytes added": lambda x: x.to(torch.uint8) + x.flip(1).to(torch.uint8),
    "bytes and int8": lambda x: x.to(torch.uint8) * x.to(torch.int8),
    "running sums of int8": lambda x: x.to(torch.int8).cumsum(1),
    "running sums of flags": lambda x: (x > 0).cumsum(1),
    "more than 2^53": lambda x: (x * 3037000499 * 3037000499) % 1000,
}
ROWS = torch.arange(64.0)[:, None] ** 2
LOOKED_UP: dict[str, Callable[[Tensor], Tensor]] = {
    "sevens": lambda x: F.embedding(x // 7 + 16, ROWS)[..., 0],
    "eights, by bits": lambda x: F.embedding((x >> 3) + 16, ROWS)[..., 0],
    "one of a hundred": lambda x: F.embedding(-100 // (x.abs() + 5) + 24, ROWS)[..., 0],
    "sevens, by name": lambda x: F.embedding(torch.floor_divide(x, 7).floor_divide(2) + 16, ROWS)[..., 0],
}
"""Rounded down, and rows of a table: exporters round to 0."""


@pytest.mark.parametrize("calcs", [*({"?": calc} for calc in WHOLE), OF_BYTES, OF_LONG, LOOKED_UP], ids=len)
def test_whole_numbers_that_are_negative_or_large(
    calcs: dict[str, Callable[[Tensor], Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "EXPORTERS", {"TorchScript": EXPORTERS["TorchScript"]})
    module, dtype = OfWhole(*calcs.values()).double(), torch.uint8 if calcs is OF_BYTES else torch.int64
    x = torch.arange(-9 if dtype == torch.int64 else 120, 200, 11)[:6].reshape(2, 3)
    try:
        file = oocdl.from_torch(module, x.to(dtype), tmp_path / "net.onnx")
    except UnsupportedError as why:
        assert "cannot be written as ONNX" in str(why) and "?" in calcs
        return
    with torch.no_grad():
        for name, y, wanted in zip(calcs, results_of(file, x, "float64"), module(x.to(dtype)), strict=True):
            assert error(y, wanted) <= 1e-7, name


LOST: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "softplus with a threshold": (lambda x: F.softplus(x, 2.0, 5.0), 3.0),
    "cross entropy of large logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none"),
        -18.0,
    ),
    "cross entropy with weights": (
        lambda x: F.binary_cross_entropy_with_logits(
            x, torch.full_like(x, 0.3), torch.tensor(0.5), pos_weight=torch.tensor(3.0)
        ),
        18.0,
    ),
    "logsigmoid of a small number": (F.logsigmoid, -120.0),
    "logaddexp of large numbers": (lambda x: torch.logaddexp(x, x / 2), 300.0),
    "logaddexp, called by a tensor": (lambda x: x.logaddexp(x / 2), 300.0),
    "logaddexp2 of large numbers": (lambda x: torch.logaddexp2(x, x / 2), 300.0),
    "cross entropy of nothing": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3), reduction="none"),
        -110.0,
    ),
    "cross entropy of certainty": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3), torch.tensor(0.5)),
        110.0,
    ),
    "log1p of a small number": (lambda x: torch.log1p(1e-6 * x), 2.0),
    "lgamma of large numbers": (torch.lgamma, 1e9),
    "lgamma of negative numbers": (torch.lgamma, -0.75),
    "digamma of negative numbers": (torch.digamma, -0.75),
    "expm1 of a small number": (lambda x: (1e-6 * x).expm1(), 2.0),
}


LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": lambda y: F.rms_norm(y, (3,)),
    "the next number": lambda y: y / (y.abs() + torch.finfo(y.dtype).eps),
    "the least number": lambda y: y / torch.finfo().tiny * torch.finfo(y.dtype).tiny,
}


@pytest.mark.parametrize(("precision", "most"), [("float32", 1e-5), ("float64", 1e-9)])
def test_limits_of_numbers_are_those_of_the_own_type(precision: str, most: float, tmp_path: Path) -> None:
    dtype = getattr(torch, precision)
    module = Does(lambda self, x, y: tuple(calc(y * 1e-6) for calc in LIMITS.values())).to(dtype)
    file = oocdl.from_torch(module, THREE.to(dtype), tmp_path / "net.onnx")
    x = torch.tensor([[-0.5, 0.0, 0.5], [0.1, 0.2, 0.3]], dtype=dtype)
    with torch.no_grad():
        for name, y, wanted in zip(LIMITS, results_of(file, x, precision), module(x), strict=True):
            assert error(y, wanted) <= most, name


def test_what_exporters_write_without_its_digits(tmp_path: Path) -> None:
    module = Does(lambda self, x, y: tuple(calc(x + at + 0 * y) for calc, at in LOST.values()))
    file = oocdl.from_torch(module, torch.zeros(2, 3), tmp_path / "net.onnx")
    x = torch.tensor([[-0.5, 0.0, 0.5], [0.1, 0.2, 0.3]])
    with torch.no_grad():
        for name, y, wanted in zip(LOST, results_of(file, x, "float32"), module(x), strict=True):
            assert bool(((y - wanted).abs() <= 1e-5 * wanted.abs()).all()), name
