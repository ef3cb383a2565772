"""Parts of the text of a plan: what is trained (for ``fit`` and ``oocdl info`` too), and sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.trained import Part, Trained
from oocdl.planning.compiler import CompiledPass
from oocdl.planning.passes import Course
from oocdl.planning.simulation.timeline import Simulated
from oocdl.report.tables import Column, Sheet
from oocdl.report.units import counted

TIES = 3
"""Maximum number of tied tensors that are named; the others are counted."""
UNSAID = (
    "ONNX records no requires_grad, padding_idx or detach(): if the module had any, "
    'say with freeze=["pattern"] what stays as it is'
)


def trained_text(trained: Trained) -> str:
    """Write how many tensors and parameters are trained, what else there is and why, the operators of the
    user's own, and all remarks.

    Names from the file are escaped: every line is one line.
    """
    lines = [_line(trained, part) for part in Part if part is Part.TRAINED or trained.of(part)]
    lines += [
        f"tied: {shown(record.name)} is one tensor of {', '.join(map(shown, record.modules))}"
        for record in trained.tied[:TIES]
    ]
    if len(trained.tied) > TIES:
        lines.append(f"tied: {len(trained.tied) - TIES} more")
    if trained.own:
        own = ", ".join(f"{shown(name)} × {count}" for name, count in trained.own)
        lines.append(f"operators of your own: {own}, as registered")
    unsaid = [UNSAID] if trained.is_unsaid else []
    notes = [f"note: {note}" for note in trained.notes]
    remarks = [f"LOOKS WRONG: {one.text}\n             {one.cure}" for one in trained.remarks]
    return "\n".join([*lines, *unsaid, *notes, *remarks])


def _line(trained: Trained, part: Part) -> str:
    tensors, elements = trained.count(part)
    reasons = Counter(record.why for record in trained.of(part))
    why = ", ".join(f"{reason} × {count}" for reason, count in reasons.items())
    parameters = f", {elements:,} parameters" if part in (Part.TRAINED, Part.FROZEN) else ""
    return f"{part.value}: {counted(tensors, 'tensor', ',')}{parameters}" + (f" ({why})" if why else "")


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
