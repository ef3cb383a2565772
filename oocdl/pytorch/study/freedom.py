"""Finds the axes of a module's inputs that may have any size, by one call on tensors of symbolic sizes.

Where the module's code makes a number of a symbol (``int``, ``math.sqrt``, a loop) its value is fixed; where
it compares them, the outcome becomes a condition under which the module takes the same path.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.printers import PythonPrinter

from oocdl.graph.onnx.input_sizes import Condition, is_readable
from oocdl.pytorch.module_calls import OneStep, Places, Signature, Tensors, is_of_user, without_contents

BATCH = "batch"
_TORCH = Path(torch.__file__).parent
_KERNELS = ("contiguous", "strides_like", "conv", "elementwise_output_strides", "memory_format")
"""Parts of the names of PyTorch's functions whose conditions choose a kernel or an order in memory."""
_FOLLOWING = (
    "<",
    __file__,
    *(str(_TORCH / name) for name in ("__init__.py", "fx/", "_subclasses/", "_ops.py")),
)
"""Beginnings of the files that follow symbols through whatever is called."""
_CHOOSES = (str(_TORCH / "_subclasses/fake_impls.py"), "conv")
"""File and name of the function among these that asks which kernel a convolution would take."""
_AGAIN_SECONDS = 1.0
Axis = tuple[str, int]


class _Late(BaseException):
    """The time for a call is over."""


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """Axes that may have any size, and conditions on sizes."""

    names: Mapping[Axis, str]
    """(input, axis) -> the name of its size, for every axis that is free; equal sizes have one name."""
    fixed: Mapping[Axis, str]
    """(input, axis) -> the line of code that needs its size, for axes that were tried and are not free."""
    conditions: tuple[Condition, ...]
    """Conditions on the sizes under which the module takes the path that it took."""
    rounded: Mapping[str, str] = field(default_factory=dict)
    """Name of a size -> the line of code that rounds a fraction of it up or down."""


