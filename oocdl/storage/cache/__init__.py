"""The memory tier: it counts every byte of chunks and running units, and spills what has no room."""
