"""``python -m oocdl.cli.predict_sample RUN SAMPLE FILE``: predicts a sample of a run, for its page.

The file has the classes, thinned, and Dice of each over all voxels but those whose label the loss ignores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from oocdl.dashboard.facts import RunFacts, read_facts
from oocdl.dashboard.live_log import FACTS, FOLDER
from oocdl.dashboard.samples import dataset_of, space_of, strides_of
from oocdl.errors import InputError, OocdlError
from oocdl.host.limits import available
from oocdl.ops.loss_functions import labels_of
from oocdl.storage.dataset.dataset import Dataset
from oocdl.storage.dataset.sample_stack import MARK, own_sized
from oocdl.storage.run.run_store import RunStore
from oocdl.training.run import Run
from oocdl.training.trainer import open as open_run

MOST_CLASSES, SAMPLE = 64, "sample"


def predict(run: Path, number: int, out: Path) -> None:
    """Predict a sample, and write what the page shows. Raises what ``Run.predict`` raises."""
    facts, made = read_facts((run / FOLDER / FACTS).read_text()), open_run(run)
    dataset, memory = dataset_of(facts), min(facts.budget_bytes, available().nbytes // 2)
    with tempfile.TemporaryDirectory(prefix="oocdl-predicted-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the spill's place
        one = _one_sample(Path(folder) / "one.zarr", facts, dataset, number)
        found = made.predict(one, Path(folder) / "out.zarr", memory=memory)
        for name, array in sorted(found[SAMPLE].arrays()):  # type: ignore[union-attr]
            axes = space_of(array.shape[1:], True)
            if axes is not None:
                target, ignored = _target_of(facts, dataset, number, axes), _ignored(made, str(name), array)
                labels, dice = _classes(array, target, number, ignored)
                manifest = RunStore.open(run).current()
                best = None if manifest is None else manifest.meta.get("restored")
                version = "the last commit" if best is None else f"step {best}, the best by its validation"
                told: dict[str, Any] = {"name": str(name), "version": version}
                np.savez(out, labels=labels, classes=list(dice), dice=list(dice.values()), **told)
                return
    raise InputError("the network predicts no image and no volume")


def _one_sample(path: Path, facts: RunFacts, dataset: Dataset, number: int) -> Path:
    group = zarr.open_group(str(path), mode="w", attributes={MARK: {"samples": [SAMPLE]}})
    for name in dict.fromkeys(name for role, name in facts.images if role == "input"):
        array = own_sized(dataset.arrays[name], number)
        box = ((number, number + 1), *((0, extent) for extent in array.shape[1:]))
        group.create_array(f"{SAMPLE}/{name}", data=array.read(box)[0])
    return path


def _target_of(facts: RunFacts, dataset: Dataset, number: int, axes: tuple[int, ...]) -> Any:
    targets = (own_sized(dataset.arrays[name], number) for role, name in facts.images if role == "target")
    labels = (array for array in targets if np.issubdtype(array.dtype, np.integer))
    return next((array for array in labels if array.shape[-len(axes) :] == axes), None)


def _ignored(run: Run, output: str, array: Any) -> int | None:
    loss = run.settings.loss
    spec = loss.get(output, (None,))[0] if isinstance(loss, Mapping) else loss
    known = None if spec is None else labels_of(spec, (1, *array.shape), (1, *array.shape[1:]))
    return None if known is None else known.ignore_index


def _classes(
    array: Any, target: Any, number: int, ignored: int | None
) -> tuple[np.ndarray, dict[int, float]]:
    axes, strides, slab = array.shape[1:], strides_of(array.shape[1:]), array.chunks[1]
    counts, parts = np.zeros((MOST_CLASSES, MOST_CLASSES), np.int64), []
    for low in range(0, axes[0], slab):
        high = min(low + slab, axes[0])
        logits = np.asarray(array[:, low:high])
        found = logits.argmax(axis=0) if logits.shape[0] > 1 else (logits[0] > 0).astype(np.int64)
        if target is not None:
            lead = [(0, 1)] * (len(target.shape) - 1 - len(axes))
            box = ((number, number + 1), *lead, (low, high), *((0, extent) for extent in axes[1:]))
            labels = target.read(box).reshape(found.shape).astype(np.int64)
            counted = np.full(found.shape, True) if ignored is None else labels != ignored
            meant, kept = (np.clip(of[counted], 0, MOST_CLASSES - 1) for of in (labels, found))
            pairs = np.bincount(MOST_CLASSES * meant + kept, minlength=counts.size)
            counts += pairs.reshape(counts.shape)
        rows = slice(-low % strides[0], None, strides[0])
        parts.append(found[(rows, *(slice(None, None, step) for step in strides[1:]))].astype(np.uint8))
    sums = counts.sum(axis=0) + counts.sum(axis=1)
    dice = {int(n): float(2 * counts[n, n] / sums[n]) for n in np.flatnonzero(sums)}
    return np.concatenate(parts), dice


if __name__ == "__main__":
    os.nice(10)  # the one that trains goes first
    try:
        predict(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    except (OocdlError, OSError) as error:
        sys.exit(" ".join(str(error).split()))
