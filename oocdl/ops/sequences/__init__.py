"""Operators along a sequence: attention."""
