"""Walks through the rungs of a search: trains what is left to train, and decides which trials go on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oocdl.config import differences, make_settings
from oocdl.errors import InputError, ModelWarning
from oocdl.events import Notice, RungDone, SearchEvent, SearchListener, TrialDone
from oocdl.training.resume import refuse_if
from oocdl.tuning import search_record as records
from oocdl.tuning.asked import Asked, Data, check_schedule, total_steps
from oocdl.tuning.halving import Result, survivors
from oocdl.tuning.search_record import Record, Trial
from oocdl.tuning.trainers import Crew
from oocdl.tuning.trial import Measure, Task


@dataclass(eq=False)
class Said:
    """Tells listeners what happens, and what is wrong with the model once for all trials."""

    listeners: Sequence[SearchListener]
    warns: bool
    """Whether remarks are warnings, as nobody else shows them."""
    said: set[str] = field(default_factory=set)

    def emit(self, event: SearchEvent) -> None:
        """Tell all listeners."""
        for listener in self.listeners:
            listener(event)

    def note(self, text: str) -> None:
        """Tell a line."""
        self.emit(Notice(text))

    def result(self, result: Result) -> None:
        """Tell notes and remarks that no trial before has had."""
        for text in (*result.notes, *result.remarks):
            if text not in self.said:
                self.said.add(text)
                self.note(text)
                if self.warns and text in result.remarks:
                    warnings.warn(text, ModelWarning, stacklevel=6)


@dataclass(eq=False)
class Searching:
    """Walks through the rungs of one search."""

    folder: Path
    asked: Asked
    data: Data
    crew: Crew
    say: Said

    def run(self) -> None:
        """Train all trials that are left to train."""
        self.record = self._begin()
        self.results: list[dict[int, Result]] = [{} for _ in range(self.asked.rungs)]
        entered = self._first_rung()
        for rung in range(self.asked.rungs):
            if rung:
                self._train(rung, entered)
            last = rung == self.asked.rungs - 1
            found = self.results[rung]
            entered = [] if last else survivors(entered, found, self.asked.eta, self.asked.mode)
            self.say.emit(RungDone(rung, self.asked.rungs, tuple(entered)))
            if not entered:
                return

    def _begin(self) -> Record:
        """The record of the search: a new one, or that which is there, if the call is of the same search."""
        asked, facts = self.asked, {**self.asked.facts(), **self.data.facts()}
        before = records.read_record(self.folder)
        if before is not None:
            sets = dict.fromkeys(("dataset", "validation"))
            changed = [*differences({**before.facts, **sets}, {**facts, **sets})]
            changed += self.data.changed(before.facts, facts)
            refuse_if(
                f"the search in {self.folder} was started differently", changed, "choose another workdir"
            )
            if asked.trials < len(before.trials) or asked.rungs < before.rungs:
                raise InputError(
                    f"the search in {self.folder} has {len(before.trials)} trials and {before.rungs} rungs; "
                    "it goes on with as many or more"
                )
        given = make_settings(**{k: v for k, v in asked.options.items() if k in ("memory", "threads")})
        memory_bytes, threads = (before.memory_bytes, before.threads) if before else self.crew.share()
        if asked.options.get("memory") is not None:
            memory_bytes = given.memory_bytes
        threads = given.threads or threads
        self.crew.check(memory_bytes)
        trials = before.trials if before else ()
        return self._kept(Record(facts, memory_bytes, threads, asked.rungs, trials))

    def _kept(self, record: Record) -> Record:
        """The record with the trials that come next, written."""
        asked, trials = self.asked, list(record.trials)
        results = [records.read_result(self.folder, trial.number, 0) for trial in trials]
        earlier = [(trial.picks, result) for trial, result in zip(trials, results, strict=True)]
        for picks in asked.picks(earlier):
            values = asked.values(picks)
            check_schedule(asked, self.data.samples, values)
            trials.append(records.trial_of(len(trials), picks, values))
        made = replace(record, trials=tuple(trials))
        records.write_record(self.folder, made)
        return made

    def _first_rung(self) -> list[int]:
        """Train all trials in the first rung; those of a round are asked for when the one before is done."""
        while True:
            numbers = [trial.number for trial in self.record.trials]
            self._train(0, numbers)
            if len(numbers) == self.asked.trials:
                return numbers
            self.record = self._kept(self.record)

    def _train(self, rung: int, numbers: Sequence[int]) -> None:
        """Train these trials to the total of a rung, but those that are done."""
        found = {n: records.read_result(self.folder, n, rung) for n in numbers}
        done = {n: result for n, result in found.items() if result and (result.error is None or result.final)}
        self.results[rung] = done
        left = [n for n in numbers if n not in done]
        for n in left:  # an error that may not come again
            records.result_path(self.folder, n, rung).unlink(missing_ok=True)
        tasks = [self._task(self.record.trials[n], rung) for n in left]
        for result in self.crew.run(tasks):
            done[result.trial] = result
            self.say.result(result)
            rows = records.rows_of(self.folder, self.record, self.results)
            row = next(row for row in rows if row["trial"] == result.trial)
            self.say.emit(TrialDone(row, len(done), len(numbers)))

    def _task(self, trial: Trial, rung: int) -> Task:
        asked, values = self.asked, self.asked.values(trial.picks)
        totals = [total_steps(asked, self.data.samples, values, n) for n in (rung, rung - 1) if n >= 0]
        validation = self.data.validation
        options = {**asked.fit_options(values), "memory": self.record.memory_bytes}
        return Task(
            trial=trial.number,
            rung=rung,
            steps=totals[0],
            steps_before=totals[1] if rung else 0,
            folder=self.folder,
            run=self.folder / trial.folder,
            model=self.data.model,
            dataset=self.data.dataset.spec(),
            options={**options, "threads": self.record.threads},
            measure=Measure(asked.measure.metric, validation and validation.spec(), asked.measure.last_steps),
        )
