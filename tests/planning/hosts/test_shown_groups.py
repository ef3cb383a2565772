"""Tasks that show layers: none where they would be longer than what they show."""

from __future__ import annotations

import pytest

from oocdl.planning.hosts import shown_groups as module
from oocdl.planning.hosts.exchange import Exchange, exchange, homes_of
from oocdl.planning.hosts.placement import place
from oocdl.planning.hosts.shown_groups import shown_groups
from tests.kit.plans import cut_for, unet_draft


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    compiled = cut_for(unet_draft(tmp_path_factory.mktemp("unet"), 16, 8), 2, 4, space=(4,))
    placed = place(compiled.graph, 2)
    return exchange(placed, homes_of([placed]), 2)


def worked_at(unet: Exchange, member: int) -> list[int]:
    pairs = zip(unet.placed.workers.tolist(), unet.group_of, strict=True)
    return sorted({group for worker, group in pairs if worker == member})


def test_a_short_pass_has_no_tasks_that_show_layers(unet: Exchange) -> None:
    assert shown_groups(unet, 2, 1) == [(), ()]
    assert shown_groups(unet, 3, 1)[2] == ()  # who has no work


def test_layers_are_shown_in_order_and_the_last_by_the_end(
    unet: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN_SECONDS", 1e-3)
    monkeypatch.setattr(module, "MOST_SHOWN", 100)
    for member, shown in enumerate(shown_groups(unet, 2, 1)):
        groups = [group for together in shown for group in together]
        works = worked_at(unet, member)
        assert len(shown) > 3
        assert groups == works[: len(groups)] and len(groups) < len(works)
    half = shown_groups(unet, 2, 2)  # with twice as many threads layers are shorter
    assert len(half[0]) < len(shown_groups(unet, 2, 1)[0])


@pytest.mark.parametrize("most", [1, 7])
def test_there_are_no_more_tasks_than_may_be(
    unet: Exchange, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN_SECONDS", 0)
    monkeypatch.setattr(module, "MOST_TASKS", 2 * most)
    shown = shown_groups(unet, 2, 1)
    assert max(map(len, shown)) <= most
    assert most == 1 or min(map(len, shown)) > 1
