"""Engines: programs to functions of arrays. See README.md."""
