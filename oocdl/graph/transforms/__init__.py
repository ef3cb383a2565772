"""Transforms: each takes a graph and returns one, which is verified."""
