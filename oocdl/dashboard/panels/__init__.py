"""The parts of a page: each draws one side of a ``View``, and is told when that has something new."""
