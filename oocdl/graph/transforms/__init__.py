"""Transforms: each takes a graph and returns one, and is verified after it ran.

One file a transform, in the order of the recipe: gradients, canonical form, bfloat16, stored
factors, channels last.
"""
