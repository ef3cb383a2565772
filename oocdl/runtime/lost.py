"""The exception that says that workers of a run are not what they were."""

from __future__ import annotations


class WorkersLost(Exception):
    """Workers are lost, or have come: the run goes on from its last commit."""
