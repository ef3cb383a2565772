"""A module trained by ``fit(module)`` beside PyTorch: equal, or refused by a typed error; nothing else."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import oocdl
from oocdl.errors import InputError
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.optim import SGD
from oocdl.pytorch.comparison.modes import Jitter
from tests.kit.nets import write_data
from tests.kit.runs import in_torch, losses_of
from tests.kit.settings import EXACT
from tests.kit.torch_modules import error

TOLERANCE = 1e-9
ROUNDED = 1e-2
"""Of predictions, where the code rounds to 16 bits and the run says that it does not."""
NOISE, ROUNDINGS = 50, 3
"""Results may be off by so many times what PyTorch's are in other roundings."""
MOST_NOISE = 1e-2
"""Where rounding alone moves results by more, numbers say nothing."""
RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a module is trained."""

    steps: int = 3
    batch: int = 2
    accumulate: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``fit``."""


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    word: str
    """``equal``, ``refused`` or ``different``; ``none`` where nothing can be said."""
    why: str = ""


def trained_by_pytorch(
    module: nn.Module, x: Tensor, target: Tensor, course: Course, jitter: Jitter | None = None
) -> dict[str, Tensor]:
    """Train ``module`` in place, in float64; returns losses and its state."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9, weight_decay=0.01)

    def loss(number: int) -> Tensor:
        rows = [(number * course.batch + n) % len(x) for n in range(course.batch)]
        return F.mse_loss(_first(module(x[rows])), target[rows])

    each = range(course.accumulate)
    passes = [[partial(loss, step * len(each) + n) for n in each] for step in range(course.steps)]
    with jitter or nullcontext():
        losses = in_torch(optimizer, passes)
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return {"losses": torch.tensor(losses, dtype=torch.float64), **state}


def _first(made: Any) -> Tensor:
    found: Tensor = next(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
    return found


def beside(
    module: nn.Module, x: np.ndarray, folder: Path, course: Course, elsewhere: Sequence[np.ndarray] = ()
) -> Verdict:
    """Train ``module``, in float64, on ``x`` in both ways, and compare losses, state and predictions.

    ``elsewhere``: arrays of other sizes, on which the trained run predicts, or is to refuse to.
    """
    module = module.double()
    given = torch.as_tensor(x)
    shape = _first(copy.deepcopy(module)(given[: course.batch])).shape
    target = torch.randn(len(x), *shape[1:], generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    twin, fresh = copy.deepcopy(module), copy.deepcopy(module)
    wanted = trained_by_pytorch(twin, given, target, course)
    if not wanted["losses"].isfinite().all():
        return Verdict("none", "PyTorch's losses are not finite, where ours stop")
    write_data(folder / "data.zarr", {"x": x, "target": target.numpy()})
    names = [name for name in ("x", "input") if name in _arguments(module)] or ["x"]
    made = tree_leaves(copy.deepcopy(module)(given[: course.batch]))
    output = "output" if len([leaf for leaf in made if isinstance(leaf, Tensor)]) == 1 else "output_0"
    ends = {"inputs": {names[0]: "x"}, "targets": {output: "target"}, "loss": {output: "mse"}}
    sgd = SGD(lr=RATE, momentum=0.9, weight_decay=0.01)
    how = {"optimizer": sgd, "steps": course.steps, "batch_size": course.batch}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", oocdl.errors.ModelWarning)
            run = oocdl.fit(
                module,
                folder / "data.zarr",
                workdir=folder / "net.run",
                **{**EXACT, **ends, **how, "accumulate": course.accumulate, **course.options},
            )
    except InputError as why:
        return Verdict("refused", str(why))
    loaded = copy.deepcopy(fresh)
    run.load_into(loaded)
    losses = torch.tensor(losses_of(run), dtype=torch.float64)
    found = {"losses": losses, **loaded.state_dict()}
    wrong = _wrong(found, wanted, lambda jitter: trained_by_pytorch(
        copy.deepcopy(fresh), given, target, course, jitter))  # fmt: skip
    if wrong is not None:
        return wrong
    for number, array in enumerate((x, *elsewhere)):
        verdict = _predicts(run, loaded, array, folder / f"predictions-{number}", output, course.batch)
        if verdict.word == "different" or (verdict.word == "refused" and not number):
            return Verdict("different", f"predictions on {array.shape}: {verdict.why}")
    return Verdict("equal")


def _wrong(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], again: Any) -> Verdict | None:
    """Say which result is off by more than rounding; None if none is."""
    off = {name: error(found[name], tensor) for name, tensor in wanted.items()}
    if all(one <= TOLERANCE for one in off.values()):
        return None
    allowed = dict.fromkeys(wanted, TOLERANCE)
    for seed in range(ROUNDINGS):
        moved = again(Jitter(seed))
        allowed = {
            name: max(most, NOISE * error(moved[name], wanted[name])) for name, most in allowed.items()
        }
    name = max(wanted, key=lambda one: off[one] / min(allowed[one], MOST_NOISE))
    if off[name] <= min(allowed[name], MOST_NOISE):
        return None
    word = "none" if off[name] <= allowed[name] else "different"
    return Verdict(word, f"'{name}' is off by {off[name]:.1e} (rounding: {allowed[name]:.0e})")


def _predicts(
    run: oocdl.Run, module: nn.Module, x: np.ndarray, folder: Path, output: str, batch: int
) -> Verdict:
    """Compare predictions with the module's in evaluation mode, batch by batch."""
    write_data(folder / "data.zarr", {"x": x})
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        wanted = torch.cat([_first(module(part)) for part in torch.as_tensor(x).split(batch)])
    inputs = {name: "x" for name in ("x", "input") if name in _arguments(module)} or {"x": "x"}
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", oocdl.errors.ModelWarning)
            group = run.predict(
                folder / "data.zarr", folder / "out.zarr", memory="4GiB", batch_size=batch, inputs=inputs
            )
    except InputError as why:
        return Verdict("refused", str(why))
    off = error(torch.as_tensor(np.asarray(group[output])), wanted)
    metadata = inspect_onnx(next(run.path.glob("*.onnx"))).metadata
    rounds = metadata is not None and any("the code rounds to" in note for note in metadata.notes)
    if off <= (ROUNDED if rounds else TOLERANCE):
        return Verdict("equal")
    if any(issubclass(one.category, oocdl.errors.ModelWarning) for one in told):
        return Verdict("equal", "it was said that predictions differ")
    return Verdict("different", f"off by {off:.1e}")


def _arguments(module: nn.Module) -> set[str]:
    return {*inspect.signature(module.forward).parameters}
