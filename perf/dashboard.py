"""What a run's live page costs the run, and how large a page of a long run is in the browser.

One U-Net, looked at in three ways that take turns every few steps: nothing is written; what a page needs is
written, as in every run; and a page is open, in a browser elsewhere, then in one on this machine. Then a
page of 500 layers, 10,000 tasks a step and a week of history: updates a second, and memory of the browser,
tab by tab.

    python perf/dashboard.py [--toy] [--json FILE]

Needs Debian's chromium, and playwright.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
from bench import NO_COMMIT
from cases import unet, write_data
from dashboard_one import MODES
from measure import MIB, folder, measure_rates, parser, report
from playwright.sync_api import Page
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from oocdl.dashboard.facts import PassFacts, RunFacts
from oocdl.dashboard.live_log import OF_PROCESS, LiveLog
from oocdl.events import PassTimes, ProcessLook, StepRunning
from oocdl.host.limits import anonymous_bytes_of
from oocdl.report.layer_facts import LayerFacts

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.browser import browser

MOST_COST, MOST_BYTES, LEAST_UPDATES = 0.01, 300 * 10**6, 1.0
MEMORY = 3 << 30
ALIVE = ("Overview", "Learning", "Step", "Machine")
"""Tabs in which something is new each second."""
TABS = ("Overview", "Learning", "Step", "Machine", "Layers", "Network", "Messages")
SIZE_SECONDS = 1.0
"""From measurement to measurement of the page's process."""
COUNT = """() => {
    window.patches = 0
    Bokeh.documents[0].on_change(event => { if (event.kind != 'MessageSent') window.patches += 1 })
}"""


@contextmanager
def looker(draws: bool) -> Iterator[Callable[[str], None]]:
    """Opens a page: a browser that draws it, or what a browser elsewhere is to this machine: a connection."""
    if draws:
        with browser() as seen:
            yield seen.open
        return

    def connect(address: str) -> None:
        html = urlopen(address, timeout=60).read().decode()
        token = html.partition('"token":"')[2].partition('"')[0]
        host = address.split("/")[2]
        request = HTTPRequest(f"ws://{host}/ws", headers={"Origin": f"http://{host}"})

        async def listen() -> None:
            line = await websocket_connect(request, subprotocols=["bokeh", token])
            while await line.read_message() is not None:
                pass

        threading.Thread(target=lambda: asyncio.run(listen()), daemon=True).start()

    yield connect


def cost(args: argparse.Namespace, draws: bool) -> dict[str, Any]:
    """Seconds of a step, by how the run is looked at, and what is more than alone."""
    case, block, rounds = (unet(2, 16, 0), 2, 2) if args.toy else (unet(8, 64, 2), 6, args.rounds)
    with folder(args) as place, looker(draws) as look:
        case.write(place / "model.onnx")
        write_data(case, place / "data.zarr")
        words = {
            "model": str(place / "model.onnx"), "dataset": str(place / "data.zarr"), "block": block,
            "steps": len(MODES) * block * rounds, "engine": args.engine, "memory": MEMORY,
            "commit_seconds": NO_COMMIT, "workdir": str(place / "run"), **case.options(),
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).with_name("dashboard_one.py")), json.dumps(words)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdin is not None
        look(process.stdout.readline().strip())
        process.stdin.write("\n")
        process.stdin.flush()
        answer = process.stdout.read()
        process.wait()
        if process.returncode:
            raise SystemExit("the run has failed")
        found = json.loads(answer)
    # The first block warms up, and the first step of a block is told with the change.
    steps = [step for step in found["steps"][block:] if step["place"]]
    seconds = {mode: median(s["seconds"] for s in steps if s["mode"] == mode) for mode in MODES}
    return {
        "seconds": seconds,
        "cost": {mode: seconds[mode] / seconds["alone"] - 1 for mode in MODES[1:]},
        "server_bytes": found["server_bytes"],
        "steps": found["steps"],
    }


