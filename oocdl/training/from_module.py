"""``fit`` and ``plan`` with a module of PyTorch in the place of a file: its file goes into the run."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from oocdl.config import Settings
from oocdl.errors import InputError, StoreError
from oocdl.graph.onnx.onnx_file import network_differences
from oocdl.graph.onnx.reader import inspect_onnx
from oocdl.pytorch.door import from_dataset
from oocdl.pytorch.exported import Asked
from oocdl.storage.run.run_store import EXPORT_FOLDERS, MODULE_FILES
from oocdl.storage.run.sealed_files import read_sealed
from oocdl.training.call import Call


def is_module(model: Any) -> bool:
    """Whether ``model`` is a ``torch.nn.Module``; does not import PyTorch to find out."""
    # Another thread may be at importing it.
    kind = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return kind is not None and isinstance(model, kind)


@contextmanager
def planned_file(model: Any, dataset: Any, settings: Settings, asked: Asked) -> Iterator[tuple[Any, Any]]:
    """Give ``model`` if it is a path; of a module, a file that is there until the block ends.

    Gives ``dataset`` too: as it is, or open where a module had to be called with its samples.
    """
    if not is_module(model):
        yield model, dataset
        return
    with tempfile.TemporaryDirectory(prefix="oocdl-") as folder:
        path = Path(folder) / f"{type(model).__name__}.onnx"
        yield path, from_dataset(model, dataset, settings, path, asked)


@contextmanager
def trained_file(
    model: Any, dataset: Any, settings: Settings, call: Call
) -> Iterator[tuple[Any, Path | None, Any]]:
    """Give ``model`` and ``workdir`` if it is a path; of a module, a file in the run directory, and that.

    Gives ``dataset`` too, as ``planned_file`` does.

    A run that is there goes on with its own file and weights, if the module is the same network: what its
    weights are now does not count. Raises InputError that says what differs if it is another one.
    """
    if not is_module(model):
        yield model, call.workdir, dataset
        return
    folder = (call.workdir or Path(f"{type(model).__name__}.run")).absolute()
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / MODULE_FILES.replace("*", token_hex(4))
    try:
        if call.resume is False and _file_of(folder) is not None:
            raise StoreError(f"a run is in {folder} already; pass resume=True to go on, or resume='restart'")
        data = from_dataset(model, dataset, settings, new, call.asked)
        old = _file_of(folder) if call.resume is True else None
        if old is not None:
            way_out = "choose another workdir, or resume='restart'"
            check_same(old, new, f"the run in {folder}", way_out)
        yield old or new, folder, data
    finally:
        used = _file_of(folder)
        for file in folder.glob(f"{MODULE_FILES}*"):
            ours = file.name.startswith(new.name)
            named = used is not None and file.name.startswith(used.name)
            if not named and (ours or used == new):
                file.unlink(missing_ok=True)
        for left in folder.glob(EXPORT_FOLDERS) if used == new else ():
            shutil.rmtree(left, ignore_errors=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()


def name_in_run(model: Path, folder: Path) -> Path:
    """Return how a run names its model: one that lies in it goes with it wherever it is moved."""
    return Path(model.name) if model.parent == folder.absolute() else model


def _file_of(folder: Path) -> Path | None:
    """Return the model file of the run in ``folder``; None if there is no run."""
    found = read_sealed(folder / "run.json")
    return None if found is None else folder / str(found[0]["model"])


def check_same(old: Path, new: Path, what: str, way_out: str) -> None:
    """Raise InputError if a module is another network than the one that something was begun with."""
    found = network_differences(inspect_onnx(old), inspect_onnx(new))
    if found:
        raise InputError(f"{what} is of another network: {found}; {way_out}")
