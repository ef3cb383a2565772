from . import (
    callbacks,
    cluster,
    data,
    errors,
    events,
    losses,
    metrics,
    ops,
    optim,
    presets,
    space,
    transforms,
)
from .events import Stop
from .pytorch.door import from_torch
from .report.plan_view import Plan
from .report.scaling import Scaling
from .storage.run.repair import repair, verify
from .training.call import Options
from .training.prediction.outputs import predict
from .training.run import Run
from .training.simulation import simulate
from .training.trainer import fit, open, plan
from .tuning.search import Search, search

__version__: str

__all__ = [
    "Options",
    "Plan",
    "Run",
    "Scaling",
    "Search",
    "Stop",
    "callbacks",
    "cluster",
    "data",
    "errors",
    "events",
    "fit",
    "from_torch",
    "losses",
    "metrics",
    "open",
    "ops",
    "optim",
    "plan",
    "predict",
    "presets",
    "repair",
    "search",
    "simulate",
    "space",
    "transforms",
    "verify",
]
