"""Every stored object of a run x every damage: found, typed, before a number of it is used; and repaired."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from oocdl.errors import CorruptError, StoreError
from oocdl.graph.ir.index import whole
from oocdl.storage.run.repair import repair, verify
from oocdl.storage.run.run_store import RunStore
from tests.kit.run_dirs import SPECS, B, M, W, check, commit, content
from tests.kit.stored import NO_FILES, flip, shorten

OBJECTS = {
    "weight chunk": "weights/t00000/e1-v{version}/c.0.1",
    "scalar chunk": "weights/t00002/e1-v{version}/c",
    "state chunk": "state/t00001/e1-v{version}/c.1",
    "weight metadata": "weights/t00000/e1-v{version}/zarr.json",
    "group metadata": "weights/t00000/zarr.json",
    "kept chunk": "kept/k*-s{step}/c/0/0",
    "kept metadata": "kept/k*-s{step}/zarr.json",
    "history": "history/steps.jsonl",
    "run.json": "run.json",
    "copy of run.json": "run-copy.json",
    "plan.json": "plan.json",
    "manifest": "manifest-{version}-e1.json",
    "CURRENT": "CURRENT",
}
DAMAGES = ("flipped bits", "empty", "half", "last byte", "deleted", "swapped", "older", *NO_FILES)
UNUSED = {"group metadata", "copy of run.json"}
"""No number is read from them; only other readers of Zarr, and ``repair``, use them."""


def make(root: Path, seed: int, versions: int) -> Path:
    """A run with a history, a plan and a kept value, in every byte another for another ``seed``."""
    with RunStore.create(root, {"seed": seed, "scale": 0.5}) as store:
        store.write_sealed("plan.json", {"grid": seed})
        for version in range(1, versions + 1):
            step = 10 * version
            store.append_history([{"step": n, "loss": seed + 1 / n} for n in range(step - 9, step + 1)])
            store.keep("act", (4, 4), "float32", (2, 4), step)[...] = seed * 100 + step
            commit(store, version).finish({"step": step, "seed": seed})
    return root


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two versions, and the first as it was one version ago."""
    folder = tmp_path_factory.mktemp("runs")
    make(folder / "one", 1, 1)
    shutil.copytree(folder / "one", folder / "older")
    shutil.rmtree(folder / "one")
    make(folder / "one", 1, 2)
    make(folder / "other", 2, 2)
    return folder


@pytest.fixture
def root(runs: Path, tmp_path: Path) -> Path:
    """A copy of the first run."""
    return shutil.copytree(runs / "one", tmp_path / "run")


def place_of(root: Path, name: str, version: int = 2) -> Path:
    (found,) = root.glob(OBJECTS[name].format(version=version, step=10 * version))
    return found


def damaged(runs: Path, root: Path, name: str, damage: str) -> Iterator[str]:
    """Damage an object of the run in ``root`` in every way of a kind, one after the other."""
    path = place_of(root, name)
    good = path.read_bytes()
    if damage == "flipped bits":
        rng = np.random.default_rng(len(good))
        for at in {0, len(good) - 1, *rng.integers(0, len(good), 6).tolist()}:
            path.write_bytes(good)
            flip(path, at, int(rng.integers(8)))
            yield f"byte {at}"
        return
    if damage in ("deleted", *NO_FILES):
        path.unlink()
        NO_FILES.get(damage, str)(path)
    elif damage in ("swapped", "older"):
        other = place_of(runs / "other", name) if damage == "swapped" else place_of(runs / "older", name, 1)
        if other.read_bytes() == good:
            return  # it is the same in all versions and runs
        path.write_bytes(other.read_bytes())
    else:
        shorten(path, damage)
    yield damage


