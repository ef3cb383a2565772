"""oocdl: train neural networks that do not fit in memory, exactly.

>>> import oocdl
>>> run = oocdl.fit("unet.onnx", "brain.zarr", memory="2GiB")  # doctest: +SKIP
"""

from oocdl import callbacks, cluster, errors, events, losses, ops, optim, space
from oocdl.pytorch.door import from_torch
from oocdl.report.plan_view import Plan
from oocdl.report.scaling import Scaling
from oocdl.storage.run.repair import repair
from oocdl.storage.run.run_verification import verify
from oocdl.training.call import Options
from oocdl.training.run import Run
from oocdl.training.simulation import simulate
from oocdl.training.trainer import fit, open, plan
from oocdl.tuning.search import Search, search

__version__ = "0.1.0"

__all__ = [
    "Options",
    "Plan",
    "Run",
    "Scaling",
    "Search",
    "callbacks",
    "cluster",
    "errors",
    "events",
    "fit",
    "from_torch",
    "losses",
    "open",
    "ops",
    "optim",
    "plan",
    "repair",
    "search",
    "simulate",
    "space",
    "verify",
]
