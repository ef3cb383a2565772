"""``Chunk``: the handle of a stored piece of a value, which a Dask task returns and Dask holds.

The process's ``Tier`` keeps the bytes. Pickling a chunk ships them, and unpickling gives them to the tier of
the process it arrives in, so a chunk never refers to another process. Dropping the last reference frees them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oocdl.graph.ir.array_layout import (
    Array,
    DeviceArray,
    Order,
    as_numbered,
    as_stored,
    in_memory_order,
    ordered,
)
from oocdl.graph.ir.index import Region, as_slices, region_shape, within
from oocdl.storage.cache.ledger import Entry
from oocdl.storage.cache.spill_store import SpillFile

Uses = tuple[int, ...]


class Slot(Entry):
    """Says where the bytes of one chunk are, and what holds them; the tier's lock guards every field."""

    __slots__ = ("array", "device", "dtype", "file", "outer", "shape")

    def __init__(self, array: Array, uses: Uses, outer: int = 0, device: DeviceArray | None = None) -> None:
        super().__init__(array.nbytes, uses)
        self.array: Array | None = array
        self.device = device  # the same on a device, from which ``array`` is filled once it is wanted
        self.file: SpillFile | None = None  # set: the spill has it, RAM may be dropped
        self.shape = array.shape
        self.dtype = array.dtype
        self.outer = outer  # the axis that is outermost in the spill

    @property
    def spilled(self) -> bool:
        return self.file is not None

    def leave_ram(self) -> None:
        self.array = None

    def settle(self) -> None:
        """Fill ``array`` if only a device has its bytes. Waits for the device: not under the tier's lock."""
        if (device := self.device) is not None:  # it may be dropped meanwhile
            device.settle()


def outermost(stored: Array, order: Order, axis: int) -> int:
    """Return the position of ``axis`` in ``stored``; 0 if only axes of one element are outside of it."""
    place = order.index(axis) if order else axis
    return 0 if stored.shape[:place] == (1,) * place else place


class Home:
    """Where chunks are: in plain memory, in a process without a tier; ``Tier`` is the other home."""

    def read(self, slot: Slot, box: Region, out: Array) -> None:
        """Copy ``box`` (relative to the chunk) into ``out``, from RAM or from the spill."""
        np.copyto(out, self.view(slot)[as_slices(box)])

    def view(self, slot: Slot) -> Array:
        """Return the array of a pinned chunk; ValueError if no reservation pins it."""
        slot.settle()
        assert slot.array is not None
        return slot.array

    def drop(self, slot: Slot) -> None:
        """Queue a chunk whose handle is gone. Takes no lock: the collector may call it anywhere."""
        slot.array = None

    def adopt(self, array: Array, region: Region, uses: Uses) -> Chunk:
        stored, order = in_memory_order(array)
        return Chunk(self, Slot(stored, uses), region, order)


_home = Home()


def home() -> Home:
    """The home that takes chunks which arrive in this process: plain memory, or its tier."""
    return _home


def use(new: Home | None) -> None:
    """Choose the home of chunks that arrive in this process; None: they stay in plain memory."""
    global _home
    _home = new or Home()


class Chunk:
    """A handle of one region of a value. Made by ``Reservation.put`` and ``Tier.adopt`` only.

    ``region`` says which part of the value it is, in the coordinates of the whole value; ``order`` lists
    the axes from outermost to innermost in memory, and is empty where they lie as they are numbered.
    """

    __slots__ = ("__weakref__", "home", "order", "region", "slot")

    def __init__(self, home: Home, slot: Slot, region: Region, order: Order = ()) -> None:
        shape = region_shape(region)
        if (tuple(shape[axis] for axis in order) or shape) != slot.shape:
            raise ValueError(f"region {region} does not have the shape {slot.shape} in order {order}")
        self.home, self.slot, self.region, self.order = home, slot, region, order

    @property
    def shape(self) -> tuple[int, ...]:
        return region_shape(self.region)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.slot.dtype

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes

    @property
    def footprint_bytes(self) -> int:
        return self.slot.footprint_bytes

    def read(self, region: Region, out: Array) -> None:
        """Copy ``region`` (in the coordinates of the whole value) into ``out``, which may be strided.

        Bytes come from RAM, or straight from the spill. Raises ValueError for a region that is not inside the
        chunk or another shape or dtype of ``out``, StoreError if the spill cannot be read.
        """
        box = tuple((part.start, part.stop) for part in within(region, self.region))
        for (start, stop), extent in zip(box, self.shape, strict=True):
            if not 0 <= start <= stop <= extent:
                raise ValueError(f"region {region} is not inside the chunk {self.region}")
        if out.shape != region_shape(region) or out.dtype != self.dtype:
            raise ValueError(f"out is {out.dtype} {out.shape}, region {region} is {self.dtype}")
        box = tuple(box[axis] for axis in self.order) or box
        self.home.read(self.slot, box, as_stored(out, self.order))

    def on_device(self) -> Any:
        """Return what keeps the chunk on a device as long as it is referred to; None: it is not there."""
        device = self.slot.device
        return None if device is None else device.hold()

    def array(self) -> Array:
        """Return the array in RAM, read-only and not copied; ValueError if no reservation pins the chunk."""
        return self.seen(self.home.view(self.slot))

    def seen(self, stored: Array) -> Array:
        """``stored``, which has the chunk's elements as they lie, read-only and with axes as numbered."""
        view = stored.view()
        view.flags.writeable = False
        return as_numbered(view, self.order)

    def copy(self) -> Array:
        """Return a new array with all of the chunk. The tier does not count its memory."""
        out = ordered(np.empty, self.shape, self.dtype, self.order)
        self.read(self.region, out)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        # In RAM the array itself is handed to the pickler, which can send it without a copy.
        self.slot.settle()
        array = self.slot.array
        stored = as_stored(self.copy(), self.order) if array is None else array
        return _restore, (stored, self.region, self.slot.uses, self.order)

    def __del__(self) -> None:
        # The collector may run this inside a tier's lock: drop() takes none.
        if hasattr(self, "slot"):
            self.home.drop(self.slot)

    def __repr__(self) -> str:
        return f"Chunk({self.dtype}, {self.region})"


def _restore(stored: Array, region: Region, uses: Uses, order: Order) -> Chunk:
    return _home.adopt(as_numbered(stored, order), region, uses)
