"""The books of the RAM tier without a tier: who leaves first, who is let in, and that counts are right."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oocdl.errors import BudgetError
from oocdl.storage.cache.ledger import MOST_SKIPPED_CHUNKS, SMALL_CHUNK_BYTES, SOON_POSITIONS, Claim, Ledger


@dataclass(eq=False)
class Chunk:
    """An entry that holds no bytes."""

    nbytes: int
    uses: tuple[int, ...] = ()
    spilled: bool = False
    pins: int = 0
    readers: int = 0
    busy: bool = False
    dropped: bool = False
    left_ram: int = 0

    @property
    def footprint_bytes(self) -> int:
        """As there are no pages here."""
        return self.nbytes

    def leave_ram(self) -> None:
        """Count it."""
        self.left_ram += 1


class Books(Ledger[Chunk]):
    """Books with the chunks that they had written, in order."""

    def __init__(self, capacity_bytes: int, **options: int) -> None:
        self.writes: list[Chunk] = []
        super().__init__(capacity_bytes, self.writes.append, **options)

    def holding(self, *chunks: Chunk) -> Books:
        """Have chunks in RAM."""
        for chunk in chunks:
            self.enter(chunk)
        return self

    def write_all(self) -> None:
        """The spill has written what it was given."""
        while self.writes:
            chunk = self.writes.pop()
            chunk.spilled = True
            self.written(chunk)
            if chunk.dropped:
                self.drop(chunk)

    def ask(
        self, nbytes: int, *pins: Chunk, scratch_bytes: int = 0
    ) -> tuple[Claim[Chunk], list[Chunk] | None]:
        """A claim that stands in line, admitted if it is its turn and there is room."""
        claim = Claim(pins, nbytes, scratch_bytes)
        self.line.append(claim)
        return claim, self.admit(claim) if self.line[0] is claim else None


# --- what goes first -------------------------------------------------------------------------


def test_the_furthest_next_use_goes_first() -> None:
    never, late, soon, past = Chunk(1), Chunk(1, (2, 9)), Chunk(1, (5,)), Chunk(1, (3,))
    books = Books(9)
    books.advance(3)
    assert list(books.holding(soon, late, never, past)._victims()) == [never, past, late, soon]


def test_of_equals_the_clean_goes_first_then_the_one_offered_first() -> None:
    dirty, clean, other = Chunk(1, (5,)), Chunk(1, (5,), spilled=True), Chunk(1, (5,))
    assert list(Books(9).holding(dirty, clean, other)._victims()) == [clean, dirty, other]


@pytest.mark.parametrize("held", ["pins", "readers", "busy"])
def test_what_is_held_never_goes_and_is_a_victim_again_when_let_go(held: str) -> None:
    chunk = Chunk(1)
    setattr(chunk, held, 1)
    books = Books(9).holding(chunk)
    assert list(books._victims()) == []
    setattr(chunk, held, 0)
    books.foresee(chunk, ())
    assert list(books._victims()) == [chunk]


def test_no_chunk_leaves_for_what_was_true_when_it_was_offered() -> None:
    chunk, other, books = Chunk(1, (5,)), Chunk(1, (7,)), Books(9)
    books.advance(6)  # a unit ran ahead; chunk will not be read again
    books.holding(chunk, other).advance(4)  # the unit of position 5 has still to read it
    assert list(books._victims()) == [other, chunk]


def test_a_long_history_of_offers_is_forgotten_and_no_chunk_with_it() -> None:
    chunks = [Chunk(1, (n,)) for n in range(5)]
    books = Books(9).holding(*chunks)
    for _ in range(3000):
        books.foresee(chunks[0], (0,))
    assert len(books._order) < 1100
    assert list(dict.fromkeys(books._victims())) == chunks[::-1]


# --- who makes room --------------------------------------------------------------------------


def test_clean_chunks_leave_at_once_and_dirty_ones_are_written_first() -> None:
    clean, dirty, stays = Chunk(40, spilled=True), Chunk(40), Chunk(20, (1,))
    books = Books(100).holding(clean, dirty, stays)
    claim, loads = books.ask(70)
    assert loads is None
    assert clean.left_ram and not books.is_resident(clean)
    assert books.writes == [dirty] and dirty.busy and books.is_resident(dirty)
    books.write_all()
    assert not books.is_resident(dirty) and books.is_resident(stays)
    assert books.admit(claim) == []
    assert (books.written_bytes, books.free_bytes) == (40, 10)


def test_no_more_is_written_than_is_asked_for() -> None:
    books = Books(100).holding(*(Chunk(20, (n,)) for n in range(5)))
    claim, _ = books.ask(30)
    assert len(books.writes) == 2
    assert books.admit(claim) is None
    assert len(books.writes) == 2, "what is being written counts as room to come"


def test_a_chunk_that_was_written_stays_if_nobody_waits_any_more() -> None:
    chunk = Chunk(80)
    books = Books(100).holding(chunk)
    claim, _ = books.ask(50)
    books.withdraw(claim)
    books.write_all()
    assert books.is_resident(chunk) and chunk.spilled
    books.ask(50)
    assert not books.is_resident(chunk), "clean now, it leaves without being written again"


def test_a_chunk_that_could_not_be_written_stays() -> None:
    chunk = Chunk(80)
    books = Books(100).holding(chunk)
    claim, _ = books.ask(50)
    books.written(books.writes.pop(), done=False)
    assert books.is_resident(chunk) and not chunk.busy and not books.written_bytes
    assert books.admit(claim) is None
    assert books.writes == [chunk], "it is tried again"


def test_a_chunk_dropped_while_it_is_written_leaves_when_that_ends() -> None:
    chunk = Chunk(80)
    books = Books(100).holding(chunk)
    claim, _ = books.ask(50)
    assert not books.drop(chunk)
    assert books.is_resident(chunk)
    books.write_all()
    assert books.admit(claim) == [] and not books.resident_bytes


# --- claims ----------------------------------------------------------------------------------


def test_only_the_first_in_line_holds_its_pins() -> None:
    chunk, other = Chunk(10, spilled=True), Chunk(10)
    books = Books(100).holding(other)
    running, _ = books.ask(85)
    first, loads = books.ask(10, chunk)
    second, _ = books.ask(10, other)
    assert loads is None and (chunk.pins, other.pins) == (1, 0)
    books.release(running)
    assert books.admit(first) == [chunk]
    assert chunk.busy
    books.loaded(chunk)
    assert books.admit(second) == []
    assert (chunk.pins, other.pins, books.reserved_bytes) == (1, 1, 20)
    books.release(first)
    books.release(first)
    assert (chunk.pins, books.reserved_bytes) == (0, 10)


def test_room_is_not_made_of_the_pins_of_the_one_who_waits() -> None:
    pinned, other = Chunk(50), Chunk(30, (1,))
    books = Books(100).holding(pinned, other)
    claim, _ = books.ask(40, pinned)  # pinned is never used again, and would go first
    assert books.writes == [other]
    books.write_all()
    assert books.admit(claim) == []
    assert books.is_resident(pinned)


def test_a_claim_makes_no_more_chunks_than_it_has_left() -> None:
    books = Books(100)
    claim = Claim[Chunk]((), 30, scratch_bytes=50)
    books.line.append(claim)
    assert books.admit(claim) == []
    books.put(claim, Chunk(20))
    with pytest.raises(BudgetError, match="put of 20 bytes, 10 are left"):
        books.put(claim, Chunk(20))
    assert (books.resident_bytes, books.reserved_bytes, books.peak_bytes) == (20, 60, 80)
    books.release(claim)
    assert (books.resident_bytes, books.reserved_bytes, books.peak_bytes) == (20, 0, 80)


def test_small_chunks_leave_last_and_only_where_nothing_else_will() -> None:
    small, large, held = Chunk(SMALL_CHUNK_BYTES - 1, (99,)), Chunk(1 << 26, (5,)), Chunk(1 << 26, (7,))
    books = Books(1 << 27 | SMALL_CHUNK_BYTES).holding(small, large, held)
    running, _ = books.ask(1, held)
    waiting, _ = books.ask(1 << 27)
    assert books.writes == [large], "although the small one is read later"
    books.write_all()
    assert books.admit(waiting) is None and books.writes == [], "the unit that runs will give back its pins"
    books.release(running)
    assert books.admit(waiting) is None and books.writes == [held]
    books.write_all()
    assert books.admit(waiting) == [] and books.is_resident(small)
    books.release(waiting)
    books.ask(books.capacity_bytes)
    assert books.writes == [small], "a unit that takes everything gets it"


def test_scratch_is_kept_free_for_programs_that_run_at_once() -> None:
    books = Books(100, programs=2)
    (small, _), (large, _) = books.ask(20, scratch_bytes=10), books.ask(20, scratch_bytes=25)
    assert (books.reserved_bytes, books.scratch_bytes) == (75, 35)
    waiting, loads = books.ask(20, scratch_bytes=16)
    assert loads is None, "with the largest two of 10, 25 and 16 it would be 101"
    books.release(small)
    assert books.admit(waiting) == [] and books.scratch_bytes == 41
    reading, loads = books.ask(19, scratch_bytes=16)
    assert loads == [] and books.scratch_bytes == 41, "what waits for a program takes none yet"
    books.release(large)
    assert (books.reserved_bytes, books.scratch_bytes) == (71, 32)
    books.release(waiting)
    books.release(reading)
    assert (books.reserved_bytes, books.scratch_bytes) == (0, 0)


# --- bringing chunks back --------------------------------------------------------------------


def spilled(nbytes: int, at: int) -> Chunk:
    """A chunk that only the spill has."""
    return Chunk(nbytes, (at,), spilled=True)


def test_a_chunk_comes_back_only_if_it_is_read_soon() -> None:
    books = Books(100)
    books.advance(10)
    near, far = spilled(10, 10 + SOON_POSITIONS), spilled(10, 11 + SOON_POSITIONS)
    assert books.promote(near) and books.is_resident(near) and near.busy
    assert not books.promote(near), "it is being loaded"
    assert not books.promote(far) and not books.is_resident(far)


def test_a_chunk_that_could_not_be_loaded_is_not_in_ram() -> None:
    books, chunk = Books(100), spilled(10, 1)
    assert books.promote(chunk)
    books.loaded(chunk, done=False)
    assert not books.is_resident(chunk) and not chunk.busy and books.free_bytes == 100
    assert books.promote(chunk), "it may be tried again"


def test_a_chunk_comes_back_only_where_nobody_waits() -> None:
    books, chunk = Books(100), spilled(10, 1)
    running, _ = books.ask(80)
    books.ask(30)
    assert not books.promote(chunk)
    books.release(running)
    books.admit(books.line[0])
    assert books.promote(chunk)


def test_clean_chunks_that_are_read_later_give_way_and_no_others() -> None:
    late, sooner, dirty = spilled(40, 90), spilled(30, 5), Chunk(30, (99,))
    books = Books(100).holding(late, sooner, dirty)
    books.advance(0)
    assert books.promote(spilled(35, 2))
    assert [books.is_resident(chunk) for chunk in (late, sooner, dirty)] == [False, True, True]
    assert not books.promote(spilled(35, 2)), "what is left is read as soon, or dirty"
    assert not books.writes
    books.ask(30)
    assert books.writes == [dirty], "what was looked at and stayed is still a victim"


def test_no_more_than_some_chunks_are_looked_at() -> None:
    dirty = [Chunk(1, (90,)) for _ in range(MOST_SKIPPED_CHUNKS + 1)]
    clean = spilled(10, 50)
    books = Books(len(dirty) + 10).holding(*dirty, clean)
    books.advance(0)
    assert not books.promote(spilled(10, 1))
    assert books.is_resident(clean)


# --- whatever happens ------------------------------------------------------------------------


class Life:
    """Units, threads and reads of a tier as they may come, one at a time."""

    def __init__(self, seed: int, capacity_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.programs = self.rng.choice([1, 2, 100])
        self.books = Books(capacity_bytes, programs=self.programs)
        self.books._least_bytes = self.rng.choice([0, capacity_bytes / 8])
        self.chunks: list[Chunk] = []
        self.holding: list[Claim[Chunk]] = []
        self.loading: list[Chunk] = []

    def ask(self) -> None:
        """A unit stands in line."""
        rng, left = self.rng, self.books.capacity_bytes
        pins = []
        for chunk in rng.sample(self.chunks, min(len(self.chunks), rng.randint(0, 3))):
            if chunk.footprint_bytes <= left:
                pins.append(chunk)
                left -= chunk.footprint_bytes
        nbytes = rng.randint(0, left)
        self.books.line.append(Claim(pins, nbytes, rng.randint(0, left - nbytes)))
        self.books.advance(self.books.position + 1)

    def put(self) -> None:
        """A unit that runs makes a chunk."""
        for claim in self.rng.sample(self.holding, min(len(self.holding), 1)):
            if claim.left_bytes:
                uses = sorted(self.rng.sample(range(100), self.rng.randint(0, 3)))
                chunk = Chunk(self.rng.randint(1, claim.left_bytes), tuple(uses))
                self.books.put(claim, chunk)
                self.chunks.append(chunk)

    def release(self) -> None:
        """A unit ends."""
        if self.holding:
            self.books.release(self.holding.pop(self.rng.randrange(len(self.holding))))

    def read(self) -> None:
        """A part of a chunk is read."""
        for chunk in self.rng.sample(self.chunks, min(len(self.chunks), 1)):
            if chunk.spilled and not self.books.is_resident(chunk) and self.books.promote(chunk):
                self.loading.append(chunk)

    def load(self) -> None:
        """A thread has loaded a chunk."""
        if self.loading:
            chunk = self.loading.pop(self.rng.randrange(len(self.loading)))
            self.books.loaded(chunk, done=self.rng.random() < 0.9 or chunk.pins > 0)
            if chunk.dropped:
                self.books.drop(chunk)

    def write(self) -> None:
        """A thread has written a chunk, or could not."""
        if self.books.writes:
            chunk = self.books.writes.pop(self.rng.randrange(len(self.books.writes)))
            done = self.rng.random() < 0.9
            chunk.spilled = chunk.spilled or done
            self.books.written(chunk, done)
            if chunk.dropped:
                self.books.drop(chunk)

    def drop(self) -> None:
        """The handle of a chunk goes that no unit has."""
        waiting = {pin for claim in self.books.line for pin in claim.pins}
        free = [chunk for chunk in self.chunks if not chunk.pins and chunk not in waiting]
        for chunk in self.rng.sample(free, min(len(free), 1)):
            self.chunks.remove(chunk)
            self.books.drop(chunk)

    def do(self, what: str) -> None:
        """One thing happens, and whoever is first in line tries again, as after any change."""
        getattr(self, what)()
        while self.books.line:
            claim = self.books.line[0]
            loads = self.books.admit(claim)
            if loads is None:
                break
            self.loading += loads
            self.holding.append(claim)

    def check(self) -> None:
        """The books are right."""
        books = self.books
        here = [chunk for chunk in {*self.chunks, *books.writes, *self.loading} if books.is_resident(chunk)]
        assert books.resident_bytes == sum(chunk.footprint_bytes for chunk in here)
        scratch = sorted((claim.scratch_bytes for claim in self.holding), reverse=True)
        assert books.scratch_bytes == sum(scratch[: self.programs])
        assert books.reserved_bytes == sum(claim.left_bytes for claim in self.holding) + books.scratch_bytes
        assert books.resident_bytes + books.reserved_bytes <= books.capacity_bytes
        assert books.leaving_bytes == sum(chunk.footprint_bytes for chunk in books.writes)
        assert all(books.is_resident(pin) for claim in self.holding for pin in claim.pins)
        held = [pin for claim in [*self.holding, *list(books.line)[:1]] for pin in claim.pins]
        assert all(chunk.pins == held.count(chunk) for chunk in self.chunks)


THINGS = ["ask", "put", "put", "put", "release", "read", "load", "write", "drop"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 200), st.lists(st.sampled_from(THINGS), max_size=80))
def test_counts_are_always_right_and_everything_can_go(seed: int, capacity: int, things: list[str]) -> None:
    life = Life(seed, capacity)
    for what in things:
        life.do(what)
        life.check()
    while life.holding or life.books.line or life.loading or life.books.writes:
        for what in ("load", "write", "release"):
            life.do(what)
            life.check()
    # Nothing holds anything now: all of it can leave for a unit that takes everything.
    claim, loads = life.books.ask(capacity)
    while loads is None:
        assert life.books.writes, "a chunk is left that nothing holds and that is no victim"
        life.books.write_all()
        loads = life.books.admit(claim)
    assert loads == [] and not life.books.resident_bytes
