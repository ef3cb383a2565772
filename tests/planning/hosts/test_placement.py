"""Placed passes as they have always been: digests of who does what, and of all that travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from oocdl.planning.hosts.exchange import exchange, homes_of
from oocdl.planning.hosts.placement import place
from tests.kit.plan_digest import placement_digest
from tests.kit.plans import cut_for, mlp_draft, unet_draft

MLP = [256, 512, 256, 256]
CASES = {
    ("mlp", 3, "batch"): "7434a31ce3ca7685",
    ("mlp", 4, "channels"): "8143709f3e56eb3b",
    ("unet", 2, "space"): "62ba25f19bdd0f17",
    ("unet", 3, "both"): "bd263967d57f4e76",
    ("unet", 8, "auto"): "354703915727eed8",
}
CUTS = {"batch": {"batch": 8}, "channels": {"channels": 8}, "space": {"space": (4,)}, "auto": {}}
CUTS["both"] = {"batch": 2, "space": (2, 2)}


@pytest.mark.parametrize(("network", "workers", "cut"), CASES)
def test_placement_is_what_it_was(tmp_path: Path, network: str, workers: int, cut: str) -> None:
    """To be changed only where another placement is meant."""
    draft = mlp_draft(tmp_path, MLP, 64) if network == "mlp" else unet_draft(tmp_path, 16, 8)
    compiled = cut_for(draft, 2, workers, **CUTS[cut])
    placed = place(compiled.graph, workers)
    made = exchange(compiled, placed, homes_of({"main": compiled}, {"main": placed}), workers)
    assert placement_digest(made) == CASES[network, workers, cut]
