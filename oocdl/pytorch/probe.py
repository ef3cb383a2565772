"""Runs a module once, and notes what a file cannot say: cut gradients, norms, embeddings, random numbers.

The module runs on tensors without contents where it can, so that a sample need not fit in memory, and as it
would be trained: with autograd, in the modes in which its user has put its parts. A dispatch mode sees every
operator beneath it, also those inside functions of PyTorch.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oocdl.errors import InputError, UnsupportedError
from oocdl.graph.ir.graph import Shape
from oocdl.pytorch.tensors import named_tensors

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
"""Beginnings of the files whose lines say nothing of the module's code."""
_NO_VALUES = ("_like", "new_", "empty", "zeros", "ones", "full", "sym_", "prim.")
"""Operators whose results do not depend on the numbers in their operands."""
_NORMS = ("native_batch_norm", "_native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm")
_ARRAYS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_NUMBERS = ("_local_scalar_dense", "is_nonzero", "equal")


@dataclass(kw_only=True)
class Findings:
    """What one call of the module has shown. Names are those of the module; of a tied tensor, the first."""

    outputs: Any = None
    """What the module returned."""
    reached: set[str] = field(default_factory=set)
    """Parameters that a gradient reaches."""
    read: set[str] = field(default_factory=set)
    """Parameters and buffers that some operator reads."""
    norms: dict[str, bool] = field(default_factory=dict)
    """Running mean or variance -> whether its norm is in training mode, which updates it."""
    padding: dict[str, int | None] = field(default_factory=dict)
    """Table of an embedding -> its ``padding_idx``."""
    lookups: Counter[str] = field(default_factory=Counter)
    """Table of an embedding -> how often it is looked up in one pass."""
    counters: Counter[str] = field(default_factory=Counter)
    """``num_batches_tracked`` -> by how much one pass raises it."""
    random: list[str] = field(default_factory=list)
    """Places at which random numbers are drawn."""
    refused: list[str] = field(default_factory=list)
    """What ONNX cannot carry, each in words."""


