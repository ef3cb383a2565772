"""Looks at every operator that one call of a module runs, also those inside functions of PyTorch."""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from oocdl.pytorch import checkpoints
from oocdl.pytorch.module_calls import OneStep, Places, is_of_user, tensors_in
from oocdl.pytorch.module_tensors import named_tensors, norm_buffers
from oocdl.pytorch.other_words import cosine_similarity
from oocdl.pytorch.study.state import cell_of

_NO_VALUES = ("_like", "new_", "empty", "zeros", "ones", "full", "sym_", "prim.")
"""Operators whose results do not depend on the numbers in their operands."""
_NORMS = ("native_batch_norm", "_native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm")
_ARRAYS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_NUMBERS = ("_local_scalar_dense", "is_nonzero", "equal")
READ = "a number that depends on data is read as one of Python's (item(), float(), if)"
TWICE = "a norm that torch.utils.checkpoint updates twice in each step,"
_MASKS = (torch.bool, torch.uint8)
_SEEDS = tuple(
    f"torch.{place}{name}" for place in ("", "random.") for name in ("manual_seed", "seed", "set_rng_state")
)
_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _has_values(func: Any) -> bool:
    return not any(word in str(func) for word in _NO_VALUES)


@dataclass(kw_only=True)
class Findings:
    """The findings of one call of a module, by the module's names; a tied tensor has its first."""

    outputs: Any = None
    reached: set[str] = field(default_factory=set)
    """Parameters that a gradient reaches."""
    read: set[str] = field(default_factory=set)
    """Parameters and buffers that some operator reads."""
    norms: dict[str, bool] = field(default_factory=dict)
    """Running mean or variance -> whether its norm is in training mode, which updates it."""
    padding: dict[str, int | None] = field(default_factory=dict)
    """Table of an embedding -> its ``padding_idx``."""
    rows: list[int] = field(default_factory=list)
    """Number of rows of each table in which inputs are looked up."""
    counters: Counter[str] = field(default_factory=Counter)
    """``num_batches_tracked`` -> the amount by which one pass raises it."""
    draws: int = 0
    """Number of operators that have drawn random numbers."""
    casts: dict[str, str] = field(default_factory=dict)
    """Place at which the code rounds to another type of numbers -> that type."""
    numbers: set[float] = field(default_factory=set)
    """Python's floats that operators take."""
    tensors: set[float] = field(default_factory=set)
    """Numbers of tensors that hold one, and do not depend on data."""
    cut: str = ""
    """How and where a gradient is cut that reaches an output; empty: nowhere."""
    refused: list[str] = field(default_factory=list)
    untraced: str = ""
    """Place at which the module decides by data unless it is traced; then the findings are as traced."""
    trace: list[str] = field(default_factory=list)
    """Each operator with its numbers, and with what made its operands: equal for equal calls."""
    places: list[str] = field(default_factory=list)
    """Place of each operator of the trace; empty in the first call."""


