"""Four answers in words: does it learn, when is it done, what limits it, which layer is worst."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from oocdl.dashboard.series import Column, Table
from oocdl.dashboard.view import LastPass, View
from oocdl.events import VALIDATION_PREFIX
from oocdl.report.units import clock_time

LEAST_STEPS = 8
"""Minimum number of steps from which learning can be judged."""
MOST_BLOCKS = 32
"""Maximum number of blocks whose means a slope is fitted to: neighbouring steps are not independent."""
SURE = 3.0
"""Standard errors beyond which a slope counts as more than noise."""
RECENT_STEPS = 20
SILENT_SECONDS = 30.0
"""Seconds without news after which a run that has not ended is called silent."""
DISK_BOUND_SHARE = 0.6
"""Share of the disk's measured rate at which the disk is said to limit the run."""
BUSY_SHARE, OTHERS_SHARE = 0.9, 0.2
"""Shares of all cores above which other processes limit the run: busy at all, and busy with others."""
WAITS = {
    "memory": "threads wait for memory: a larger memory= helps",
    "disk": "threads read and write: a larger memory= or a faster spill= helps",
    "network": "workers wait for each other: fewer of them, or a faster network",
    "compute": "threads wait for each other",
}
"""Cause of waiting -> what it means, and what helps."""


@dataclass(frozen=True)
class Answer:
    """A word or number, a sentence about it, and how it is meant: "good", "bad" or "" for neither."""

    short: str
    long: str
    mood: str = ""


@dataclass(frozen=True)
class Slope:
    """The trend of a loss: a straight line through its last steps."""

    steps: int
    change: float
    """Change of the loss from the first to the last of these steps."""
    error: float
    """Standard error of the change."""

    @property
    def is_sure(self) -> bool:
        return abs(self.change) > SURE * self.error

    def __str__(self) -> str:
        return f"{self.change:+.2g} ± {self.error:.1g} over the last {self.steps} steps"


