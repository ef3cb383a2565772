"""Says which workers can take part in a run, and have room for it: the others are left out, and named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from oocdl.errors import BudgetError, DiskFullError, OocdlError
from oocdl.host.limits import DEFAULT_BUDGET_SHARE
from oocdl.planning.machine import values_of
from oocdl.runtime.cluster.crew import Recruit, Tell
from oocdl.runtime.lost import WorkersLost

LIMIT_SHARE = 0.9
"""Share of a worker's memory limit that is its budget by default: its nanny and the system need a little."""


def budget_bytes(recruits: Sequence[Recruit]) -> int:
    """Return the budget of each process for a user who gives none: of the worker that may take least.

    Workers of one host share what it has.
    """
    on_host = Counter(recruit.host for recruit in recruits)
    shares = []
    for recruit in recruits:
        share = int(recruit.available.nbytes * DEFAULT_BUDGET_SHARE) // on_host[recruit.host]
        own = int(recruit.limit_bytes * LIMIT_SHARE) if recruit.limit_bytes else share
        shares.append(min(share, own))
    return min(shares)


def check_limits(recruits: Sequence[Recruit], memory_bytes: int) -> list[Recruit]:
    """Return the workers whose memory limit has room for the budget; BudgetError if there are none."""
    roomy = [one for one in recruits if not one.limit_bytes or one.limit_bytes >= memory_bytes]
    if not roomy:
        largest = max(recruits, key=lambda one: one.limit_bytes or 0)
        raise BudgetError(
            f"memory={-(-memory_bytes >> 20)} MiB is more than the memory limit of any worker "
            f"({(largest.limit_bytes or 0) >> 20} MiB of {largest.address}); give less, or start workers "
            "with a higher --memory-limit"
        )
    return roomy


Place = tuple[str, str]
"""A host, and the name of what limits memory there."""


