"""Data in and out: ``oocdl.data.convert("Dataset001_Brain", "brain.zarr")``."""

from oocdl.data.conversion import convert

__all__ = ["convert"]