def slope_of(loss: Column) -> Slope:
    """Return how a loss changes: over its last eighth, quarter or half, whichever is the first to be sure."""
    tried = [_fitted(loss[-count:]) for count in (len(loss) // 8, len(loss) // 4) if count >= LEAST_STEPS]
    tried.append(_fitted(loss[-max(len(loss) // 2, LEAST_STEPS) :]))
    return next((one for one in tried if one.is_sure), tried[-1])


def _fitted(loss: Column) -> Slope:
    means = np.array([part.mean() for part in np.array_split(loss, min(len(loss), MOST_BLOCKS))])
    at = np.linspace(-0.5, 0.5, len(means))
    change = float(at @ means / (at @ at))
    rest = means - means.mean() - change * at
    error = float(np.sqrt(rest @ rest / max(len(means) - 2, 1) / (at @ at)))
    rounding = 1e-9 * float(np.abs(means).max(initial=0.0))  # which is no trend
    return Slope(len(loss), change, max(error, rounding))


def learning(view: View) -> Answer:
    """Tell whether the loss falls, by its slope; of a run that is over, from where it fell to where."""
    loss = view.steps["loss"]
    loss = loss[np.isfinite(loss)]
    if len(loss) < LEAST_STEPS:
        return Answer("too early", f"{len(loss)} steps are done; {LEAST_STEPS} tell more")
    part = max(len(loss) // 10, 3)
    # Of a long run only some: all would be a tenth of its steps squared.
    spans = np.lib.stride_tricks.sliding_window_view(loss, part)
    means = np.append(spans[:: part // 100 or 1].mean(axis=1), spans[-1].mean())
    first, now, slope = float(means[0]), float(means[-1]), slope_of(loss)
    least = f"least {means.min():.4g} (means of {part} steps)"
    if view.ended == "finished":
        way = ("falling" if slope.change < 0 else "rising") if slope.is_sure else "flat"
        mood = "good" if now < first else "bad"
        return Answer(f"{first:.4g} → {now:.4g}", f"{least}; {way} at the end: {slope}", mood)
    text = f"{slope}; now {now:.4g}, at first {first:.4g}, {least}"
    if slope.is_sure:
        return Answer("no, rising", text, "bad") if slope.change > 0 else Answer("yes, falling", text, "good")
    return Answer("flat", text, "" if now < first else "bad")


def remaining(view: View, now_seconds: float | None = None) -> Answer:
    """Tell when the run will be done, by the mean of its last steps, and of what is between steps."""
    facts, done, total = view.facts, view.done, view.total
    at = time.time() if now_seconds is None else now_seconds
    if view.ended == "finished":
        return Answer("done", f"{done} steps are done", "good")
    if view.ended == "stopped":
        return Answer("stopped", f"{done} of {total} steps are done; start it again to go on", "bad")
    seconds = view.steps["seconds"][-RECENT_STEPS:]
    mean = float(np.nanmean(seconds)) if seconds.size else (facts.predicted_seconds if facts else 0.0)
    validating = float(np.nansum(view.steps[f"{VALIDATION_PREFIX}seconds"])) / max(done, 1)
    apart = validating if view.seconds_apart is None else view.seconds_apart
    left = (total - done) * (mean + apart)
    end = time.strftime("%a %H:%M", time.localtime(at + left))
    source = "predicted" if not seconds.size else "measured"
    told = [*([view.now.at_seconds] if view.now else []), *(note["at"] for note in view.notes[-1:])]
    silent = at - max(told, default=time.time())
    if silent > max(SILENT_SECONDS, 5 * mean):
        news = f"nothing was told for {clock_time(silent)}"
        return Answer("silent", f"{news}; {done} of {total} steps are done", "bad")
    rates = f"{mean:.2f} s a step" + (f", {apart:.2f} s for validations and commits" if apart else "")
    return Answer(f"in {clock_time(left)}", f"{end}; step {done} of {total}, {rates} ({source})")


def thread_shares(last: LastPass) -> dict[str, float]:
    """Shares of the time of all threads in the last pass: what each of them did, or waited for."""
    spent = sum((np.diff(lane.times, axis=1).sum(axis=0) for lane in last.lanes), np.zeros(5))
    spent /= max(last.seconds * len(last.lanes), 1e-12)
    names = ("memory", "reading", "permit", "computing", "writing")
    shares = dict(zip(names, spent.tolist(), strict=True))
    shares["nothing to do"] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def disk_share(view: View) -> float:
    """Return the disk traffic of the last steps as a share of the measured rates."""
    facts, steps = view.facts, view.steps
    if facts is None or not len(steps):
        return 0.0
    read, written, seconds = (
        float(np.nansum(steps[name][-RECENT_STEPS:])) for name in ("read_bytes", "written_bytes", "seconds")
    )
    return (read / facts.disk_read_rate + written / facts.disk_write_rate) / max(seconds, 1e-9)


def others_share(view: View) -> float:
    """Share of a machine's processors that others held lately, 0 where some idle; of several, the largest."""
    machines: dict[str, list[Table]] = {}
    for name, table in view.present.items():
        machines.setdefault(name.partition(",")[0], []).append(table)
    worst = 0.0
    for tables in machines.values():
        recent = [table.recent(RECENT_STEPS) for table in tables]
        busy, idle = recent[0]("busy_seconds"), recent[0]("idle_seconds")
        own = sum(one("processor_seconds") for one in recent)
        if busy > 0 and busy / (busy + idle) > BUSY_SHARE:
            worst = max(worst, (busy - own) / (busy + idle))
    return worst


def bottleneck(view: View) -> Answer:
    """Tell what limits a step: computing, the disk, the network, memory, or what else runs on the machine."""
    if view.last_pass is None:
        return Answer("too early", "a whole step has to be measured first")
    shares, disk, others = thread_shares(view.last_pass), disk_share(view), others_share(view)
    processes, threads = len({lane.process for lane in view.last_pass.lanes}), len(view.last_pass.lanes)
    # One thread of a process reads ahead while the others compute.
    most = (threads - processes) / threads if threads > processes else 1.0
    computing = min(shares["computing"] / most, 1.0)
    measured = view.facts is None or view.facts.rates_measured
    rate = "" if measured else " by a nominal rate (oocdl info --machine measures it)"
    text = f"processors compute {computing:.0%} of the time, the disk moves {disk:.0%} of what it can{rate}"
    if others > OTHERS_SHARE:
        held = f"they hold {others:.0%} of the cores, and none is idle"
        return Answer("other processes", f"{held}; {text}", "bad")
    if disk > DISK_BOUND_SHARE and disk > computing:
        return Answer("disk", f"{text}; more memory= or a faster spill= helps")
    if computing > 0.7:
        return Answer("compute", f"{text}; more threads, workers or a GPU help")
    waits = {"memory": shares["memory"], "disk": shares["reading"] + shares["writing"]}
    waits["network" if processes > 1 else "compute"] = shares["nothing to do"] + shares["permit"]
    worst = max(waits, key=lambda name: waits[name])
    if worst == "disk" and disk < DISK_BOUND_SHARE / 2:
        # Where the spill moves next to nothing, what is read is the data.
        of_data = disk <= 0.01
        cause = "what they read is the data" if of_data else "it is slower than that now, or others use it"
        waited = f"threads read and write {waits[worst]:.0%} of the time"
        return Answer("slow dataset" if of_data else "slow disk", f"{waited}; {text}; {cause}")
    return Answer(worst, f"{text}; {WAITS[worst]}")


def worst_layer(view: View) -> Answer:
    """Tell which layer takes most time, as a mean of the last passes, beside what was predicted."""
    seconds, last = view.layer_seconds(), view.last_pass
    if seconds is None or view.facts is None or last is None or not seconds.sum():
        return Answer("too early", "a whole step has to be measured first")
    index = int(np.argmax(seconds))
    layer = view.facts.passes[last.plan_id].layers[index]
    mean = "in one pass" if len(last.spent) == 1 else f"a pass, the mean of {len(last.spent)}"
    text = f"{seconds[index] / seconds.sum():.0%} of all computing, {seconds[index]:.3g} s {mean}"
    if layer.predicted_seconds:
        nominal = "" if view.facts.rates_measured else " by nominal rates"
        text += f", {seconds[index] / layer.predicted_seconds:.2g} times as predicted{nominal}"
    return Answer(layer.name, f"{text} ({layer.phase})")
