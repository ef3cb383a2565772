"""Bytes and seconds of each worker, against what is counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from oocdl.planning.calls import PickCall
from oocdl.planning.cost_model import call_seconds
from oocdl.planning.tile_search import Limits
from tests.kit.host_costs import HostCost, host_costs
from tests.kit.plans import cut_for, exchanged, mlp_draft


def costs_of(folder: Path, workers: int) -> tuple[HostCost, ...]:
    """Of two linear layers of 256 KiB weights, of which two workers have half of the samples each."""
    compiled = cut_for(mlp_draft(folder, [256, 256, 256], 512), 1, 2, batch=2)
    return host_costs(exchanged(compiled, workers), workers)


def test_two_workers_exchange_sums_of_gradients_and_new_weights(tmp_path: Path) -> None:
    first, second = costs_of(tmp_path, 2)
    assert first.held_bytes + second.held_bytes == 3 * 2 * 256 * 256 * 4  # weights and Adam's two moments
    # Of each weight a sum to where it lives, the new weight back; and a few numbers of the loss.
    sent = first.sent_bytes + second.sent_bytes
    assert 0 <= sent - 2 * 2 * 256 * 256 * 4 < 4096
    assert first.received_bytes == second.sent_bytes and second.received_bytes == first.sent_bytes
    assert first.peak_bytes > first.held_bytes and second.peak_bytes > second.held_bytes


def test_one_worker_has_all_and_sends_nothing(tmp_path: Path) -> None:
    (alone,) = costs_of(tmp_path, 1)
    assert (alone.sent_bytes, alone.received_bytes) == (0, 0)
    assert alone.held_bytes == 3 * 2 * 256 * 256 * 4
    compiled = mlp_draft(tmp_path, [256, 256, 256], 512).cut(Limits(1 << 30))
    (cost,) = host_costs(exchanged(compiled, 1), 1)
    calls = [call for call in compiled.graph.calls if not isinstance(call, PickCall)]
    assert cost.calls == len(calls)
    assert cost.compute_seconds == pytest.approx(sum(call_seconds(compiled.graph.calls)))
    # At the end old weights and state are there beside new ones, and some call has its arrays beside the old.
    assert cost.peak_bytes >= cost.held_bytes + max(call.buffer_bytes for call in calls)


def test_disks_have_room_for_what_is_in_memory_too(tmp_path: Path) -> None:
    """Old and new weights and state, beside what is made on the way; no buffers of calls."""
    for cost in costs_of(tmp_path, 2):
        assert 2 * cost.held_bytes <= cost.disk_bytes < cost.peak_bytes
