"""The exception that says that workers of a run are not what they were, and how often that may be."""

from __future__ import annotations

from oocdl.errors import ResourceError

SILENT_SECONDS = 20.0
"""Seconds of silence after which a worker is given up, if the user asks for no others."""
MOST_LOSSES = 10
"""Number of losses of workers in a row, in set-up or before a further step is done, at which a run ends."""


class WorkersLost(Exception):
    """Workers are lost, or have come: the run goes on from its last commit."""


def check_losses(number: int, lost: WorkersLost) -> None:
    """Raise ResourceError if workers were lost so often in a row that they will be again."""
    if number == MOST_LOSSES:
        raise ResourceError(
            f"workers were lost {number} times before a further step was done ({lost}); look in their logs "
            "why, such as memory; what is done is committed: start it again to go on"
        ) from lost
