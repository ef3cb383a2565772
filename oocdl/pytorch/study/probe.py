"""Calls a module a few times, and notes what a file cannot say, or could not carry.

The module runs on tensors without contents where it can, so that a sample need not fit in memory, and as it
would be trained. A file holds one call: what a call leaves behind for the next (a counter, a kept tensor),
and what differs between calls (Python's random numbers) is refused by name, unless nothing depends on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oocdl.errors import InputError, UnsupportedError
from oocdl.pytorch.module_calls import Signature, Tensors, without_contents
from oocdl.pytorch.module_tensors import copied, named_tensors
from oocdl.pytorch.study.operator_watch import READ, TWICE, DrawnAt, Findings, Watch
from oocdl.pytorch.study.state import cell_of, changed, classes_of, counter, generators, is_tensor, snapshot

_FAR = 1_000_003
"""Number that is added to a counter to see whether anything depends on it."""
_LISTED = 5
"""Places that a refusal names; others are counted."""
Call = tuple[Sequence[Tensor], Mapping[str, Tensor]]


def probe(module: nn.Module, signature: Signature, inputs: Tensors) -> Findings:
    """Call copies of ``module``, and return what was seen of the first call.

    A module with masks or ids may decide by its data, and not do so where it is traced; then the calls are
    as traced. Raises InputError if it cannot be called with these inputs, UnsupportedError that names
    what an ONNX file cannot carry.
    """
    _refuse_hooks(module)
    findings = _seen(module, signature, inputs)
    has_masks = not all(x.is_floating_point() for x in inputs.values())  # which are compared all set, too
    if has_masks and findings.refused and all(text.startswith(READ) for text in findings.refused):
        with patch("torch.jit.is_tracing", lambda: True):
            traced = _seen(module, signature, inputs)
        if not traced.refused:
            return replace(traced, untraced=findings.refused[0].removeprefix(READ).strip())
    _refuse(module, findings.refused)
    return findings


def _seen(module: nn.Module, signature: Signature, inputs: Tensors) -> Findings:
    """Call copies without contents, else with them; raises InputError if the module cannot be called."""
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        double = without_contents(module, mode)
        fakes = {name: mode.from_tensor(x) for name, x in inputs.items()}
        return _repeated(double, signature.split(fakes), mode, _strangers(module, double))
    except UnsupportedError:
        raise
    except Exception:  # no operator's error has a common type; the real call says what is wrong
        try:
            double = copied(module)
            return _repeated(double, signature.split(inputs), nullcontext(), _strangers(module, double))
        except UnsupportedError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in inputs.values())
            raise InputError(f"{type(module).__name__} cannot be called with {shapes}: {text}") from error


def _refuse(module: nn.Module, what: Iterable[str]) -> None:
    found = [*dict.fromkeys(what)]
    if listed := "; ".join(found[:_LISTED]):
        listed += f"; and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        listed += _way_out(module, listed)
        raise UnsupportedError(f"an ONNX file cannot carry all that {type(module).__name__} does: {listed}")


def _way_out(module: nn.Module, listed: str) -> str:
    """Say which part to put in evaluation mode: spectral_norm, statistics and codebooks change buffers."""
    if TWICE in listed:
        return "; leave out checkpoint (set_grad_checkpointing(False)): a run keeps to its memory without it"
    for name, _ in module.named_buffers():
        owner = name.rpartition(".")[0]
        if f"'{name}' is changed by the" in listed and module.get_submodule(owner).training:
            part = f"part '{owner}'" if owner else "module"
            return f"; call eval() of the {part} to train with what it holds now"
    return ""


def _strangers(module: nn.Module, double: nn.Module) -> dict[int, str]:
    """Return the tensors that a copy would read where the module reads a weight that is trained."""
    # By cell or id, with the reason in words. In a copy functions still hold the weights of the module
    # itself, and a tensor that shared memory with a weight no longer does.
    weights = {cell_of(p): name for name, p in module.named_parameters() if p.requires_grad}
    own = {cell_of(held.tensor) for held in named_tensors(double)}
    how = (
        "is read through a closure, a hook or a weak reference, which a copy of the module does not follow "
        "(read it in forward, by attributes of self),"
    )
    found = {cell: f"'{name}' {how}" for cell, name in weights.items() if cell not in own}
    registered, copies = {*map(id, module.parameters())}, snapshot(double)
    for path, leaf in snapshot(module).items():
        if is_tensor(leaf) and leaf[1] in weights and leaf[2] not in registered and path in copies:
            both = f"'{path}' and '{weights[leaf[1]]}' are two tensors in the same memory"
            found[copies[path][2]] = f"{both} (use one, by two names), read"
    return found


def _repeated(
    module: nn.Module, call: Call, mode: AbstractContextManager[Any], strangers: Mapping[int, str]
) -> Findings:
    """Call a module of our own three times, and compare what is seen of the calls, and what they leave."""
    args, kwargs = call
    with mode:
        watch = Watch(module, (*args, *kwargs.values()), strangers)
        dice = generators()
        before, registered = dice(), {name for name, _ in module.named_parameters()}
        calls, states = [], []
        for _ in range(3):
            calls.append(watch.call(module, args, kwargs))
            states.append(snapshot(module))
        made = sorted({name for name, _ in module.named_parameters()} - registered)
        refused = [f"its first call makes the parameter '{name}' (call it once before)" for name in made]
        refused += [text for findings in calls for text in findings.refused]
        drawn = [place for place, now in enumerate(dice()) if now != before[place]]
        refused += [_drawn(dice, place, module, call) for place in drawn]
        left = changed(states[1], states[2])
        counters = {path for path in left if type(states[1].get(path)) is int}
        refused = [f"'{path}' is changed by the forward pass" for path in sorted(left - counters)] or refused
        if not refused:
            read = [path for path in sorted(counters) if _is_read(module, path, watch, call)]
            refused = [f"'{path}' is changed by the forward pass, and read by it" for path in read]
        calls[0].refused[:] = refused or _differences(*calls)
    return calls[0]


def _drawn(dice: Callable[[], list[tuple[str, Any]]], number: int, module: nn.Module, call: Call) -> str:
    drawn = DrawnAt(module, lambda: dice()[number])
    with drawn:
        module(*call[0], **call[1])
    return f"{dice()[number][0]} is drawn from {drawn.place}".rstrip()


def _is_read(module: nn.Module, path: str, watch: Watch, call: Call) -> bool:
    """Whether a call depends on a whole number that each call changes."""
    owner, _, title = path.rpartition(".")
    part: Any = {**sys.modules, **classes_of(module), **dict(module.named_modules())}.get(owner)
    if part is None or type(getattr(part, title, None)) is not int:
        return True
    uses: list[str] = []
    value = getattr(part, title)
    before = watch.call(module, *call).trace
    setattr(part, title, counter(value + _FAR, uses))
    after = watch.call(module, *call).trace
    setattr(part, title, value)
    return bool(uses) or before != after


def _differences(first: Findings, second: Findings, third: Findings) -> list[str]:
    """Say that two calls differ, if they do; the first may be alone in computing what later ones keep."""
    keeps = any("'kept " in line for line in second.trace)
    for earlier, later in [(second, third)] + ([] if keeps else [(first, second)]):
        if earlier.trace != later.trace:
            lines = zip_longest(earlier.trace, later.trace, later.places, fillvalue="nothing")
            before, after, place = next(line for line in lines if line[0] != line[1])
            return [f"two calls with equal inputs differ {place}: {before[:100]}, then {after[:100]}"]
    return []


def _refuse_hooks(module: nn.Module) -> None:
    """Raise UnsupportedError for what runs in backward only, and for norms that average cumulatively."""
    refused = []
    for name, part in module.named_modules():
        where = f"'{name or type(module).__name__}'"
        if part._backward_hooks or part._backward_pre_hooks:
            refused.append(f"a backward hook of {where}")
        norm = isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
        if norm and part.track_running_stats and part.momentum is None:
            refused.append(f"momentum=None of {where}, a cumulative average (give a number)")
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            refused.append(f"a hook on the gradient of '{name}'")
    _refuse(module, refused)