def probe(module: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Findings:
    """Call ``module``, and return what was seen. The module itself, and its random state, stay as they are.

    Raises InputError if it cannot be called with these inputs, UnsupportedError that names everything that an
    ONNX file cannot carry.
    """
    try:
        found = _fake(module, args, kwargs)
    except Exception:  # no operator's error has a common type; the real call says what is wrong
        try:
            found = _watched(copy.deepcopy(module), args, kwargs)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            shapes = ", ".join(f"{list(x.shape)} of {x.dtype}" for x in (*args, *kwargs.values()))
            raise InputError(f"{type(module).__name__} cannot be called with {shapes}: {text}") from error
    if found.refused:
        listed = "; ".join(dict.fromkeys(found.refused))
        raise UnsupportedError(f"an ONNX file cannot carry all that {type(module).__name__} does: {listed}")
    return found


def shapes_of_call(module: nn.Module, inputs: Mapping[str, Tensor]) -> list[Shape]:
    """Return the shapes of what ``module`` returns for ``inputs`` without contents; raises what it raises."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        double = copy.deepcopy(module)
    fakes = {name: mode.from_tensor(x) for name, x in inputs.items()}
    args, kwargs = as_call(double, fakes)
    with mode:
        return [tuple(x.shape) for x in tree_leaves(double(*args, **kwargs)) if isinstance(x, Tensor)]


def as_call(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Split inputs by name into those that can be given by position, and the rest."""
    parameters = inspect.signature(module.forward).parameters.values()
    slots = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    names = list(inputs)
    count = len(names) if many and not slots else 0
    while count < min(len(names), len(slots)) and names[count] == slots[count]:
        count += 1
    return [inputs[name] for name in names[:count]], {name: inputs[name] for name in names[count:]}


def _fake(module: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Findings:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        double = copy.deepcopy(module)
    fakes = {name: mode.from_tensor(x) for name, x in kwargs.items()}
    with mode:
        return _watched(double, [mode.from_tensor(x) for x in args], fakes)


def _watched(module: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Findings:
    watch = _Watch(module, (*args, *kwargs.values()))
    with torch.enable_grad(), _NoOperators(watch), watch:
        watch.found.outputs = module(*args, **kwargs)
    watch.finish()
    return watch.found


def _cell(tensor: Tensor) -> int:
    """Tell a tensor and its views from all others that live."""
    return int(tensor.untyped_storage()._cdata)


class _NoOperators(TorchFunctionMode):
    """Sees what is no operator: hooks on gradients, and tensors that become arrays or lists."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            self.watch.found.refused.append(f"a hook on the gradient of a tensor, {self.watch.place()}")
        if func in _ARRAYS and any(_cell(x) in self.watch.data for x in args if isinstance(x, Tensor)):
            what = "numbers that depend on data leave PyTorch"
            self.watch.found.refused.append(f"{what} ({func.__name__}) {self.watch.place()}")
        before = len(self.watch.found.random)
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").endswith("alpha_dropout") and len(self.watch.found.random) > before:
            # Its mean is not what it is in evaluation mode, so predictions could not leave it out.
            self.watch.found.refused.append(f"{func.__name__} {self.watch.place()}")
        return out


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator that one call of a module runs."""

    def __init__(self, module: nn.Module, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Findings()
        self.modules = {id(part): name for name, part in module.named_modules()}
        self.title = type(module).__name__
        self.state = {_cell(held.tensor): held.names[0] for held in named_tensors(module)}
        self.parameters = {id(p): self.state[_cell(p)] for p in module.parameters()}
        self.counts = {
            f"{name}.num_batches_tracked".lstrip(".")
            for name, part in module.named_modules()
            if isinstance(part, nn.modules.batchnorm._NormBase)
        }
        self.alive: list[Any] = [*inputs]
        self.data = {*map(_cell, self.alive), *self.state}
        """Tensors whose numbers depend on inputs, parameters or buffers."""
        self.indexed: dict[str, str] = {}
        """Parameters and buffers that are indexed: the place."""
        self.cut: dict[tuple[int, bool], str] = {}
        """Tensors that depend on a cut gradient, by cell and by whether they have a gradient: the place."""

    def place(self) -> str:
        """Say where in the module, and in which line of its code, we are."""
        part, line = "", ""
        frame = sys._getframe(1)
        while frame is not None and not (part and line):
            file = frame.f_code.co_filename
            if not line and not file.startswith(_NOT_THE_USERS):
                line = f"{Path(file).name}:{frame.f_lineno}"
            owner = frame.f_locals.get("self")
            if not part and id(owner) in self.modules:
                part = self.modules[id(owner)] or self.title
            frame = frame.f_back  # type: ignore[assignment]
        return f"in '{part or self.title}'" + (f" ({line})" if line else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.alive.append(out)  # a cell that is freed would be given to another tensor
        name = str(func).removeprefix("aten.").partition(".")[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.found.read.update(self.state[_cell(x)] for x in given if _cell(x) in self.state)
        bound = {slot.name: value for slot, value in zip(func._schema.arguments, args, strict=False)}
        bound |= kwargs
        ratio = bound.get("dropout_p", 0.0 if "scaled_dot_product" in name else 1.0)
        if torch.Tag.nondeterministic_seeded in func.tags and ratio:
            self.found.random.append(f"{name} {self.place()}")
        if name.startswith(_NORMS):
            self._norm(bound, name)
        elif func._schema.is_mutable:
            self._changes(func, bound)
        if name == "embedding":
            self._embedding(bound)
        elif name in ("index", "index_select", "gather", "take") and _cell(given[0]) in self.state:
            self.indexed[self.state[_cell(given[0])]] = self.place()
        if name in _NUMBERS and any(_cell(x) in self.data for x in given):
            what = "a number that depends on data is read as one of Python's"
            self.found.refused.append(f"{what} (item(), float(), if) {self.place()}")
        if not any(word in str(func) for word in _NO_VALUES):
            self._follow(name, given, made)
        return out

    def _follow(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note what the results depend on: data, and gradients that were cut."""
        with_gradient = any(x.requires_grad for x in given)
        kept = with_gradient and torch.is_grad_enabled() and name != "detach"
        where = next((self.cut[key] for x in given if (key := (_cell(x), x.requires_grad)) in self.cut), None)
        if with_gradient and not kept and where is None:
            where = f"{'detach() or .data' if name == 'detach' else 'torch.no_grad()'} {self.place()}"
        for x in made:
            if any(_cell(y) in self.data for y in given):
                self.data.add(_cell(x))
            if where is not None and x.is_floating_point():
                self.cut[_cell(x), kept] = where

    def _norm(self, bound: Mapping[str, Any], name: str) -> None:
        training = "no_training" not in name and bool(bound.get("training", True))
        for slot in ("running_mean", "running_var"):
            held = bound.get(slot)
            title = None if held is None else self.state.get(_cell(held))
            if title is None:
                continue
            if self.found.norms.setdefault(title, training) != training:
                self.found.refused.append(f"a norm that runs in both modes, {self.place()}")

    def _embedding(self, bound: Mapping[str, Any]) -> None:
        title = self.state.get(_cell(bound["weight"]))
        if bound.get("scale_grad_by_freq", False) or bound.get("sparse", False):
            self.found.refused.append(f"an embedding with scale_grad_by_freq or sparse {self.place()}")
        if title is None:
            return
        row = bound.get("padding_idx", -1)
        padding = None if row < 0 else int(row)
        self.found.lookups[title] += 1
        if self.found.padding.setdefault(title, padding) != padding:
            self.found.refused.append(f"a table that is looked up with two padding_idx, {self.place()}")

    def _changes(self, func: Any, bound: Mapping[str, Any]) -> None:
        """Note a parameter or buffer that the operator writes into."""
        for slot in func._schema.arguments:
            held = bound.get(slot.name)
            if slot.alias_info is None or not slot.alias_info.is_write or not isinstance(held, Tensor):
                continue
            title = self.state.get(_cell(held))
            if title in self.counts:
                self.found.counters[title] += 1
            elif title is not None:
                self.found.refused.append(f"'{title}' is changed by the forward pass {self.place()}")

    def finish(self) -> None:
        """Look at what came out: which gradients are cut, and which parameters they reach."""
        results = [x for x in tree_leaves(self.found.outputs) if isinstance(x, Tensor)]
        for x in results:
            if (_cell(x), x.requires_grad) in self.cut:
                where = self.cut[_cell(x), x.requires_grad]
                self.found.refused.append(
                    f"the gradient is cut by {where} (to freeze parameters, use requires_grad_(False))"
                )
        for title, where in self.indexed.items():
            if self.found.padding.get(title) is not None:
                self.found.refused.append(f"'{title}' has a padding_idx, and is indexed without one {where}")
        nodes = [x.grad_fn for x in results if x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self.found.refused.append(f"an autograd.Function of its own ({type(node).__name__})")
            variable = getattr(node, "variable", None)
            if id(variable) in self.parameters:
                self.found.reached.add(self.parameters[id(variable)])
            fresh = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= fresh
            nodes += fresh
