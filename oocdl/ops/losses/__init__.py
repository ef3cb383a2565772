"""Losses as nodes, by what they compare: classes, numbers, outputs of several sizes."""
