"""Writes what of a model is trained: a block of lines for ``plan``, ``fit`` and ``oocdl info``."""

from __future__ import annotations

from collections import Counter

from oocdl.graph.onnx.model_file import shown
from oocdl.graph.onnx.trained import Part, Trained
from oocdl.report.units import counted

TIES = 3
"""Maximum number of tied tensors that are named; the others are counted."""
UNSAID = (
    'ONNX does not hold requires_grad, padding_idx and detach(): freeze=["pattern"] says what stays as it is'
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
    unsaid = [] if trained.told else [UNSAID]
    notes = [f"note: {note}" for note in trained.notes]
    remarks = [f"LOOKS WRONG: {one.text}\n             {one.cure}" for one in trained.remarks]
    return "\n".join([*lines, *unsaid, *notes, *remarks])


def _line(trained: Trained, part: Part) -> str:
    tensors, elements = trained.count(part)
    reasons = Counter(record.why for record in trained.of(part))
    why = ", ".join(f"{reason} × {count}" for reason, count in reasons.items())
    parameters = f", {elements:,} parameters" if part in (Part.TRAINED, Part.FROZEN) else ""
    return f"{part.value}: {counted(tensors, 'tensor', ',')}{parameters}" + (f" ({why})" if why else "")
