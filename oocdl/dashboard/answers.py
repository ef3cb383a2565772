"""Four answers in words: does it learn, when is it done, what limits it, which layer is worst."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from oocdl.dashboard.series import smoothed
from oocdl.dashboard.view import LastPass, View
from oocdl.report.progress import clock_time

LEAST_STEPS = 8
"""Fewer steps tell nothing of learning."""
STEADY_SHARE = 0.02
"""A loss that changes by less than this share of its range is flat."""
RECENT_STEPS = 20
SILENT_SECONDS = 30.0
"""A run that told nothing for so long, and no end, is silent."""
DISK_BOUND_SHARE = 0.6
"""Of the disk's measured rate, what has to move to say that the disk limits."""


@dataclass(frozen=True)
class Answer:
    """A word or number, a sentence about it, and how it is meant: "good", "bad" or "" for neither."""

    short: str
    long: str
    mood: str = ""


def learning(view: View) -> Answer:
    """Tell whether the loss falls: the mean over the last tenth of the steps beside the tenth before."""
    loss = view.steps["loss"]
    if len(loss) < LEAST_STEPS:
        return Answer("too early", f"{len(loss)} steps are done; {LEAST_STEPS} tell more")
    part = max(len(loss) // 10, 3)
    now, before, first = (float(np.nanmean(x)) for x in (loss[-part:], loss[-2 * part : -part], loss[:part]))
    best = float(np.nanmin(smoothed(loss, 0.8)))
    text = f"loss {now:.4g}, at first {first:.4g}, least {best:.4g}"
    change = (before - now) / max(abs(first - best), 1e-12)
    if change > STEADY_SHARE:
        return Answer("yes, falling", text, "good")
    if change < -STEADY_SHARE:
        return Answer("no, rising", text, "bad")
    return Answer("flat", text, "" if now < first else "bad")


def remaining(view: View, now_seconds: float | None = None) -> Answer:
    """Tell when the run will be done, by the mean of its last steps."""
    facts, done = view.facts, int(view.steps["step"][-1]) if len(view.steps) else 0
    total = facts.steps if facts else done
    at = time.time() if now_seconds is None else now_seconds
    if view.ended == "finished":
        return Answer("done", f"{done} steps are done", "good")
    if view.ended == "stopped":
        return Answer("stopped", f"{done} of {total} steps are done; start it again to go on", "bad")
    seconds = view.steps["seconds"][-RECENT_STEPS:]
    mean = float(np.nanmean(seconds)) if seconds.size else (facts.predicted_seconds if facts else 0.0)
    left = (total - done) * mean
    end = time.strftime("%a %H:%M", time.localtime(at + left))
    source = "predicted" if not seconds.size else "measured"
    silent = at - last_told(view)
    if silent > max(SILENT_SECONDS, 5 * mean):
        return Answer(
            "silent", f"nothing was told for {clock_time(silent)}; {done} of {total} steps are done", "bad"
        )
    return Answer(f"in {clock_time(left)}", f"{end}; step {done} of {total}, {mean:.2f} s a step ({source})")


def last_told(view: View) -> float:
    """When the run told something last, in seconds since 1970."""
    times = [view.now.at_seconds] if view.now else []
    return max([*times, *(note["at"] for note in view.notes[-1:])], default=time.time())


def thread_shares(last: LastPass) -> dict[str, float]:
    """Shares of the time of all threads in the last pass: what each of them did, or waited for."""
    spent = np.zeros(6)
    for lane in last.lanes:
        spent[:5] += np.diff(lane.times, axis=1).sum(axis=0)
    whole = max(last.seconds * len(last.lanes), 1e-12)
    names = ("memory", "reading", "permit", "computing", "writing")
    shares = {name: float(part / whole) for name, part in zip(names, spent[:5], strict=True)}
    shares["nothing to do"] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def disk_share(view: View) -> float:
    """What the last steps moved to and from the disk, as a share of its measured rates."""
    facts, steps = view.facts, view.steps
    if facts is None or not len(steps):
        return 0.0
    read, written, seconds = (
        float(np.nansum(steps[name][-RECENT_STEPS:])) for name in ("read_bytes", "written_bytes", "seconds")
    )
    return (read / facts.disk_read_rate + written / facts.disk_write_rate) / max(seconds, 1e-9)


def bottleneck(view: View) -> Answer:
    """Tell what limits a step: computing, the disk, the network or memory."""
    if view.last_pass is None:
        return Answer("too early", "a whole step has to be measured first")
    shares, disk = thread_shares(view.last_pass), disk_share(view)
    processes = len({lane.process for lane in view.last_pass.lanes})
    threads = len(view.last_pass.lanes)
    # One thread of a process reads ahead while the others compute.
    most = (threads - processes) / threads if threads > processes else 1.0
    computing = min(shares["computing"] / most, 1.0)
    text = f"processors compute {computing:.0%} of the time, the disk moves {disk:.0%} of what it can"
    if disk > DISK_BOUND_SHARE and disk > computing:
        return Answer("disk", f"{text}; more memory= or a faster spill= helps")
    if computing > 0.7:
        return Answer("compute", f"{text}; more threads, workers or a GPU help")
    waits = {"memory": shares["memory"], "disk": shares["reading"] + shares["writing"]}
    waits["network" if processes > 1 else "compute"] = shares["nothing to do"] + shares["permit"]
    worst = max(waits, key=lambda name: waits[name])
    help_ = {
        "memory": "threads wait for memory: a larger memory= helps",
        "disk": "threads read and write: a larger memory= or a faster spill= helps",
        "network": "workers wait for each other: fewer of them, or a faster network",
        "compute": "threads wait for each other",
    }[worst]
    return Answer(worst, f"{text}; {help_}")


def worst_layer(view: View) -> Answer:
    """Tell which layer takes most time, beside what was predicted."""
    seconds = view.layer_seconds()
    if seconds is None or view.facts is None or view.last_pass is None or not seconds.sum():
        return Answer("too early", "a whole step has to be measured first")
    index = int(np.argmax(seconds))
    layer = view.facts.passes[view.last_pass.plan_id].layers[index]
    share = seconds[index] / seconds.sum()
    ratio = seconds[index] / layer.predicted_seconds if layer.predicted_seconds else float("nan")
    text = f"{share:.0%} of all computing, {seconds[index]:.3g} s a step"
    return Answer(layer.name, f"{text}, {ratio:.2g} times as predicted ({layer.phase})")
