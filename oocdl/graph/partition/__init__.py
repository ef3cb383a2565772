"""Forms layers and cuts them into shards.

It decides which nodes run together and which values are stored, by the fewest bytes moved; finds the axes
that are cut together; and computes the region of every operand that a shard needs.
"""
