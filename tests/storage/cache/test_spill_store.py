"""The spill: Zarr on disk, boxes read by strips, clearing up, refusals."""

import errno
import multiprocessing
import os
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oocdl.errors import CorruptError, DiskFullError, StoreError
from oocdl.graph.ir.array_layout import LEAST_PAGED_BYTES, PAGE_BYTES
from oocdl.graph.ir.index import as_slices, region_shape, whole
from oocdl.storage import files
from oocdl.storage.cache import direct_io
from oocdl.storage.cache.page_pool import Pool
from oocdl.storage.cache.spill_store import SpillStore, remove_dead
from oocdl.storage.checksums import block_sums
from tests.kit.commands import python
from tests.kit.stored import flip, shorten


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "uint8", "float16"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4, 5)])
def test_any_zarr_reader_opens_a_spilled_chunk(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    with SpillStore(tmp_path) as spill:
        file = spill.write(array)
        opened = zarr.open_array(file.folder, mode="r")
        assert opened.dtype == array.dtype
        assert np.array_equal(opened[file.index], array)
        out = np.empty(shape, dtype)
        assert spill.read(file, whole(shape), out) == array.nbytes
        assert np.array_equal(out, array)
        spill.remove(file)
        assert spill.write(array).data == file.data, "blocks that are there are used again"
    assert list(tmp_path.glob("spill-*")) == []


def paged(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in page-aligned memory, as chunks have it."""
    array = Pool(1 << 30).empty(shape, np.float32)
    array[...] = np.arange(array.size).reshape(shape)
    return array


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9), st.sampled_from([1, 32, 64]), st.just(32)),
    outer=st.integers(0, 3),
    corner=st.tuples(*[st.tuples(st.integers(0, 63), st.integers(1, 64))] * 4),
    owned=st.booleans(),
    runs=st.sampled_from([3, 1024]),
)
def test_any_axis_may_be_outermost(
    tmp_path: Path,
    shape: tuple[int, ...],
    outer: int,
    corner: tuple[tuple[int, int], ...],
    owned: bool,
    runs: int,
) -> None:
    array = paged(shape)
    lows = [min(low, extent - 1) for (low, _), extent in zip(corner, shape, strict=True)]
    box = tuple(
        (low, min(low + size, extent)) for low, (_, size), extent in zip(lows, corner, shape, strict=True)
    )
    # Part of a larger array, as a strip of a slab is; or one of its own.
    whole_out = paged(shape) if not owned else paged(region_shape(box))
    out = whole_out if owned else whole_out[tuple(slice(0, n) for n in region_shape(box))]
    with pytest.MonkeyPatch.context() as patch, SpillStore(tmp_path) as spill:
        patch.setattr(direct_io, "MOST_RUNS_PER_CALL", runs)
        file = spill.write(array, outer)
        out[...] = -1
        assert spill.read(file, box, out) >= out.nbytes
        assert np.array_equal(out, array[as_slices(box)])
        assert np.array_equal(zarr.open_array(file.folder, mode="r")[file.index], array)
        aligned = array.ctypes.data % PAGE_BYTES == 0
        assert aligned or array.nbytes < LEAST_PAGED_BYTES, "a small one is aligned by chance, others always"
        pages = int(np.prod(shape[outer + 1 :])) * 4 % PAGE_BYTES == 0 and aligned
        assert file.outer == (outer if pages else 0)


@pytest.mark.parametrize("most", [64, 3])
def test_a_strip_along_the_outer_axis_is_one_call_or_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Linux gives at most 2 GiB at once."""
    calls, real = list[int](), os.preadv
    array, out = paged((8, 16, 64, 64)), paged((8, 20, 64, 64))[:, 10:14]

    def preadv(handle: int, buffers: list[memoryview], start: int) -> int:
        calls.append(len(buffers))
        return real(handle, buffers[:most], start)

    monkeypatch.setattr(os, "preadv", preadv)
    with SpillStore(tmp_path) as spill:
        file = spill.write(array, 1)
        spill.read(file, ((0, 8), (3, 7), (0, 64), (0, 64)), out)
        assert np.array_equal(out, array[:, 3:7]) and calls[0] == 32 and (len(calls) == 1) == (most > 32)
        os.truncate(file.data, array.nbytes // 2)
        with pytest.raises(StoreError, match="shorter than it was written"):
            spill.read(file, ((0, 8), (7, 11), (0, 64), (0, 64)), out)


def test_bfloat16_is_kept_as_bits(tmp_path: Path) -> None:
    array = np.arange(6).astype(ml_dtypes.bfloat16)
    with SpillStore(tmp_path) as spill:
        file = spill.write(array)
        out = np.empty(3, ml_dtypes.bfloat16)
        spill.read(file, ((2, 5),), out)
        assert out.tolist() == [2, 3, 4]
        opened = zarr.open_array(file.folder, mode="r")
        assert opened.dtype == np.uint16
        assert opened.attrs["dtype"] == "bfloat16"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    axes=st.lists(st.tuples(st.integers(1, 19), st.integers(0, 18), st.integers(1, 19)), max_size=4),
    bounce=st.sampled_from([5 * PAGE_BYTES, 1 << 16, 1 << 20]),
    long=st.sampled_from([1, 16, 1 << 14]),
    strided=st.booleans(),
    past_cache=st.booleans(),
)
def test_any_box_is_read(
    tmp_path: Path, axes: list[tuple[int, int, int]], bounce: int, long: int, strided: bool, past_cache: bool
) -> None:
    shape = tuple(extent for extent, _, _ in axes)
    box = tuple(
        (min(start, extent - 1), min(min(start, extent - 1) + size, extent)) for extent, start, size in axes
    )
    array = np.random.default_rng(0).random(shape)
    path, flag = tmp_path / "box", direct_io.direct_flag(tmp_path) * past_cache
    direct_io.write_array(path, array, flag)
    base = np.full([2 * n if strided else n for n in region_shape(box)], np.nan)
    out = base[(..., *(slice(None, None, 2 if strided else 1) for _ in box))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "BOUNCE_BYTES", bounce)
        patch.setattr(direct_io, "LONG_RUN_BYTES", long)
        patch.setattr(direct_io, "_local", threading.local())
        count = direct_io.read_box(path, shape, box, out, flag, 0, block_sums([array], PAGE_BYTES))
    assert np.array_equal(out, array[as_slices(box)])
    assert out.nbytes <= count <= array.nbytes


def test_only_touched_bytes_are_read(tmp_path: Path) -> None:
    array = np.zeros((64, 64, 64), np.float32)
    with SpillStore(tmp_path) as spill:
        file = spill.write(array)
        for slab in (((10, 12), (0, 64), (0, 64)), whole(array.shape)):
            out = np.empty(region_shape(slab), np.float32)
            assert spill.read(file, slab, out) == out.nbytes


@pytest.mark.parametrize("outer", [0, 1])
def test_every_flipped_bit_is_found_by_every_box_that_touches_it(tmp_path: Path, outer: int) -> None:
    array = paged((8, 16, 64, 32))  # a row of the file is 64 KiB, with axis 1 outermost 32 KiB
    rng = np.random.default_rng(outer)
    with SpillStore(tmp_path) as spill:
        file = spill.write(array, outer)
        rows = array.nbytes // array.shape[outer]
        assert file.outer == outer and file.sums is not None and file.sums.block_bytes == rows
        good = file.data.read_bytes()
        for at in [0, array.nbytes - 1, *rng.integers(0, array.nbytes, 24)]:
            file.data.write_bytes(good)
            flip(file.data, int(at), int(rng.integers(8)))
            row = int(at) // rows
            strips = [list(whole(array.shape)) for _ in range(4)]
            strips[1][outer] = (row, row + 1)  # whole blocks
            strips[2][outer], strips[2][3] = (row, row + 1), (5, 7)  # parts of blocks
            strips[3][outer] = (0, row + 1) if row else (row, array.shape[outer])
            for strip in strips:
                out = paged(region_shape(tuple(strip)))
                with pytest.raises(CorruptError, match=rf"of the spilled chunk {file.data} are not what"):
                    spill.read(file, tuple(strip), out)
            other = list(whole(array.shape))
            other[outer] = (row - 1, row) if row else (1, 2)
            out = paged(region_shape(tuple(other)))
            spill.read(file, tuple(other), out)
            assert np.array_equal(out, array[as_slices(tuple(other))])


@pytest.mark.parametrize("damage", ["empty", "half", "last byte", "deleted", "swapped", "older"])
@pytest.mark.parametrize("shape", [(), (7,), (4, 33, 16, 32)])
def test_wrong_files_are_found(tmp_path: Path, damage: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.random.default_rng(0).random(shape))
    with SpillStore(tmp_path) as spill:
        older = spill.write(np.asarray(array - 1))
        old = older.data.read_bytes()
        spill.remove(older)
        file, other = spill.write(array), spill.write(np.asarray(array + 1))
        assert file.data == older.data
        if damage == "deleted":
            file.data.unlink()
        elif damage in ("swapped", "older"):
            file.data.write_bytes(old if damage == "older" else other.data.read_bytes())
        else:
            shorten(file.data, damage)
        for box in (whole(shape), tuple((extent - 1, extent) for extent in shape)):
            with pytest.raises(StoreError, match=str(file.data)):
                spill.read(file, box, np.empty(region_shape(box)))


def test_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys, numpy as np\n"
        "from oocdl.storage.cache.spill_store import SpillStore\n"
        "SpillStore(sys.argv[1]).write(np.zeros(1000))\n"
        "os._exit(9)\n"
    )
    python("-c", code, tmp_path)
    dead = list(tmp_path.glob("spill-*"))
    assert len(dead) == 1
    with SpillStore(tmp_path) as first, SpillStore(tmp_path) as second:
        assert not dead[0].exists()
        assert first.folder.exists()
        assert second.folder.exists()


@pytest.mark.parametrize("kept", [3, 0])
def test_a_disk_that_is_full_when_chunks_of_a_kind_begin_loses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Files that are kept are given back, and only then is it tried again."""
    tries = list[Path]()

    def full(path: Path, *_: object) -> None:
        tries.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with SpillStore(tmp_path) as spill:
        old = [spill.write(np.zeros(1000)) for _ in range(3)]
        spill.remove(old[0])
        old[0] = spill.write(np.zeros(1000))
        for file in old[:kept]:
            spill.remove(file)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", full)
            with pytest.raises(DiskFullError):
                spill.write(np.zeros(24000, np.uint8))
            with pytest.raises(DiskFullError):
                spill.write(np.zeros(24000, np.uint8))
        assert len(tries) == (3 if kept else 2)
        assert [file.data.exists() for file in old] == [number >= kept for number in range(3)]
        assert spill.live_bytes == 8000 * (3 - kept)


@pytest.mark.skipif(files.filesystem(Path("/dev/shm")) != "tmpfs", reason="no tmpfs to refuse")
def test_memory_file_systems_are_refused() -> None:
    with pytest.raises(StoreError, match=r"/dev/shm.*tmpfs, which is memory"):
        SpillStore("/dev/shm/oocdl-test-spill")
    assert not Path("/dev/shm/oocdl-test-spill").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another folder"):
        SpillStore(tmp_path / "file" / "below")


def spill_as_nobody(root: Path, tells: Connection) -> None:
    """What another user's process does; tells what it read and the rights of its folder."""
    os.setuid(65534)
    with SpillStore(root) as spill:
        file, out = spill.write(np.arange(1000.0)), np.empty(1000)
        spill.read(file, ((0, 1000),), out)
        tells.send((out.sum(), oct(spill.folder.stat().st_mode)[-3:]))
    remove_dead(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_share_a_spill_folder(tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)  # pytest's folders are private
    shared = tmp_path / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)
    with SpillStore(shared / "spill") as mine:
        left = mine.folder.with_name(f"{mine.folder.name}x")  # as a dead process of this user leaves it
        left.mkdir()
        assert oct((shared / "spill").stat().st_mode)[-4:] == "1777"
        context = multiprocessing.get_context("forkserver")
        hears, tells = context.Pipe(duplex=False)
        process = context.Process(target=spill_as_nobody, args=(shared / "spill", tells))
        process.start()
        tells.close()
        assert hears.recv() == (499500.0, "700")
        process.join(60)
        assert process.exitcode == 0 and mine.folder.exists() and left.exists()
    SpillStore(shared / "spill").close()
    assert not left.exists()


def test_a_spill_folder_has_the_rights_of_where_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o775)
    for place in (tmp_path / "group/spill", tmp_path / "group/deep/spill"):
        with SpillStore(place) as spill:
            assert oct(place.stat().st_mode)[-4:] == "1775"
            assert oct(spill.folder.stat().st_mode)[-3:] == "700"
