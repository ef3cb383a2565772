"""Data in and out: ``oocdl.data.convert("Dataset001_Brain", "brain.zarr")``."""

from oocdl.data.conversion import convert
from oocdl.data.dataset_writer import write

__all__ = ["convert", "write"]
