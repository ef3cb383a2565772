"""Transforms: each takes a graph and returns one. The last graph of a recipe is verified, and where it is not
sound, those before it, so that the transform at fault is named.

One file a transform, in the order of the recipe: gradients, canonical form, bfloat16, stored
factors, channels last.
"""
