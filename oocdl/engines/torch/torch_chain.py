"""Chains on PyTorch: one loop over tensors, whose results may take the memory of operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from oocdl.fusion.chain import Chain, Kind, crop
from oocdl.fusion.executor import AnyChainStep
from oocdl.fusion.loop_nest import Key
from oocdl.fusion.team import Team
from oocdl.graph.ir.graph import Array, Shape

Spare = Callable[[int], Sequence[int]]


class ChainStep(AnyChainStep[Tensor]):
    """A chain on tensors."""

    def __init__(
        self, chain: Chain, needed: frozenset[int], spare_of: Spare, dtype_of: Mapping[int, str], team: Team
    ) -> None:
        """``needed``: slots that are read after the chain. ``dtype_of``: of each slot.

        ``spare_of``: slot made whole -> slots that end here, whose memory it may take, best first.
        """
        super().__init__(chain, needed, dtype_of, torch, team)
        self.reuse = self._reuse(spare_of, dtype_of)

    def _reuse(self, spare_of: Spare, dtype_of: Mapping[int, str]) -> dict[int, int]:
        """Slot made whole -> slot that ends here, whose memory it may take.

        It may be any that lies as the result does: at each place all is read before anything is written.
        """
        found: dict[int, int] = {}
        for item in self.chain.members:
            for slot, shape in zip(item.outputs, item.kernel_shapes, strict=True):
                if slot not in self.full or shape != self.chain.domain:
                    continue
                for old in spare_of(slot):
                    seen = [key for key in self.columns if isinstance(key, tuple) and key[0] == old]
                    free = old not in found.values() and dtype_of[old] == dtype_of[slot]
                    if free and seen == [(old, None, shape)]:
                        found[slot] = old
                        break
        return found

    def copies(self, key: Key, array: Tensor) -> bool:
        """Whether the loop takes a copy of an operand whose slot's array lies like this one."""
        part = crop(array, key[1])
        seen = self._seen(part, key[2])
        # What has gaps or turned axes, and none in another shape, was copied to be seen in it.
        anew = not self.chain.channels_last and seen.is_contiguous() and not part.is_contiguous()
        return anew or self.loop.place(self._view(seen)) is None

    def _whole(
        self, slot: int, kind: Kind, slots: Mapping[int, Tensor], places: Mapping[int, Tensor]
    ) -> Tensor:
        if slot in places:
            place = self._seen(places[slot], kind[0])
            assert place.data_ptr() == places[slot].data_ptr(), "a result would go to a copy of its place"
            return place
        if slot in self.reuse:
            reused = self.reuse[slot]
            # An input may have a place, too: the one that is written instead of it.
            old = self._seen(places.get(reused, slots[reused]), kind[0])
            if old.is_contiguous() and old.dtype == getattr(torch, kind[1]):
                return old
        return torch.empty(kind[0], dtype=getattr(torch, kind[1]))

    def _address(self, array: Tensor) -> int:
        return array.data_ptr()

    def _lying(self, array: Tensor) -> tuple[Shape, tuple[int, ...]]:
        return array.shape, array.stride()

    def _unit(self, array: Tensor) -> int:
        return array.element_size()

    def _copy(self, array: Tensor) -> Tensor:
        return array.contiguous()

    def _of_numpy(self, array: Array, dtype: str) -> Tensor:
        return torch.from_numpy(array).to(getattr(torch, dtype))
