"""Engines: what turns a program into a function on NumPy arrays."""
