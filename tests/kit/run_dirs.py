"""Run directories with versions of three tensors, whose content follows from the version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oocdl.graph.ir.index import whole
from oocdl.storage.checksums import digest_of, sealed, unsealed
from oocdl.storage.run.commit import Commit
from oocdl.storage.run.manifest import Manifest, TensorSpec
from oocdl.storage.run.pointer import load_current, next_epoch, publish
from oocdl.storage.run.run_store import RunStore

W = TensorSpec("model/../w\n", "weights", (5, 6), "float32", (2, 3))
M = TensorSpec("model/../w\n.m", "state", (7,), "float64", (4,))
B = TensorSpec("b", "weights", (), "int64", ())
SPECS = (W, M, B)


def content(spec: TensorSpec, version: int) -> np.ndarray:
    rng = np.random.default_rng([version, len(spec.shape)])
    return np.asarray(rng.random(spec.shape) * 1000).astype(spec.dtype)


def commit(store: RunStore, version: int, specs: tuple[TensorSpec, ...] = SPECS) -> Commit:
    made = store.begin(version, specs)
    for spec in specs:
        made.write(spec.name, whole(spec.shape), content(spec, version))
    return made


def two_versions(root: Path) -> Path:
    """Write a run with versions 1 and 2, of steps 10 and 20."""
    with RunStore.create(root, {"seed": 7}) as store:
        assert store.current() is None
        commit(store, 1).finish({"step": 10})
        commit(store, 2).finish({"step": 20, "rng": [1, 2]})
    return root


def check(store: RunStore, version: int, specs: tuple[TensorSpec, ...] = SPECS) -> None:
    current = store.current()
    assert current is not None
    assert current.version == version
    for spec in specs:
        assert np.array_equal(store.read(spec.name, whole(spec.shape)), content(spec, version))


def rewrite(root: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Make another manifest current, with sound digests, as its writer could have made it."""
    manifest, pointer = load_current(root)
    assert manifest is not None
    publish(root, replace(change(manifest), epoch=next_epoch(root)), pointer)


def rewrite_meta(root: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Put other facts into ``run.json``, with sound digests, as another version of oocdl could have."""
    path = root / "run.json"
    text = sealed("run", change(unsealed("run", path.read_text())))
    path.write_text(text)
    path.with_name("run-copy.json").write_text(text)
    rewrite(root, lambda manifest: replace(manifest, seals={**manifest.seals, "run.json": digest_of(text)}))
