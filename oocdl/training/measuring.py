"""Measures this machine's rates before a long run, without being asked: its plan is then by what is here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from oocdl.planning.calibrate import known_rates
from oocdl.planning.cost_model import NOMINAL
from oocdl.report.plan_view import Plan
from oocdl.report.units import duration
from oocdl.storage.files import existing

VARIABLE = "OOCDL_MEASURE"
"""Environment variable: ``off`` never measures without being asked."""
LONG_RUN_SECONDS = 600.0
"""Predicted seconds of a run beyond which it is worth half a minute of measuring."""
MEASURING_BYTES = 1 << 30
"""Budget beside which a process that measures finds room: it takes half of this at most."""
MOST_SECONDS = 600.0
"""Seconds after which measuring is given up."""
CODE = "import sys; from oocdl.planning.calibrate import rates_for as m; m(sys.argv[1])"


def measured_before(plan: Plan, run: Path, say: Callable[[str], None]) -> bool:
    """Measure in a process of its own if nobody has, and the run is long; returns whether that was done.

    The disk is measured where the spill will be. ``say`` is told, also where measuring is left out or fails:
    then the run goes by nominal rates.
    """
    seconds = plan.seconds * plan.course.total_steps
    engine = plan.machine.engine
    off = os.environ.get(VARIABLE, "") == "off"
    if off or seconds < LONG_RUN_SECONDS or known_rates(engine) is not NOMINAL:
        return False
    predicted = f"predicted to take {duration(seconds)} by nominal rates"
    if plan.settings.memory_bytes < MEASURING_BYTES:
        say(f"{predicted}; this budget has no room to measure: oocdl info --machine does it")
        return False
    say(f"{predicted}; measuring this machine first, once, half a minute ({VARIABLE}=off does without)")
    folder = existing(plan.settings.spill_folder(run / "spill").absolute())
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        subprocess.run(
            [sys.executable, "-c", CODE, engine],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        say(f"this machine could not be measured, the plan is by nominal rates: {told}")
        return False
    return True
