"""Versions of a run that can be read: its last, and those that callbacks have kept."""

from __future__ import annotations

from typing import Literal

from oocdl.errors import InputError
from oocdl.ops.optimizers import average_of
from oocdl.storage.run.run_store import RunStore

Which = Literal["last", "best", "ema"] | int | None
"""A version of a run: its last, the best that is kept, the last with averaged weights, or that of a step."""


def kept_steps(store: RunStore) -> tuple[int, ...]:
    """Return the steps whose versions callbacks have kept, the best first."""
    manifest = store.current()
    return () if manifest is None else tuple(manifest.meta.get("checkpoints", ()))


def version_of(store: RunStore, which: Which = None) -> RunStore:
    """Open a version; for None the one that early stopping has restored, else the last.

    Raises InputError if the run does not keep it.
    """
    manifest, kept = store.current(), kept_steps(store)
    if manifest is None or which == "last":
        return store
    if which == "best" and not kept:
        raise InputError(
            f"the run in {store.path} keeps no best version; train with validation= and "
            "callbacks=[oocdl.callbacks.ModelCheckpoint()]"
        )
    if which == "ema":
        averages = {name: average_of(name) for name in manifest.tensors}
        averages = {name: other for name, other in averages.items() if other in manifest.tensors}
        if not averages:
            raise InputError(f"the run in {store.path} has no averages of weights; train with ema=0.999")
        return store.reading(averages)
    if which is not None and which != "best" and (isinstance(which, bool) or not isinstance(which, int)):
        raise InputError(f"which is 'last', 'best', 'ema' or a step that is kept, got {which!r}")
    step = kept[0] if which == "best" else which
    step = manifest.meta.get("restored") if step is None else step
    return store if step is None else store.at(step)
