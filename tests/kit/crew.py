"""A crew of members in this process, whose messages come late, twice and in any order."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distributed import Status

from oocdl.graph.ir.graph import Array
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.hosts.exchange import exchanges_of
from oocdl.planning.hosts.segments import Segment, outline_of
from oocdl.planning.hosts.share import packed_shares
from oocdl.planning.passes import MAIN, PassInfo
from oocdl.planning.task_key import TaskKey
from oocdl.runtime import weight_io
from oocdl.runtime.cluster import worker_tasks
from oocdl.runtime.cluster.local_pass import Superseded
from oocdl.runtime.cluster.member import Member, members
from oocdl.runtime.cluster.member_setup import Setup, pass_setup
from oocdl.runtime.cluster.pass_tasks import PassTasks
from oocdl.runtime.cluster.transfers import HANDLER, fetch_all, hand_out
from oocdl.storage.cache.chunk import use
from oocdl.storage.dataset.identity import identity
from oocdl.training.job import Job

MOST_TICKS = 6
"""A message takes up to so many turns of the event loop."""
REPEATED = 0.3
"""The share of messages that come twice."""


@dataclass(eq=False)
class InProcess:
    """Members that this process has all by itself, by number; each is a run of its own to it."""

    members: list[Member]
    tasks: Mapping[str, PassTasks]
    random: random.Random
    messages: int = 0
    """How many were sent so far."""

    async def run_pass(self, name: str, plan_id: str, info: PassInfo, starts: bool) -> dict[str, float]:
        """One pass, which members begin at different times, as are all segments that may begin."""
        fetching, scalars = [], {}
        tasks = self.tasks[plan_id]
        done = {place: asyncio.Event() for place in tasks.keys}

        async def run(segment: Segment) -> None:
            for before in segment.after:
                await done[before].wait()
            await self.later()
            member = self.members[segment.member]
            if not segment.number:
                running = member.begin(name, plan_id, info, starts)
                worker: Any = SimpleNamespace(rpc=partial(self.connection, member))
                fetching.append(asyncio.create_task(fetch_all(worker, member, running)))
            place = segment.member, segment.number
            ends = tasks.keys[place] in tasks.ends
            ended = await worker_tasks.run_segment(member.setup.run_id, segment.last_group, None, ends)
            done[place].set()
            if ended is not None:
                scalars.update(ended.scalars)

        await asyncio.gather(*map(run, self.random.sample(tasks.segments, len(done))))
        await asyncio.gather(*fetching)
        return scalars

    async def roll_back(self, number: int) -> bool:
        """Have all go back to the beginning of the step of this first pass; whether they can."""
        found = []
        for member in self.random.sample(self.members, len(self.members)):
            await self.later()
            found.append(await worker_tasks.roll_back(member.setup.run_id, number))
        return all(found)

    def connection(self, receiver: Member, address: str) -> Any:
        """What a member has of another by Dask's worker."""
        return SimpleNamespace(**{HANDLER: partial(self._ask, receiver, self.members[int(address)])})

    async def _ask(
        self, receiver: Member, sender: Member, run_id: str, name: str, number: int, now: bool
    ) -> Any:
        self.messages += 1
        again = self.random.random() < REPEATED
        await self.later()
        sent: list[Any] = []

        async def write(answer: Any) -> None:
            await self.later()
            sent.append(answer)

        asked = SimpleNamespace(write=write), sender.setup.run_id, name, number, now
        answer = await hand_out(*asked)
        answer = sent[0] if answer is Status.dont_reply else answer
        if again:
            try:
                await hand_out(*asked)
            except Superseded:
                assert now  # what is handed out is so once
        if now:
            packed = pickle.dumps(answer.data)
            await self.later()
            use(receiver.tier)
            answer = pickle.loads(packed)
        return answer

    async def later(self) -> None:
        """Some turns of the event loop."""
        for _ in range(self.random.randrange(MOST_TICKS)):
            await asyncio.sleep(0)

    def held(self) -> dict[TaskKey, Array]:
        """All that members hold."""
        return {key: chunk.copy() for member in self.members for key, chunk in member.held.items()}


@contextmanager
def crew(
    folder: Path, job: Job, kinds: Mapping[str, CompiledPass], count: int, seed: int
) -> Iterator[InProcess]:
    """Members that hold the weights of the model file, set up as a driver does it."""
    threads = job.machine.threads
    kinds = {MAIN: kinds[MAIN], **kinds}
    exchanges = exchanges_of({name: one.graph for name, one in kinds.items()}, count, threads)
    homes = exchanges[MAIN].homes
    tasks = {name: PassTasks(outline_of(one, count, threads)) for name, one in exchanges.items()}
    made = InProcess([], tasks, random.Random(seed))
    with ExitStack() as stack:
        for number, packed in enumerate(packed_shares(exchanges, count)):
            setup = Setup(
                run_id=f"{folder.name}-{seed}-{number}",
                owner="test",
                addresses=tuple(map(str, range(count))),
                passes={name: pass_setup(kinds[name], one) for name, one in exchanges.items()},
                dataset=job.dataset.spec,
                identities={name: identity(array) for name, array in job.dataset.arrays.items()},
                settings=job.settings,
                preparation=job.preparation,
                watched={},
                run=folder,
                mark="",
                threads=threads,
            )
            pool = ThreadPoolExecutor(threads + 1)
            member = Member(setup, number, folder / f"spill{number}", pool)
            stack.callback(_leave, member)
            members[setup.run_id] = member
            member.open(packed)
            mine = {key for key, home in homes.items() if home == number}
            main = kinds[MAIN]
            read = weight_io.initial(main)
            member.hold(weight_io.load(main.pieces, main.plan.factored, read, member.tier, mine))
            made.members.append(member)
        yield made


def _leave(member: Member) -> None:
    members.pop(member.setup.run_id, None)
    member.close()
