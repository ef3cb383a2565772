"""Starts workers as jobs of a batch system, by dask-jobqueue: ``oocdl.cluster.slurm(nodes=4, ...)``."""

from oocdl.cluster.systems import htcondor, lsf, pbs, sge, slurm

__all__ = ["htcondor", "lsf", "pbs", "sge", "slurm"]