def numbers(root: Path) -> dict[str, object]:
    """Everything that can be read of a run."""
    with RunStore.open(root) as store:
        found: dict[str, object] = {"meta": store.meta, "history": list(store.history())}
        found["plan"] = store.read_sealed("plan.json")
        if found["plan"] is None:
            raise StoreError("plan.json is lost")  # as resume says it
        for spec in SPECS:
            found[spec.name] = store.read(spec.name, whole(spec.shape)).tolist()
            found[f"{spec.name} by zarr"] = np.asarray(store.array(spec.name)[...]).tolist()
        found |= {name: np.asarray(array[...]).tolist() for name, array in store.kept().items()}
        return found


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_found(runs: Path, root: Path, name: str, damage: str) -> None:
    assert verify(root).sound
    before = numbers(root)
    for how in damaged(runs, root, name, damage):
        if name == "run.json" and damage in ("deleted", *NO_FILES):
            found = verify(root)
            with pytest.raises(StoreError, match=r"no run\.json"):
                RunStore.open(root)
        elif name in UNUSED:
            found = verify(root)
            assert numbers(root) == before, how
        else:
            found = verify(root)
            with pytest.raises(StoreError) as caught:
                numbers(root)
            assert "\n" not in str(caught.value)
        assert not found.sound, how
        assert place_of(runs / "one", name).name.split("-e")[0] in str(found).replace(
            "CURRENT:", "CURRENT"
        ), how


@pytest.mark.parametrize("damage", [*NO_FILES, "deleted"])
@pytest.mark.parametrize("name", OBJECTS)
def test_what_repair_leaves_is_sound_or_said_lost(runs: Path, root: Path, name: str, damage: str) -> None:
    for _ in damaged(runs, root, name, damage):
        if damage == "a dangling link" and name in ("group metadata", "history"):
            with pytest.raises(StoreError, match="is a link, which a run does not follow"):
                repair(root)
            return
        done = repair(root)
        assert done.changes
        if name == "plan.json":
            assert "replan=True" in str(done) and [one.what for one in verify(root).damages] == [name]
        else:
            assert verify(root).sound


