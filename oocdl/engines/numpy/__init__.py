"""The NumPy engine: every operator of the vocabulary as its definition says, slow and exact.

It is there to check other engines by, and needs no other runtime.
"""