class NoOperators(TorchFunctionMode):
    """Sees what is no operator: hooks on gradients, and tensors that become arrays or lists."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, before = self.watch, self.watch.found.draws
        if func is Tensor.register_hook:
            watch.refuse("a hook on the gradient of a tensor,")
        if getattr(func, "__self__", None) is Tensor.data and func.__name__ == "__set__":
            watch.refuse("the contents of a tensor are replaced by .data,")
        if func in _ARRAYS and any(cell_of(x) in watch.varying for x in args if isinstance(x, Tensor)):
            watch.refuse(f"numbers that depend on data leave PyTorch ({func.__name__})")
        if func is nn.functional.cosine_similarity:  # which clamps in place under no_grad
            func = cosine_similarity
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").endswith("alpha_dropout") and watch.found.draws > before:
            # Its mean is not what it is in evaluation mode, so predictions could not leave it out.
            watch.refuse(func.__name__)
        return out


class DrawnAt(TorchFunctionMode):
    """Finds where in a module a generator is drawn from that is not PyTorch's, by what tells its state."""

    def __init__(self, module: nn.Module, state: Callable[[], Any]) -> None:
        super().__init__()
        self.places, self.state, self.place = Places(module), state, ""
        self.before = state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.place and self.state() != self.before:
            self.place = self.places.here()
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operator of several calls, one after another; ``found`` is of the last one."""

    def __init__(self, module: nn.Module, inputs: Iterable[Tensor], strangers: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strangers = strangers
        """Cell or id of a tensor that stands where a weight should -> why, in words."""
        self.found = Findings()
        self.places = Places(module)
        self.state = {cell_of(held.tensor): held.names[0] for held in named_tensors(module)}
        self.parameters = {id(p): self.state[cell_of(p)] for p in module.parameters()}
        self.counts = norm_buffers(module, "num_batches_tracked")
        self.inputs = [*inputs]
        self.alive: list[Any] = []
        self.repeated = False
        self.data = {*map(cell_of, self.inputs), *self.state}
        """Tensors whose numbers depend on inputs, parameters, buffers or random numbers."""
        self.from_inputs = {*map(cell_of, self.inputs)}
        self.varying = self.from_inputs | {cell_of(p) for p in module.parameters() if p.requires_grad}
        statistics = norm_buffers(module)
        self.varying |= {cell for cell, title in self.state.items() if title in statistics}
        """Tensors of ``data`` but for those that only frozen parameters and buffers that stay determine."""
        self.made: dict[int, str] = {}
        """Tensors of this call -> what made them; of earlier calls, with a note."""
        self.literals: set[int] = set()
        """Tensors that the code writes out in numbers."""
        self.fresh: set[int] = set()
        """Tensors that this call has made, in memory that no operand has."""
        self.old: set[int] = set()
        """Tensors that an earlier call has made from data, or made anew after the first call had."""
        self.beside: dict[str, str] = {}
        """Parameters and buffers that an operator other than a norm reads: the first place."""
        self.indexed: dict[str, str] = {}
        """Parameters and buffers that are indexed: the place."""
        self.cut: dict[tuple[int, bool], str] = {}
        """Tensors that depend on a cut gradient, by cell and by whether they have a gradient: the place."""
        self.graded: set[int] = set()
        """Tensors that autograd follows."""

    def refuse(self, what: str) -> None:
        self.found.refused.append(f"{what} {self.places.here()}")

    def call(self, module: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> Findings:
        """Call the module once more, and return what was seen of this call."""
        self.found = Findings()
        self.made |= {cell_of(x): f"input {number}" for number, x in enumerate(self.inputs)}
        with ExitStack() as stack:
            for title in _SEEDS:
                stack.enter_context(patch(title, self._seeding(title)))
            for mode in (torch.enable_grad(), patch(_ATTENTION, self._attention), NoOperators(self), self):
                stack.enter_context(mode)
            stack.enter_context(OneStep())
            self.found.outputs = module(*args, **kwargs)
        self._finish()
        self.old |= self.fresh if self.repeated else set()
        self.fresh.clear()
        for cell, text in self.made.items():
            if cell in self.varying:
                self.old.add(cell)
            if not text.startswith("kept "):
                self.made[cell] = f"kept {text}"
        self.repeated = True
        return self.found

    def _seeding(self, title: str) -> Callable[..., Any]:
        """Return a function of PyTorch's that refuses to be called by the module's own code."""
        name, plain = title.rpartition(".")[2], getattr(torch.random, title.rpartition(".")[2])

        def call(*args: Any) -> Any:
            if is_of_user(sys._getframe(1).f_code.co_filename):
                self.refuse(f"PyTorch's random numbers are seeded ({name})")
            return plain(*args)

        return call

    def _attention(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Note the scale of an attention: its kernels take a root of it."""
        scale = kwargs.get("scale")
        self.found.numbers.add(query.shape[-1] ** -0.5 if scale is None else float(scale))
        return torch._C._nn.scaled_dot_product_attention(query, *args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").partition(".")[0]
        given = tensors_in((args, kwargs))
        self._reads(func, args, kwargs, given)
        if torch.Tag.dynamic_output_shape in func.tags:
            by_masks = name in ("index", "masked_select")
            shaping = [x for x in given[1:] if x.dtype in _MASKS] if by_masks else given
            if any(cell_of(x) in self.varying for x in shaping):
                self.refuse(f"a shape that depends on data ({name}; torch.where keeps shapes)")
        out = func(*args, **kwargs)
        self.alive.append(out)  # a cell that is freed would be given to another tensor
        results = tensors_in(out)
        self.literals.update(map(cell_of, results if name.startswith("lift_fresh") else ()))
        bound = {slot.name: value for slot, value in zip(func._schema.arguments, args, strict=False)}
        bound |= kwargs
        ratio = bound.get("dropout_p", 0.0 if "scaled_dot_product" in name else 1.0)
        if torch.Tag.nondeterministic_seeded in func.tags and ratio:
            self.found.draws += 1
            self.data.update(map(cell_of, results))
            self.varying.update(map(cell_of, results))
            if bound.get("generator") is not None:
                self.refuse("random numbers of a generator of its own")
        if name.startswith(_NORMS):
            self._norm(bound, name)
        else:
            for title in {self.state[cell_of(x)] for x in given if cell_of(x) in self.state}:
                if title not in self.beside:
                    self.beside[title] = self.places.here()
            if func._schema.is_mutable:
                self._changes(func, bound, name)
        self._looks_up(name, bound, given)
        if name in _NUMBERS and any(cell_of(x) in self.varying for x in given):
            self.refuse(READ)
        elif name in _NUMBERS and type(out) is float and math.isfinite(out):
            self.found.tensors.add(out)
        if name == "_to_copy" and cell_of(given[0]) in self.data:
            before, after = given[0].dtype, results[0].dtype
            if before in _FLOATS and after in _FLOATS and before != after:
                self.found.casts.setdefault(self.places.here(), str(after).removeprefix("torch."))
        if _has_values(func):
            self._follow(name, given, results)
        for number, x in enumerate(results):
            cell = cell_of(x)
            if cell not in self.state and not self.made.get(cell, "").startswith("kept "):
                self.fresh |= {cell} - {*map(cell_of, given)}
                self.made[cell] = f"{len(self.found.trace)}:{number}"
        return out

    def _reads(self, func: Any, args: Any, kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> None:
        """Note the operator in the trace, and what it reads."""
        self.found.read.update(self.state[cell_of(x)] for x in given if cell_of(x) in self.state)
        for x in given:
            if cell_of(x) in self.old and self.made[cell_of(x)].startswith("kept "):
                self.refuse("what an earlier call has computed is read")
        if func.namespace == "prim":
            return  # PyTorch remembers what such an operator has told it
        if _has_values(func):
            keys = [key for x in given for key in (id(x), cell_of(x)) if key in self.strangers]
            if keys:
                self.refuse(self.strangers[keys[0]])
                self.strangers = {}  # a layer may have many weights, all for one reason
        leaves = tree_leaves((args, dict(kwargs)))
        self.found.numbers.update(x for x in leaves if type(x) is float and math.isfinite(x))
        for x in given:
            if x.numel() == 1 and x.is_floating_point() and cell_of(x) not in self.data:
                held = getattr(x, "constant", x)
                is_literal = cell_of(x) in self.literals or cell_of(x) not in self.made
                if is_literal and held is not None:
                    self.found.tensors.add(float(held))
                elif any(y.is_floating_point() and y.element_size() > x.element_size() for y in given):
                    dtype = str(x.dtype).removeprefix("torch.")
                    self.found.casts.setdefault(self.places.here(), dtype)
        told = tree_map(lambda x: self._told(x) if isinstance(x, Tensor) else repr(x), (args, dict(kwargs)))
        grad = "" if torch.is_grad_enabled() else " without gradients"
        self.found.trace.append(f"{func}{told}{grad}")
        self.found.places.append(self.places.here() if self.repeated else "")

    def _told(self, x: Tensor) -> str:
        """Say which tensor this is, in words that are the same in each call."""
        cell = cell_of(x)
        if cell in self.state:
            return self.state[cell]
        if cell in self.made:
            return self.made[cell]
        constant = getattr(x, "constant", None)
        held = b"" if constant is None else constant.detach().cpu().contiguous().numpy().tobytes()
        return f"constant {tuple(x.shape)} {x.dtype} {hashlib.blake2b(held, digest_size=8).hexdigest()}"

    def _follow(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note what the results depend on: data, and gradients that were cut."""
        with_gradient = any(x.requires_grad for x in given)
        kept = with_gradient and torch.is_grad_enabled() and name != "detach"
        keys = [(cell_of(x), x.requires_grad) for x in given]
        where = next((self.cut[key] for key in keys if key in self.cut), None)
        if with_gradient and not kept and where is None:
            how = "detach() or .data" if name == "detach" else "torch.no_grad()"
            where = f"{how} {self.places.here()}"
        for x in made:
            cell = cell_of(x)
            for known in (self.data, self.from_inputs, self.varying):
                if any(cell_of(y) in known for y in given):
                    known.add(cell)
            if kept and x.is_floating_point():
                self.graded.add(cell)
            if where is not None and x.is_floating_point():
                self.cut[cell, kept] = where

    def _norm(self, bound: Mapping[str, Any], name: str) -> None:
        training = "no_training" not in name and bool(bound.get("training", True))
        for slot in ("running_mean", "running_var"):
            held = bound.get(slot)
            title = None if held is None else self.state.get(cell_of(held))
            if title is not None and self.found.norms.setdefault(title, training) != training:
                self.refuse("a norm that runs in both modes,")
            if title is not None and training and checkpoints.running:
                self.refuse(TWICE)

    def _looks_up(self, name: str, bound: Mapping[str, Any], given: Sequence[Tensor]) -> None:
        if name == "embedding":
            self._embedding(bound)
        elif name in ("index", "index_select", "gather", "take") and cell_of(given[0]) in self.state:
            self.indexed[self.state[cell_of(given[0])]] = self.places.here()
        else:
            return
        table, *places = given
        if any(cell_of(x) in self.from_inputs for x in places):
            self.found.rows.append(int(table.shape[0]))

    def _embedding(self, bound: Mapping[str, Any]) -> None:
        title = self.state.get(cell_of(bound["weight"]))
        if bound.get("scale_grad_by_freq", False) or bound.get("sparse", False):
            self.refuse("an embedding with scale_grad_by_freq or sparse")
        row = bound.get("padding_idx", -1)
        padding = None if row < 0 else int(row)
        if title is None and padding is not None and bound["weight"].requires_grad:
            self.refuse("padding_idx of a table that is computed (leave it out, or look up a parameter)")
        if title is not None and self.found.padding.setdefault(title, padding) != padding:
            self.refuse("a table that is looked up with two padding_idx,")

    def _changes(self, func: Any, bound: Mapping[str, Any], name: str) -> None:
        """Note a tensor that the operator writes into, and that lives longer than the call."""
        for slot in func._schema.arguments:
            held = bound.get(slot.name)
            if slot.alias_info is None or not slot.alias_info.is_write or not isinstance(held, Tensor):
                continue
            cell = cell_of(held)
            title = self.state.get(cell)
            if title in self.counts:
                self.found.counters[title] += 1
            elif title is not None:
                self.refuse(f"'{title}' is changed by the forward pass")
            elif self.made.get(cell, "kept ").startswith("kept "):
                self.refuse("a tensor that lives longer than a call is changed")
            elif cell in self.graded and not (torch.is_grad_enabled() and held.requires_grad):
                how = ".data or detach()" if torch.is_grad_enabled() else "torch.no_grad()"
                self.refuse(f"a gradient is cut by {name}, in place under {how},")

    def _finish(self) -> None:
        """Look at what came out: which gradients are cut, and which parameters they reach."""
        findings = self.found
        results = tensors_in(findings.outputs)
        for x in results:
            findings.cut = findings.cut or self.cut.get((cell_of(x), x.requires_grad), "")
        for title, training in findings.norms.items():
            if training and title in self.beside:
                findings.refused.append(f"'{title}' is changed by its norm, and read {self.beside[title]}")
        for title, where in self.indexed.items():
            if findings.padding.get(title) is not None:
                findings.refused.append(f"'{title}' has a padding_idx, and is indexed without one {where}")
        nodes = [x.grad_fn for x in results if x.grad_fn is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                instead = "x + (y - x).detach() is y with the gradient of x"
                findings.refused.append(f"an autograd.Function of its own ({type(node).__name__}; {instead})")
            variable = getattr(node, "variable", None)
            if id(variable) in self.parameters:
                findings.reached.add(self.parameters[id(variable)])
            fresh = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= fresh
            nodes += fresh