@dataclass(eq=False)
class Room:
    """Decides which of a run's workers can take part: by what each tells and may use, and by its set-up.

    Workers that the run was planned for are taken at their word until a first crew stands: what
    they lack ends the run before its first step.
    """

    memory_bytes: int
    """Memory budget of each worker."""
    planned: Sequence[Recruit]
    """The workers that the run was planned for."""
    say: Tell
    members: frozenset[str] = frozenset()
    """Addresses of the last crew; empty until the first one stands."""
    refused: dict[str, float] = field(default_factory=dict)
    """Worker -> the number of workers among which it had too little room: with more, each has a smaller share
    to do. A worker that refuses its set-up for another reason does so among any number."""
    told: dict[str, str] = field(default_factory=dict)
    """Worker that is left out -> the reason that the user knows."""
    told_of_all: set[str] = field(default_factory=set)
    """Facts of crews that the user knows: how many get work, and that they are not alike."""
    _among: int = 0
    """Number of workers that had room, by what each may use, when this was last looked at."""

    def fitting(self, recruits: Sequence[Recruit]) -> list[Recruit]:
        """Return the workers that have room. Say of each other one why it is left out, once."""
        trusted = frozenset(() if self.members else (one.address for one in self.planned))
        lacks: dict[str, str] = {}
        for one in recruits:
            why = None if one.address in trusted else self._lack(one)
            if why is not None:
                lacks[one.address] = why
        lacks |= self._crowded([one for one in recruits if one.address not in lacks])
        for address, why in lacks.items():
            self._leave_out(address, why)
        found = [one for one in recruits if one.address not in lacks]
        self._among = len(found)
        return [one for one in found if self.refused.get(one.address, 0) < self._among]

    def refuse(self, errors: Mapping[str, OocdlError]) -> None:
        """Leave out workers that were found to fit, but cannot take part as they are set up.

        Raises as ``leave_out`` does.
        """
        self.leave_out(errors)
        for address, error in errors.items():
            self.refused[address] = self._among if isinstance(error, BudgetError) else inf

    def leave_out(self, errors: Mapping[str, OocdlError]) -> None:
        """Leave out workers that cannot take part, and say why.

        Raises the error of a worker that the run was planned for, if no crew has stood yet and none is left.
        """
        planned = [] if self.members else [one.address for one in self.planned]
        first = [address for address in planned if address in errors]
        if first and all(address in errors or address in self.told for address in planned):
            raise errors[first[0]]
        for address, error in errors.items():
            named, text = f"worker {address}", str(error)
            self._leave_out(address, text.removeprefix(f"{named}: ").replace(f"{named} ", "it ", 1))

    def spare(self, error: BaseException, members: Sequence[str]) -> None:
        """Leave a member out whose disk is full, if there are others: raises WorkersLost for these."""
        full = [address for address in members if str(error).startswith(f"worker {address}: ")]
        if isinstance(error, DiskFullError) and full and len(members) > 1:
            self.refuse({full[0]: error})
            raise WorkersLost(f"worker {full[0]} has no room on its disk") from error

    def welcome(self, addresses: Iterable[str]) -> None:
        """Forget what is known of the addresses of workers that have come: others may have had them."""
        for address in addresses:
            self.refused.pop(address, None)
            self.told.pop(address, None)

    def enlist(self, recruits: Sequence[Recruit], hosts: int | None = None) -> None:
        """Take these workers as the crew, of which at most ``hosts`` get work.

        Says once if that is not all of them, and if facts that results depend on differ between workers, or
        from those where the run was planned.
        """
        self.members = frozenset(one.address for one in recruits)
        if hosts is not None and hosts < len(self.members):
            told = f"work goes to {hosts} of {len(self.members)} workers"
            self._tell(told, "on more a step would hardly be faster; parallel={...} cuts it for all")
        known = [one.machine for one in (*self.planned, *recruits)]
        unlike = [f"{name} {' or '.join(found)}" for name, found in values_of(known).items() if found[1:]]
        if unlike:
            self._tell(
                f"workers are not of one kind ({'; '.join(unlike)})",
                "results are close to those of workers of one kind, not equal; for equal ones ask for nodes "
                "of one kind, with one version of all packages",
            )

    def _tell(self, what: str, why: str) -> None:
        if what not in self.told_of_all:
            self.told_of_all.add(what)
            self.say(f"{what}: {why}")

    def nobody(self, addresses: Sequence[str]) -> str:
        """Say that all these workers are left out, and why one of them is."""
        why = next((f" ({one}: {self.told[one]})" for one in addresses if one in self.told), "")
        return f"none of the workers that are there ({len(addresses)}) can take part in the run{why}"

    @property
    def _needs(self) -> str:
        return f"and the run needs {-(-self.memory_bytes >> 20)} MiB"

    def _lack(self, one: Recruit) -> str | None:
        """Return why a worker has no room, whoever else is there; None: it may have."""
        if one.limit_bytes and one.limit_bytes < self.memory_bytes:
            return f"its memory limit is {one.limit_bytes >> 20} MiB, {self._needs}"
        if one.available.nbytes < self.memory_bytes:
            return f"it may use {one.available.nbytes >> 20} MiB ({one.available.name}), {self._needs}"
        return None

    def _crowded(self, recruits: Sequence[Recruit]) -> dict[str, str]:
        """Return the workers that are too many for what they share, and why; the last crew's come first."""
        usual, there, lacks = Counter(map(_place, self.planned)), Counter[Place](), dict[str, str]()
        for one in sorted(recruits, key=lambda one: one.address not in self.members):
            most = max(one.available.nbytes // self.memory_bytes, usual[_place(one)])
            there[_place(one)] += 1
            if one.available.shared and there[_place(one)] > most:
                size = one.available.nbytes >> 20
                lacks[one.address] = (
                    f"{there[_place(one)]} workers of {one.host} share {size} MiB ({one.available.name}), "
                    f"{self._needs} of each"
                )
        return lacks

    def _leave_out(self, address: str, why: str) -> None:
        if address not in self.told:
            self.told[address] = why
            self.say(f"worker {address} is left out: {why}; the run goes on without it")


def _place(one: Recruit) -> Place:
    return one.host, one.available.name
