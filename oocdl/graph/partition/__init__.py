"""Layers, and how they are cut.

Which nodes run together and which values are stored, by the fewest bytes moved; which axes are cut
together; and the region of every operand that a shard needs.
"""