@pytest.mark.parametrize("lost", ["", "CURRENT"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_of_another_run_is_passed_over(runs: Path, root: Path, version: int, lost: str) -> None:
    shutil.copy(place_of(runs / "other", "manifest", version), place_of(root, "manifest", version))
    if lost:
        (root / lost).unlink()
    done = repair(root)
    assert done.step == (20 if version == 1 else 10) and done.changes
    with RunStore.open(root) as store:
        check(store, done.step // 10)
    assert verify(root).sound and repair(root).changes == ()


def test_what_is_found_is_named(root: Path) -> None:
    found = verify(root)
    assert (found.arrays, found.step) == (7, 20)
    assert str(found) == f"{root}: sound (step 20; 7 arrays, 20 chunks, 0.0 MiB read)"
    place_of(root, "state chunk").write_bytes(bytes(32))
    place_of(root, "kept chunk").unlink()
    first, second, last = str(verify(root)).splitlines()
    assert (
        first.startswith(rf"array {M.name!r} chunk c.1 of step 20: ") and "is not what was written" in first
    )
    assert second.startswith("kept value 'act' chunk c/0/0 of step 20: ") and "is lost" in second
    assert last.startswith(f"{root}: damaged in 2 places (step 20; ")


def spoil_old(root: Path) -> None:
    for path in root.glob("weights/t00000/e1-v1/c.*"):
        path.write_bytes(bytes(24))


REPAIRS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "nothing": (lambda root: None, 20, r"sound, nothing to repair \(step 20\)"),
    "a chunk": (lambda root: place_of(root, "weight chunk").unlink(), 10, "steps 11 to 20 are lost: array"),
    "the manifest": (lambda root: place_of(root, "manifest").write_text(""), 10, "CURRENT was written anew"),
    "CURRENT": (lambda root: (root / "CURRENT").unlink(), 20, "CURRENT was written anew: .* is missing"),
    "an older CURRENT": (
        lambda root: shutil.copy(root.parent / "older" / "CURRENT", root / "CURRENT"), 20, "CURRENT was",
    ),
    "metadata": (lambda root: place_of(root, "weight metadata").unlink(), 20, r"zarr\.json was written anew"),
    "the history": (
        lambda root: place_of(root, "history").write_text("{"), 20, "history: 20 of 20 rows are lost",
    ),
    "run.json": (
        lambda root: (root / "run.json").write_text("{}"), 20, r"run\.json was .* anew, from run-copy\.json"),
    "a lost run.json": (
        lambda root: (root / "run.json").unlink(), 20, r"run\.json was .* anew, from run-copy\.json"),
    "another run.json": (
        lambda root: shutil.copy(root.parent / "other" / "run.json", root / "run.json"), 20, "from run-copy"),
    "another run.json, no CURRENT": (
        lambda root: [shutil.copy(root.parent / "other" / "run.json", root), (root / "CURRENT").unlink()],
        20, "from run-copy"),
    "the copy": (
        lambda root: (root / "run-copy.json").unlink(), 20, r"run-copy\.json was .* anew, from run\.json"),
    "a kept value": (lambda root: place_of(root, "kept chunk").unlink(), 20, "this kept value is left out"),
}  # fmt: skip


@pytest.mark.parametrize("what", REPAIRS)
def test_repair_goes_back_to_the_newest_sound_one(runs: Path, root: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(runs / "older", tmp_path / "older")
    shutil.copytree(runs / "other", tmp_path / "other")
    spoil, step, said = REPAIRS[what]
    spoil(root)
    done = repair(root)
    assert done.step == step and (done.changes == ()) == (what == "nothing")
    assert re.search(said, str(done)), str(done)
    assert verify(root).sound
    with RunStore.open(root, writable=True) as store:
        check(store, step // 10)
        assert len(list(store.history())) == (0 if what == "the history" else step)
        assert set(store.kept()) == (
            set() if what in ("a chunk", "the manifest", "a kept value") else {"act"}
        )
        store.append_history([{"step": 30}])
        commit(store, 3).finish({"step": 30})
    assert verify(root).sound and repair(root).changes == ()


def test_repair_refuses_what_it_cannot_mend(root: Path, tmp_path: Path) -> None:
    place_of(root, "scalar chunk").unlink()
    spoil_old(root)
    with pytest.raises(CorruptError, match="no version of the run in .* is sound: array 'b' chunk c of step"):
        repair(root)
    (root / "run.json").write_text("{}")
    (root / "run-copy.json").write_text("{}")
    with pytest.raises(CorruptError, match=r"run\.json is damaged or lost, and so is its copy"):
        repair(root)
    with pytest.raises(StoreError, match="is not a run"):
        repair(tmp_path)
    with pytest.raises(StoreError, match="is not a run"):
        verify(tmp_path)


@pytest.mark.parametrize("line", [0, 7, 19])
def test_a_damaged_history_never_keeps_a_writer_from_going_on(root: Path, line: int) -> None:
    path = place_of(root, "history")
    lines = path.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace('"loss": ', '"loss": 7', 1)
    path.write_text("".join(lines))
    said = rf"1 of 20 rows are lost \(line {line + 1}\)"
    with RunStore.open(root) as store, pytest.raises(CorruptError, match=said):
        list(store.history())
    with pytest.warns(UserWarning, match=said), RunStore.open(root, writable=True) as store:
        assert [row["step"] for row in store.history()] == [n for n in range(1, 21) if n != line + 1]
    assert (root / "history/steps-damaged.jsonl").read_text() == "".join(lines)
    assert verify(root).sound
    with RunStore.open(root) as store:
        assert len(list(store.history())) == 19 and list(store.history())[-1].keys() == {"step", "loss"}
        assert np.array_equal(store.read(W.name, whole(W.shape)), content(W, 2)) and B in SPECS


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "run", {"seed": 7}) as store:
        for version in (1, 2, 3, 4):
            commit(store, version).finish({"step": version, "checkpoints": [1, 2]})
    next((tmp_path / "run").glob("weights/t*/e*-v1/c.*")).write_bytes(b"")
    assert str(repair(tmp_path / "run")).startswith("the kept version of step 1 is left out: array ")
    assert verify(tmp_path / "run").sound
    with RunStore.open(tmp_path / "run") as store:
        check(store, 4)
        check(store.at(2), 2)
