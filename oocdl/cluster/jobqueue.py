"""Imports dask-jobqueue's clusters, and undoes the handler of Ctrl-C that the import sets.

Its module ``runner`` sets a handler of SIGINT that exits wherever the process is, even in a commit.
"""

from __future__ import annotations

import signal
from typing import Any

_ctrl_c = signal.getsignal(signal.SIGINT)

from dask_jobqueue.htcondor import HTCondorCluster  # noqa: E402
from dask_jobqueue.lsf import LSFCluster  # noqa: E402
from dask_jobqueue.pbs import PBSCluster  # noqa: E402
from dask_jobqueue.sge import SGECluster  # noqa: E402
from dask_jobqueue.slurm import SLURMCluster  # noqa: E402

signal.signal(signal.SIGINT, _ctrl_c)

CLUSTERS: dict[str, Any] = {
    "slurm": SLURMCluster,
    "pbs": PBSCluster,
    "sge": SGECluster,
    "lsf": LSFCluster,
    "htcondor": HTCondorCluster,
}
