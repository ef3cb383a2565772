"""``fit``, ``open`` and ``plan``: from what the user asked for to a run on disk."""
