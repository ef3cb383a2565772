"""Operators whose result looks at windows of an operand: convolutions, pooling, resampling."""
