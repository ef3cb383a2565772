"""The memory tier: every byte of chunks and running units, counted, and spilled when there is no room.

The tier reserves memory all or nothing; ``eviction`` decides what leaves first; I/O threads move
chunks to the spill store and back.
"""
