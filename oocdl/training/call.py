"""Options of a call of ``fit`` that are not settings: their records, and their checked values."""
# Annotations are evaluated where they stand, as they hold the records: no "from __future__" here.

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack

from oocdl.config import options as settings
from oocdl.config.option_checks import MOST_PORT, anything, seconds, shown, whole
from oocdl.config.options import OPTIONS, Option, entry, options_of
from oocdl.config.settings import checked
from oocdl.errors import InputError
from oocdl.events import Listener
from oocdl.host.paths import path_of
from oocdl.report.plan_view import Plan
from oocdl.runtime.lost import SILENT_SECONDS
from oocdl.runtime.trace import checked_path
from oocdl.training.resume import given_plan

Axes = str | Sequence[int] | Mapping[str, Sequence[int]] | None
WAIT_SECONDS = 300.0
LEAST_SILENT_SECONDS = 3.0


def _resume(name: str, value: Any) -> Any:
    if not isinstance(value, bool) and value != "restart":  # 0 and 1 are no flags either
        raise InputError(f"resume must be True, False or 'restart', got {shown(repr(value))}")
    return value


def listeners(name: str, value: Any) -> Sequence[Any]:
    """Check a series of callables."""
    if not isinstance(value, Iterable) or not all(map(callable, items := list(value))):
        raise InputError(f"{name} takes a list of callables, each called with an event, got {shown(value)}")
    for item in items:
        if isinstance(item, type):
            raise InputError(f"{name} takes objects, and {item.__name__} is a class: {item.__name__}(..)")
    return items


def _silent(name: str, value: Any) -> float:
    if (number := seconds(name, value)) < LEAST_SILENT_SECONDS:
        raise InputError(
            f"{name} takes at least {LEAST_SILENT_SECONDS:g}: workers tell of themselves each second"
        )
    return number


def _page(name: str, value: Any) -> bool | int:
    return value if isinstance(value, bool) else whole(name, value, most=MOST_PORT)


def _get(name: str, value: Any) -> Any:
    if not callable(value):
        raise InputError(f"{name} takes a Dask 'get', such as dask.threaded.get, got {shown(value)}")
    return value


class CallOptions(TypedDict, total=False):
    """Options of a call of ``fit`` that a newcomer meets."""

    workdir: Annotated[str | Path | None, Option(None, "neither", check=path_of)]
    """The run directory, created if absent; default: <model>.run beside the file, or <Class>.run in the
    current folder for a module."""
    resume: Annotated[bool | Literal["restart"], Option(True, "neither", check=_resume)]
    """Resume an existing run, or return it if it is finished. False refuses an existing run, "restart" starts
    over. A run of a module resumes with the run's own weights, whatever the module's are now. More ``epochs``
    or ``steps`` extend a run; with fewer than it has done it is returned as it is. The learning rate of
    completed steps must be unchanged; ``oocdl.optim.Then`` appends another."""
    client: Annotated[Any, Option(None, "plan", check=anything)]
    """A ``distributed.Client`` whose workers train, a Dask cluster, the address of a scheduler ("tcp://..")
    or the path of a scheduler file; None: this process trains. Workers may come and go: if some are lost, the
    run continues from its last commit with the same bits; if all are, it waits for ``wait_seconds`` and then
    raises ResourceError, resumable."""
    callbacks: Annotated[Sequence[Listener], Option((), "neither", check=listeners)]
    """Callables that receive each event (``oocdl.events``)."""
    progress: Annotated[bool, Option(True, "neither")]
    """Show progress: a live line on a terminal, else lines of text."""
    dashboard: Annotated[bool | int, Option(False, "neither", check=_page)]
    """Show the run live on a page whose address is printed. A number is its port. A process of its own, not
    counted in the budget, serves it until the run ends; ``oocdl dashboard RUN`` shows it again. With a client
    the page is always in Dask's dashboard, and True prints its address."""


class FurtherCallOptions(TypedDict, total=False):
    """Further options of a call of ``fit``."""

    dynamic: Annotated[Axes, Option(None, "plan", check=anything)]
    """Axes of a module's inputs whose sizes stay open for predictions: "space", "batch", axis numbers, or a
    mapping from input to these; default: every axis whose size the module does not fix."""
    verify: Annotated[bool, Option(True, "neither")]
    """Compare a module numerically with its exported file; False trusts the exporter, and the run says so."""
    replan: Annotated[bool, Option(False, "plan")]
    """Make a new plan on resume, which changes rounding."""
    plan: Annotated[Plan | str | Path | None, Option(None, "plan", check=given_plan)]
    """The directory of another run, or a ``Plan``, whose cuts are repeated: the same bits on any number of
    workers."""
    wait_seconds: Annotated[float, Option(WAIT_SECONDS, "neither")]
    """Maximum seconds to wait for the first worker of a client."""
    silent_seconds: Annotated[float, Option(SILENT_SECONDS, "neither", check=_silent)]
    """Seconds without a heartbeat after which a worker of a client is given up, and the run goes on without
    it. A worker whose process ends is noticed at once."""
    scheduler: Annotated[Callable[..., Any] | None, Option(None, "neither", check=_get)]
    """A Dask ``get`` such as ``dask.threaded.get`` for a run in this process; None: oocdl's own."""
    trace: Annotated[str | Path | None, Option(None, "neither", check=checked_path)]
    """File for a trace of one step, for ui.perfetto.dev (Chrome's trace event format). It is the third step
    of this call, or the last if there are fewer. Results do not change."""


class FurtherOptions(settings.SettingOptions, settings.ValidationOptions, FurtherCallOptions, total=False):
    """The options of ``fit`` that its signature does not list."""


class Options(
    settings.CommonOptions,
    settings.LengthOptions,
    settings.PassOptions,
    CallOptions,
    FurtherOptions,
    total=False,
):
    """All options of ``fit`` and ``plan``, by name."""


ALL_OPTIONS: Mapping[str, Option] = options_of(Options)
Options.__doc__ = f"{Options.__doc__}\n\n" + "\n".join(entry(n, one.doc) for n, one in ALL_OPTIONS.items())


@dataclass(frozen=True)
class Call:
    """Checked values of the options of a call of ``fit`` that no settings are made of."""

    workdir: Path | None
    resume: bool | Literal["restart"]
    client: Any
    callbacks: Sequence[Listener]
    progress: bool
    dashboard: bool | int
    dynamic: Axes
    verify: bool
    replan: bool
    plan: Mapping[str, Any] | None
    """Data to make the given plan again; None: none is given."""
    wait_seconds: float
    silent_seconds: float
    scheduler: Callable[..., Any] | None
    trace: Path | None


def read_call(**options: Unpack[Options]) -> tuple[Call, dict[str, Any]]:
    """Check the options of a call of ``fit``; returns it and, as they are given, those of its settings."""
    known = {name: record for name, record in ALL_OPTIONS.items() if name not in OPTIONS}
    given = {name: value for name, value in options.items() if name in known}
    return Call(**checked(known, given)), {n: value for n, value in options.items() if n in OPTIONS}