def freedom(
    module: nn.Module,
    signature: Signature,
    inputs: Tensors,
    tried: Mapping[str, Sequence[int]],
    seconds: float,
) -> Freedom:
    """Call ``module`` with symbols for the sizes of the ``tried`` axes, which are at least 2.

    Raises TimeoutError after ``seconds`` of this process's time, and whatever the call raises.
    """
    env = _Env()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    mode.cache_enabled = False  # one call seldom finds what it has kept: half of the time goes into keeping
    double = without_contents(module, mode)
    fakes, symbols = {}, dict[sympy.Symbol, Axis]()
    for name, x in inputs.items():
        axes = tried.get(name, ())
        sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(x.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * x.dim())
        fakes[name] = mode.from_tensor(x, source=ConstantSource(name), symbolic_context=context)
        for axis, size in enumerate(fakes[name].shape):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = (name, axis)
    args, kwargs = signature.split(fakes)
    calls = _Calls(Places(double), env)
    with _limited(seconds), mode, enable_python_dispatcher(), calls, OneStep(), env.noting_what_is_rounded():
        double(*args, **kwargs)
    calls.note()
    return _read(env, symbols, calls.found)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after some seconds of this process's time: a few modules take minutes."""
    # PyTorch goes on after most exceptions, so the one that ends the call is no ``Exception``, and comes
    # again.

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_SECONDS)
    try:
        yield
    except _Late:
        raise TimeoutError(f"sizes could not be followed in {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Env(ShapeEnv):
    """Tells by itself where a condition arises: PyTorch imports its compilers for that, in half a second."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.rounded: dict[sympy.Symbol, str] = {}
        """A size -> the user's line that rounds a fraction of it."""

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: Any = None) -> tuple[SLoc, str]:
        return SLoc(_calling() if framework_loc is None else framework_loc, None), ""

    @contextmanager
    def noting_what_is_rounded(self) -> Iterator[None]:
        """Note what ``math.ceil`` and ``math.floor`` are given: a tracer writes the number."""
        with ExitStack() as stack:
            for kind, name in product((torch.SymInt, torch.SymFloat), ("__ceil__", "__floor__")):
                stack.enter_context(patch.object(kind, name, self._noting(getattr(kind, name))))
            yield

    def _noting(self, rounded: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(fraction: Any) -> Any:
            at, expr = _calling(), fraction.node.expr
            if at is not None and is_of_user(at.filename):
                for symbol in expr.free_symbols:
                    if expr.has(sympy.Float):
                        self.evaluate_expr(symbol)  # fixed: in files, floats scale sizes in float32
                    self.rounded.setdefault(symbol, f"{Path(at.filename).name}:{at.lineno}")
            return rounded(fraction)

        return noted


def _calling() -> FrameSummary | None:
    """Return the place of the code that computes with a symbol."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLLOWING) or (code.co_filename, code.co_name) == _CHOOSES:
            return FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False)
        frame = frame.f_back
    return None


class _Calls(TorchFunctionMode):
    def __init__(self, places: Places, env: ShapeEnv) -> None:
        super().__init__()
        self.places, self.env = places, env
        self.found: list[str] = []
        """The place of each of the environment's conditions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note()
        name = getattr(func, "__name__", "")
        if name.startswith("adaptive_max"):
            _fix_pooled(*args, **(kwargs or {}))
        if name == "cumprod":
            _fix_scanned(*args, **(kwargs or {}))
        for given in (*args, *(kwargs or {}).values()) if name.startswith("conv") else ():
            if isinstance(given, torch.SymInt):  # as many groups as samples, of which files have the number
                int(given)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if len(self.env.guards) > len(self.found):
                place = self.places.here()
                self.found += [place] * (len(self.env.guards) - len(self.found))

    def note(self) -> None:
        """Give conditions that arose since the last call the lines where they did."""
        for guard in self.env.guards[len(self.found) :]:
            at = guard.sloc.framework_loc
            known = f"{Path(at.filename).name}:{at.lineno}" if isinstance(at, FrameSummary) else ""
            self.found.append(known)


def _fix_pooled(input: torch.Tensor, output_size: Any, *_: Any, **__: Any) -> None:
    """Fix the sizes that adaptive maxima make several cells of: exporters write the windows of one."""
    wanted = output_size if isinstance(output_size, Sequence) else [output_size] * (input.dim() - 2)
    for size, cells in zip(input.shape[-len(wanted) :], wanted, strict=True):
        if cells is not None and cells != 1:
            int(size)


def _fix_scanned(input: torch.Tensor, dim: int, **_: Any) -> None:
    """Fix the size along which products are cumulative: files have the steps that make them."""
    int(input.shape[dim])


def _read(env: _Env, symbols: Mapping[sympy.Symbol, Axis], places: Sequence[str]) -> Freedom:
    names, fixed = dict[Axis, str](), dict[Axis, str]()
    titles, fixing = dict[sympy.Symbol, sympy.Symbol](), dict[sympy.Symbol, str]()
    for guard, place in zip(env.guards, places, strict=True):
        if isinstance(guard.expr, sympy.Eq):
            fixing |= dict.fromkeys(guard.expr.free_symbols, place)
    for symbol, axis in symbols.items():
        leader = env.replacements.get(symbol, symbol)
        while leader != env.replacements.get(leader, leader):
            leader = env.replacements[leader]
        if not isinstance(leader, sympy.Symbol):
            fixed[axis] = fixing.get(symbol, "")
            continue
        first = symbols.get(leader, axis)
        names[axis] = BATCH if first[1] == 0 else f"{first[0]}_{first[1]}"
        titles[symbol] = titles[leader] = sympy.Symbol(names[axis])
    conditions: dict[str, str] = {}
    for guard, place in zip(env.guards, places, strict=True):
        expr = guard.expr.xreplace(titles)
        known = {symbol.name for symbol in expr.free_symbols} <= {*names.values()}
        if expr.free_symbols and known and not _is_of_a_kernel(guard):
            conditions.setdefault(PythonPrinter().doprint(expr), place)
    # Axes are fixed whose conditions no reader of the file could check.
    unreadable = {text: place for text, place in conditions.items() if not is_readable(text)}
    lost = {name: place for text, place in unreadable.items() for name in names.values() if name in text}
    kept = [text for text in conditions if text not in unreadable and not any(name in text for name in lost)]
    return Freedom(
        names={axis: name for axis, name in names.items() if name not in lost},
        fixed={**fixed, **{axis: lost[name] for axis, name in names.items() if name in lost}},
        conditions=tuple(Condition(text, conditions[text]) for text in kept),
        rounded={str(titles[symbol]): at for symbol, at in env.rounded.items() if symbol in titles},
    )


def _is_of_a_kernel(guard: Any) -> bool:
    """Whether a condition chooses how something is computed, not what."""
    frame = guard.sloc.framework_loc
    if frame is None:
        return False
    file = Path(frame.filename)
    if not file.is_relative_to(_TORCH) or file.is_relative_to(_TORCH / "nn"):
        return False
    return any(word in frame.name for word in _KERNELS) or _is_about_one(guard.expr)


def _is_about_one(expr: Any) -> bool:
    """Whether a condition says that a size is not 1, which PyTorch's operators treat as they do others."""
    if isinstance(expr, sympy.Ne):
        return 1 in expr.args
    if isinstance(expr, sympy.Lt | sympy.Le):
        expr = expr.reversed
    return isinstance(expr, sympy.Gt) and expr.rhs == 1 or isinstance(expr, sympy.Ge) and expr.rhs == 2