def large_run(run: Path, layers: int, tasks: int, steps: int) -> LiveLog:
    """Write the directory of a run that has gone on for a week, a step a second; returns its log."""
    for name in ("history", "live"):
        (run / name).mkdir(parents=True)
    (run / "run.json").write_text("{}")
    rows = (
        {"step": n, "epoch": 0, "loss": 1 + 1 / n, "lr": 1e-3, "seconds": 1.0, "read_bytes": 10**8,
         "written_bytes": 10**8, "peak_bytes": 10**9}
        for n in range(1, steps + 1)
    )  # fmt: skip
    with (run / "history" / "steps.jsonl").open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    third = layers // 3
    phases = ["forward"] * third + ["backward"] * third + ["update"] * (layers - 2 * third)
    every = tuple(
        LayerFacts(
            name=f"encoder.stage{n // 10}.block{n % 10}.conv", phase=phase, units=tasks // layers,
            cuts="space0:20", shape=f"64 × {128 >> n % 4} × {128 >> n % 4}", operators="Conv, Relu",
            unit_bytes=10**7, read_bytes=10**8, written_bytes=10**7, flops=10**10, predicted_seconds=0.01,
            sources=(n - 1,) if n else (),
        )
        for n, phase in enumerate(phases)
    )  # fmt: skip
    one = PassFacts(layers=every, layer_of=tuple(n * layers // tasks for n in range(tasks)))
    known = RunFacts(
        model="large.onnx", engine="torch", threads=16, budget_bytes=10**11,
        base_bytes=10**9, steps=2 * steps, predicted_seconds=1.0,
        predicted_peak_bytes=10**10, predicted_spill_bytes=10**9, disk_read_rate=1e9, disk_write_rate=1e9,
        rates_measured=True, dataset="", group="", images=(), passes={"main": one},
    )  # fmt: skip
    (run / "live" / "facts.json").write_text(known.to_json())
    at, now = time.time() - steps, time.time()
    with (run / "live" / "resources.jsonl").open("w") as out:
        began = at
        while at < now:
            numbers = [10**9 + int(at - began) * 1000] * len(OF_PROCESS)
            row = {"at": at, "processes": {f"tcp://10.0.0.{n}": numbers for n in range(4)}}
            out.write(json.dumps(row) + "\n")
            at += max(1.0, (at - began) / 4000)
    return LiveLog(run)


def looks(step: int, tasks: int) -> StepRunning:
    """How four processes of 16 threads stand somewhere in a step, with the times of the step before."""
    random, processes = np.random.default_rng(step), []
    for number in range(4):
        mine = np.arange(number, tasks, 4, dtype=np.int32)
        phases = np.zeros(tasks, np.uint8)
        phases[mine] = np.where(mine < random.integers(tasks), 4, random.integers(0, 4, mine.size))
        began = time.time() - 1 + mine[:, None] / tasks
        sizes = {name: 10**9 * (step + 1) for name in OF_PROCESS}
        last = PassTimes(
            plan_id="main", numbers=mine, times=began + np.linspace(0, 0.01, 6),
            threads=(mine // 4 % 16).astype(np.uint8),
        )  # fmt: skip
        name = f"tcp://10.0.0.{number}"
        processes.append(ProcessLook(name=name, threads=16, phases=phases.tobytes(), last_pass=last, **sizes))
    return StepRunning(
        at_seconds=time.time(), step=step, pass_number=1, passes=1, plan_id="main", processes=tuple(processes)
    )


def page_bytes() -> int:
    """Of the page's process, with its share of what others have too."""
    sizes = [0]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (entry / "cmdline").read_bytes() and _is_mine(int(entry.name)):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                sizes.append(sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")))
        except OSError:  # it has ended
            continue
    return max(sizes)


def _is_mine(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def large(args: argparse.Namespace) -> dict[str, Any]:
    """Updates a second and bytes of each tab of a large page."""
    layers, tasks, steps, seconds = (30, 300, 1000, 3) if args.toy else (500, 10_000, 604_800, 12)
    tabs: dict[str, Any] = {}
    with folder(args) as place, browser() as seen:
        page, blank = seen.page, page_bytes()
        page.set_default_timeout(120_000)
        run, over = place / "run", threading.Event()
        log = large_run(run, layers, tasks, steps)

        def goes_on() -> None:
            step = steps
            while not over.wait(0.5):
                step += 1
                log(looks(step, tasks))

        begun = time.monotonic()
        server = subprocess.Popen(
            [sys.executable, "-m", "oocdl.dashboard.server", str(run)], stdout=subprocess.PIPE, text=True
        )
        writer = threading.Thread(target=goes_on)
        writer.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            started, begun = time.monotonic() - begun, time.monotonic()
            seen.open(address)
            loaded = time.monotonic() - begun
            page.evaluate(COUNT)
            for tab in TABS[: 2 if args.toy else None]:
                page.locator(".bk-tab", has_text=tab).click()
                page.wait_for_timeout(2000)
                tabs[tab] = watched(page, server.pid, seconds)
        finally:
            over.set()
            writer.join()
            server.terminate()
            server.wait()
    return {"started": started, "loaded": loaded, "blank": blank, "tabs": tabs}


def watched(page: Page, server: int, seconds: int) -> dict[str, Any]:
    """What a tab does for some seconds, and the most that its memory was."""
    updates, last = 0, page.evaluate("() => window.patches")
    busy, begun = busy_seconds(server), time.monotonic()
    quiet, most, sized = True, page_bytes(), begun
    while time.monotonic() - begun < seconds:
        page.wait_for_timeout(50)
        if time.monotonic() - sized > SIZE_SECONDS:
            most, sized = max(most, page_bytes()), time.monotonic()
        patches = page.evaluate("() => window.patches")
        updates += quiet and patches != last  # patches of one update come close together
        quiet, last = patches == last, patches
    took = time.monotonic() - begun
    return {
        "updates": updates / took,
        "server_bytes": anonymous_bytes_of(server),
        "server_busy": (busy_seconds(server) - busy) / took,
        "process": most,
    }


def busy_seconds(pid: int) -> float:
    """Processor seconds of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Parse, measure, tell. Exit code 1 if a promise is broken; a toy is too small to tell."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=8, help="of blocks of steps in each of three ways")
    made.add_argument("--only", choices=("cost", "large"))
    args = made.parse_args()
    measure_rates(args)
    found: dict[str, Any] = {}
    if args.only != "large":
        rows = []
        for draws in (False, True):
            one = found["drawn here" if draws else "drawn elsewhere"] = cost(args, draws)
            rows += [
                [f"{mode}{', drawn here' * (draws and mode == 'shown')}", f"{one['seconds'][mode]:.4f}",
                 f"{100 * one['cost'].get(mode, 0):+.2f}",
                 f"{one['server_bytes'] / MIB:.0f}"]
                for mode in MODES
            ]  # fmt: skip
        report(args, ("looked at", "s/step", "more %", "server MiB"), rows, [found])
        print()
    if args.only != "cost":
        found["large"] = large(args)
        rows = [
            [tab, f"{one['updates']:.2f}", f"{one['process'] / MIB:.0f}",
             f"{one['server_bytes'] / MIB:.0f}", f"{100 * one['server_busy']:.0f}"]
            for tab, one in found["large"]["tabs"].items()
        ]  # fmt: skip
        heads = ("tab", "updates/s", "page's process MiB", "server MiB", "server % of a core")
        report(args, heads, rows, [found])
        one = found["large"]
        print(f"ready after {one['started']:.1f} s, loaded in {one['loaded']:.1f} s, ", end="")
        print(f"an empty page {one['blank'] / MIB:.0f} MiB")
    broken = [
        name for name, more in found.get("drawn elsewhere", {}).get("cost", {}).items() if more > MOST_COST
    ]
    broken += [
        tab for tab, one in found.get("large", {}).get("tabs", {}).items()
        if one["process"] > MOST_BYTES or (tab in ALIVE and one["updates"] < LEAST_UPDATES)
    ]  # fmt: skip
    if broken and not args.toy:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
