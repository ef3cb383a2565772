"""Bytes: the memory tier and its spill, runs on disk, and datasets.

``cache`` is what a pass works on, ``run`` is what survives, ``dataset`` is what the user brought.
Everything is a chunk, counted in bytes.
"""
