"""Workers whose limit is less than an engine with the pages of its libraries."""

from __future__ import annotations

import os

import torch
from distributed import Client, LocalCluster

from oocdl.runtime.cluster import crew


def test_a_nanny_leaves_a_worker_alone_that_loads_an_engine() -> None:
    memory = "300MiB" if torch.version.cuda is None else "450MiB"  # PyTorch's CUDA build alone takes 300
    limit = {"n_workers": 1, "threads_per_worker": 1, "memory_limit": memory, "dashboard_address": None}
    with LocalCluster(**limit) as cluster, Client(cluster, set_as_default=False) as client:
        before = client.run(os.getpid)
        told: list[str] = []
        (recruit,), refusals = crew.gather(client, 30.0, told.append, engine="torch")
        assert client.run(os.getpid) == before and recruit.own_bytes < recruit.limit_bytes
        assert not refusals and not told
