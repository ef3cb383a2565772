"""The memory tier: it counts every byte of chunks and running units, and spills what has no room.

The tier reserves memory all or nothing, ``ledger`` decides which chunk leaves first, and I/O threads
move chunks to the spill store and back.
"""
