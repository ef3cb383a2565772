"""Options of the whole test suite."""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import importlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils._pytree import tree_leaves, tree_structure

from oocdl.cli import app
from oocdl.config.settings import setting_names
from oocdl.graph.onnx.own_operators import OWN
from oocdl.planning import own_memory
from oocdl.planning.choice import pass_kinds
from oocdl.pytorch import example
from oocdl.pytorch import export as exporting
from oocdl.storage import files
from oocdl.storage.dataset.sample_stack import members_of

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

collect_ignore = ["graph/onnx/make_keras_files.py"]
"""It needs Keras."""


_LOADED_LATE = (
    "torch.optim.adam",
    "torch._dynamo",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "sympy.tensor.tensor",
    "sympy.physics.units",
    *(f"torch.onnx._internal.torchscript_exporter.symbolic_opset{number}" for number in range(7, 21)),
)
"""Modules that PyTorch loads on first use, and that each forked exporter would load again."""


_REAL = {name: getattr(gc, name) for name in ("freeze", "unfreeze", "get_freeze_count")}


@pytest.fixture(scope="module", autouse=True)
def _settled() -> Iterator[None]:
    """What a module has left alive is not gone through by each collection after it."""
    yield
    gc.collect()
    _REAL["freeze"]()


@pytest.fixture(scope="session", autouse=True)
def _frozen_lasts() -> Iterator[None]:
    """What importing has made is not counted, gone through and copied by each run and each exporter.

    A run would unfreeze it, and so would the search of an export for generators of NumPy's.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in _REAL:
            patch.setattr(gc, name, lambda: 1)
        yield


@pytest.fixture
def thaws(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is counted and unfrozen as it is outside of tests."""
    for name, function in _REAL.items():
        monkeypatch.setattr(gc, name, function)


@pytest.fixture(scope="session", autouse=True)
def _nominal_rates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans by nominal rates, not by those that somebody has measured on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.getbasetemp()
        together = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        (together / "cache").mkdir(mode=0o700, exist_ok=True)
        patch.setenv("XDG_CACHE_HOME", str(together / "cache"))  # loops are compiled once, not by each worker
        patch.setenv("OOCDL_MEASURE", "off")
        patch.setenv("OOCDL_PLAN_CACHE", "off")  # tests change the planner, of which the cache knows nothing
        patch.setattr(own_memory, "park", lambda *_: 0)  # other tests' threads decide that
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """Runs in this process do not wait for the disk: durability is tested by processes that are killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(files, "SYNC_THREADS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_once() -> Iterator[None]:
    """A process makes its commands once, this one for hundreds of command lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "get_group", functools.cache(app.get_group))
        yield


@pytest.fixture(scope="session", autouse=True)
def _torchlib_once() -> Iterator[None]:
    """PyTorch's newer exporter makes its table of functions once, not in 0.6 s of each export."""
    known, in_child = functools.cache(ONNXRegistry.from_torchlib), exporting.in_child

    def forked(what: str, *others: Any) -> Any:
        if "dynamo" in what:
            known(TORCHLIB_OPSET)  # before this process forks exporters
        return in_child(what, *others)

    def copied(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
        table = copy.copy(known(opset_version))
        table.functions = {name: list(functions) for name, functions in table.functions.items()}
        return table

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        patch.setattr(exporting, "in_child", forked)
        yield


@pytest.fixture
def own_operators() -> Iterator[dict[str, Any]]:
    """What is registered in a test is forgotten after it."""
    before = dict(OWN)
    yield OWN
    OWN.clear()
    OWN.update(before)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Modules begin with equal weights in each test, where they are exported once."""
    if "exported_once" in request.fixturenames:
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules of equal type, layers and state are exported once in a module that tests what comes after.

    So is an example of what they take sought once, in arrays of equal names, shapes and types.
    """
    export, find, folder = exporting.export, example.example_of, tmp_path_factory.mktemp("exported")
    made: dict[str, Any] = {}

    def digest_of(module: Any, given: Any, *others: Any) -> str:
        parts = [(part.training, type(part)) for part in module.modules()]
        leaves = [*module.state_dict(keep_vars=True).values(), *tree_leaves(given)]
        digest = hashlib.sha256(repr((module, parts, tree_structure(given), others)).encode())
        for leaf in leaves:
            digest.update(repr((leaf.shape, leaf.dtype, leaf.requires_grad)).encode())
            digest.update(leaf.detach().numpy().tobytes())
        return digest.hexdigest()

    def once(module: Any, given: Any, path: Any, *others: Any) -> Any:
        kept = folder / digest_of(module, given, others)
        if kept.name not in made:
            made[kept.name] = export(module, given, path, *others)
            shutil.copyfile(path, kept)
        shutil.copyfile(kept, path)
        return made[kept.name]

    def found_once(module: Any, dataset: Any, settings: Any) -> Any:
        arrays = [(name, one.shape, one.dtype, len(members_of(one))) for name, one in dataset.arrays.items()]
        key = digest_of(module, (), arrays, settings.inputs, settings.batch_size)
        if key not in made:
            made[key] = find(module, dataset, settings)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "export", once)
        patch.setattr(example, "example_of", found_once)
        yield


@pytest.fixture(scope="module")
def planned_once() -> Iterator[None]:
    """Equal settings are planned once in a module: half the time of its runs, which are what it tests."""
    made: dict[str, Any] = {}
    names = setting_names(lambda option: option.changes == "plan")

    def sizes(binding: Any) -> Any:
        arrays = [(one.label, one.shape, one.dtype, one.chunks) for one in binding.arrays.values()]
        return binding.inputs, binding.targets, arrays

    def once(
        model: Any, bindings: Any, settings: Any, machine: Any, course: Any, frozen: Any, validations: Any
    ) -> Any:
        # The process is not equally large each time; a plan is another where much less is left.
        rough = machine.capacity_bytes >> 28 if machine.capacity_bytes >> 30 else machine.capacity_bytes
        key = repr((
            hashlib.sha256(model.path.read_bytes()).digest(),
            [getattr(settings, name) for name in names], frozen, course.passes,
            replace(machine, base_bytes=0, reserved_bytes=0, capacity_bytes=rough),
            course.kinds, course.validation_kinds,
            [{label: sizes(one) for label, one in each.items()} for each in (bindings, validations)],
        ))  # fmt: skip
        if key not in made:
            how = settings, machine, course, frozen, validations
            # Settings stay alive: no other object gets an address that the key has.
            made[key] = settings, pass_kinds.compile_passes(model, bindings, *how)
        return made[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oocdl.training.job.compile_passes", once)
        yield


def pytest_collection_finish() -> None:
    """Nor what importing has, in collections that tests ask for."""
    for name in _LOADED_LATE:
        importlib.import_module(name)
    gc.collect()
    _REAL["freeze"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run the full products too, minutes instead of seconds"
    )
    parser.addoption("--update-golden", action="store_true", help="write the texts in tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: part of a full product, run with --slow")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell has it that runs us in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
