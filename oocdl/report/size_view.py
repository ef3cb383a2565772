"""Parts of the text of a plan: the table of sizes, where samples differ in size, and validations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from oocdl.planning.compiler import CompiledPass
from oocdl.planning.passes import Course
from oocdl.planning.simulation.timeline import Simulated
from oocdl.report.tables import Column, Sheet
from oocdl.report.units import counted

COLUMNS = (
    Column("size", "size", kind="words"),
    Column("batch", "batch"),
    Column("samples", "samples"),
    Column("seconds", "s a pass", lambda seconds: f"{seconds:.3g}"),
    Column("nbytes", "MiB", lambda nbytes: f"{nbytes / 2**20:.0f}"),
)


def size_sheet(
    course: Course, kinds: Mapping[str, CompiledPass], simulated: Mapping[str, Simulated]
) -> Sheet:
    """Make the table of passes that end a step, the main one first; a size is that of the padded samples."""
    counts = Counter(course.labels[row] for row in course.trained)
    rows = []
    for plan_id, one in simulated.items():
        kind, compiled = course.kinds[plan_id], kinds[plan_id]
        shape = compiled.plan.factored.graph.values[next(iter(compiled.feeds))].shape[2:]
        label = kind.label or "x".join(map(str, shape))
        samples = "" if kind.is_rest else counts[kind.label]
        rows.append((label, kind.batch, samples, one.seconds, one.peak_tier_bytes))
    return Sheet("sizes of samples, as they are padded", COLUMNS, rows)


def validation_line(course: Course, seconds: float) -> list[str]:
    """Write a line on the validations of a run, which take so many seconds each; none if there are none."""
    if not course.validated:
        return []
    return [f"validation: {counted(len(course.validated), 'sample')}, {seconds:.3g} s predicted"]
